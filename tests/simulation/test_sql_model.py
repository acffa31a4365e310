"""The models of databases answer as the real servers do, word for word, in one scenario with each fault."""

from __future__ import annotations

import contextlib
import time
from functools import partial

import psycopg
import pytest

from django_distlock.backends.common.state import HELD, Attempt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database.fast_path import FastPath, has_returning
from django_distlock.backends.database.sql import BEGIN, TABLE, Statements
from tests.support.databases import known_database
from tests.support.mariadb import MariaDB, program
from tests.support.mysql_driver import is_driver_there
from tests.support.postgres import Postgres, programs
from tests.support.requirements import missing
from tests.support.tools import eventually

from .engine.network import SocketModule
from .sql.mariadb import MariaDBServer
from .sql.postgres import PostgresServer
from .sql.psycopg import Connection
from .sql.sessions import ModelSessions, RealSessions

TTL = 3_000_000_000
ONE, OTHER, THIRD = "a" * 26, "b" * 26, "c" * 26
READ_COMMITTED = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
UPDATE = f"UPDATE {TABLE} SET holder = %s WHERE name = %s"


class Steps:
    """What sessions do: the package's own statements, and those of others who hold rows."""

    def __init__(self, vendor):
        self.vendor = vendor
        self.sql = Statements(vendor, Timing(), has_returning=has_returning(vendor))
        self.fast = FastPath(vendor, Timing()) if has_returning(vendor) else None

    def acquire(self, name, token, *, queue=False, place=0):
        attempt = Attempt(token, TTL, "holder", queue, place, "inbox")
        return lambda connection: self.fast.acquire(connection, name, attempt)

    def release(self, name, token):
        return lambda connection: self.fast.release(connection, name, token)

    def renew(self, *leases):
        return lambda connection: self.sql.renew(connection, leases, TTL)

    def look(self, *names):
        return lambda connection: self.sql.look(connection, names)

    def names(self, prefix):
        return lambda connection: self.sql.names(connection, prefix, b"", 10)

    def position(self, name, token):
        return lambda connection: self.sql.position(connection, name, token, 1)

    def take(self, name, token):
        """By compare-and-swap."""
        return self._change(name, lambda row: row.grant(token, HELD, TTL, "holder"))

    def change_stale(self, name):
        """The row has another version."""
        return self._change(name, lambda row: setattr(row, "version", row.version - 1))

    def insert(self, name):
        """As if there were no row."""
        return self._change(name, lambda row: setattr(row, "version", 0))

    def _change(self, name, change):
        def work(connection):
            row = self.sql.read(connection, name)
            change(row)
            return self.sql.write(connection, name, row)

        return work

    def set_holder(self, name, holder):
        return self.execute(UPDATE, holder, name)

    def holder(self, name):
        def work(connection):
            return (self.sql.look(connection, [name])[name])[-1]

        return work

    def execute(self, sql, *parameters):
        def work(connection):
            with connection.cursor() as cursor:
                binary = connection.Database.Binary
                cursor.execute(sql, [binary(one) if isinstance(one, bytes) else one for one in parameters])
                return cursor.rowcount

        return work


def rows_are_locked(sessions, steps):
    """Statements wait for rows that others have changed, and see them as they are afterwards."""
    do, begin, end = sessions.do, sessions.begin, sessions.end
    for last in ("COMMIT", "ROLLBACK"):
        do("other", steps.execute("BEGIN"))
        do("other", steps.set_holder(b"a", f"other {last}"))
        do("third", steps.holder(b"a"))  # does not wait, and sees what was committed
        begin("one", steps.set_holder(b"a", "one"))
        do("other", steps.execute(last))
        end("one")
        do("third", steps.holder(b"a"))
    do("other", steps.execute("BEGIN"))
    do("other", steps.execute(f"UPDATE {TABLE} SET version = version + 1 WHERE name = %s", b"a"))
    begin("one", steps.renew((b"a", ONE)))  # waits, and finds the row as it is then
    do("other", steps.execute("COMMIT"))
    end("one")


def rows_are_made(sessions, steps):
    """Who makes a row waits for whoever has made it and has not committed yet."""
    do, begin, end = sessions.do, sessions.begin, sessions.end
    for last in ("COMMIT", "ROLLBACK"):
        do("other", steps.execute("BEGIN"))
        do("other", steps.take(last.encode(), OTHER))
        begin("one", steps.take(last.encode(), ONE))
        do("other", steps.execute(last))
        end("one")
        do("third", steps.look(last.encode()))


def limits(sessions, steps, settings):
    """``settings``: with a limit, and without."""
    do = sessions.do
    for setting, (limited, unlimited) in settings.items():
        do("other", steps.execute("BEGIN"))
        do("other", steps.set_holder(b"a", "other"))
        do("one", steps.execute(f"SET {setting} = {limited}"))
        do("one", steps.renew((b"a", ONE)))
        do("one", steps.execute(f"SET {setting} = {unlimited}"))
        do("other", steps.execute("ROLLBACK"))


def deadlock(sessions, steps, late_check="SELECT 1", early_check="SELECT 1"):
    """The one that waits second finds it. The checks set when a server looks for it that does not look at once."""
    do, begin, end = sessions.do, sessions.begin, sessions.end
    do("one", steps.execute(late_check))
    do("one", steps.execute("BEGIN"))
    do("other", steps.execute("BEGIN"))
    do("one", steps.set_holder(b"a", "one has changed"))
    do("other", steps.set_holder(b"b", "other has changed"))
    begin("one", steps.set_holder(b"b", "one"))
    do("other", steps.execute(early_check))
    sessions.start("other", steps.set_holder(b"a", "other"))
    end("other")
    end("one")
    do("one", steps.execute("SELECT 1"))
    do("one", steps.execute("ROLLBACK"))
    do("other", steps.execute("ROLLBACK"))
    do("third", steps.holder(b"a"))


def sessions_end(sessions, steps, terminate):
    """Killed and dead sessions roll back, but a statement that waits goes on without its client."""
    do, begin, end = sessions.do, sessions.begin, sessions.end
    do("killed", steps.execute("BEGIN"))
    do("killed", steps.set_holder(b"a", "killed"))
    begin("waiting", steps.set_holder(b"a", "waiting"))
    do("third", terminate(sessions, "waiting"))
    end("waiting")
    do("waiting", steps.holder(b"a"))
    do("third", terminate(sessions, "killed"))
    do("third", steps.holder(b"a"))
    do("dead", steps.execute("BEGIN"))
    do("dead", steps.set_holder(b"a", "dead"))
    sessions.close("dead")
    do("one", steps.set_holder(b"b", "was not kept waiting for ever"))
    do("one", steps.set_holder(b"a", "after the dead"))
    do("third", steps.holder(b"a"))


def idle_in_transaction(sessions, steps):
    """A process that stops in the midst of one does not keep its rows."""
    do = sessions.do
    for statement in BEGIN[steps.vendor]:
        do("idle", steps.execute(statement))
    do("idle", steps.set_holder(b"a", "idle"))
    do("one", steps.set_holder(b"a", "after the idle"))
    do("idle", steps.execute("COMMIT"))
    do("third", steps.holder(b"a"))


def crash(sessions, steps):
    """What was committed is there afterwards; connections are broken."""
    do, begin, end = sessions.do, sessions.begin, sessions.end
    do("one", steps.set_holder(b"a", "committed"))
    do("other", steps.execute("BEGIN"))
    do("other", steps.set_holder(b"a", "not committed"))
    begin("one", steps.set_holder(b"a", "one"))
    sessions.restart()
    end("one")
    do("one", steps.holder(b"a"))
    do("other", steps.execute("COMMIT"))
    do("late", steps.holder(b"a"))
    sessions.fill()


def on_postgresql(sessions):
    steps = Steps("postgresql")
    do = sessions.do
    do("one", steps.acquire(b"a", ONE))  # there is no such row yet
    do("one", steps.take(b"a", ONE))
    do("other", steps.acquire(b"a", OTHER))
    waiting = do("other", steps.acquire(b"a", OTHER, queue=True))
    do("third", steps.position(b"a", OTHER))
    do("third", lambda connection: steps.sql.count_waiters(connection, [b"a", b"b"]))
    do("other", steps.execute('LISTEN "distlock_inbox"'))
    do("one", steps.release(b"a", ONE))
    do("other", notification)
    do("other", steps.acquire(b"a", OTHER, queue=True, place=waiting.place))
    do("other", steps.renew((b"a", OTHER), (b"z", ONE)))
    do("third", steps.look(b"a", b"b"))
    do("third", steps.names(b""))
    do("other", steps.release(b"a", ONE))
    do("other", steps.release(b"a", OTHER))
    do("one", steps.acquire(b"a", ONE))
    do("one", steps.take(b"a", ONE))
    do("one", steps.take(b"b", ONE))
    do("other", steps.change_stale(b"a"))
    do("other", steps.insert(b"a"))
    rows_are_locked(sessions, steps)

    rows_are_made(sessions, steps)
    limits(sessions, steps, {"lock_timeout": ("200", "0"), "statement_timeout": ("200", "0")})
    deadlock(sessions, steps, "SET deadlock_timeout = 600000", "SET deadlock_timeout = 50")
    do("one", steps.execute("SET default_transaction_read_only = on"))
    do("one", steps.renew((b"a", ONE)))
    do("one", steps.acquire(b"a", OTHER))
    do("one", steps.look(b"a"))
    do("one", steps.execute("SET default_transaction_read_only = off"))
    sessions_end(sessions, steps, terminate)
    idle_in_transaction(sessions, steps)
    crash(sessions, steps)


def on_mariadb(sessions):
    steps = Steps("mysql")
    do = sessions.do
    do("one", steps.take(b"a", ONE))
    do("one", steps.take(b"b", ONE))
    do("other", steps.change_stale(b"a"))
    do("other", steps.insert(b"a"))
    do("third", steps.position(b"a", OTHER))
    do("third", lambda connection: steps.sql.count_waiters(connection, [b"a", b"b"]))
    do("one", steps.renew((b"a", ONE), (b"z", ONE)))
    do("third", steps.look(b"a", b"b"))
    do("third", steps.names(b""))
    rows_are_locked(sessions, steps)
    rows_are_made(sessions, steps)
    limits(sessions, steps, {"innodb_lock_wait_timeout": ("1", "50"), "max_statement_time": ("0.2", "0")})
    deadlock(sessions, steps)
    do("one", steps.execute("SET SESSION TRANSACTION READ ONLY"))
    do("one", steps.renew((b"a", ONE)))
    do("one", steps.look(b"a"))
    do("one", steps.execute("SET SESSION TRANSACTION READ WRITE"))
    sessions_end(sessions, steps, kill)
    idle_in_transaction(sessions, steps)
    crash(sessions, steps)


def kill(sessions, name):
    return lambda connection: connection.connection.query(f"KILL {sessions.raw[name].thread_id()}")


def notification(connection):
    """What a session that listens has heard."""
    connection.connection.execute("SELECT 1")
    return [found.extra for found in iter(connection.connection.pgconn.notifies, None)]


def terminate(sessions, name):
    def work(connection):
        pid = sessions.raw[name].info.backend_pid
        return connection.connection.execute("SELECT pg_terminate_backend(%s) FROM pg_backend_pid()", [pid]).fetchone()

    return work


def psycopg_twin(network):
    from django.db.backends.postgresql.psycopg_any import get_adapters_template

    context = get_adapters_template(True, None)
    return Connection(network, host="10.0.0.1", port="5432", connect_timeout=5, context=context)


@pytest.fixture(scope="module")
def postgres_server(folder_of_run):
    if (folder := programs()) is None:
        missing("postgresql", "no initdb and postgres found; install PostgreSQL's server package")
    with Postgres(folder, template=folder_of_run / "postgres") as server:
        yield server


@pytest.fixture
def real_postgres(postgres_server, django_db_blocker):
    with django_db_blocker.unblock(), known_database(postgres_server.settings()):
        yield postgres_server


def connect_to(server):
    return psycopg.connect(host=str(server.folder), user="tests", dbname="postgres", autocommit=True)


@pytest.mark.seconds(17)
def test_model_of_postgresql_answers_as_the_server(real_postgres):
    def is_waiting(raw):
        with contextlib.closing(connect_to(real_postgres)) as other:
            sql = "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s"
            return other.execute(sql, [raw.info.backend_pid]).fetchone() == ("Lock",)

    def restart():
        with contextlib.closing(connect_to(real_postgres)) as other:
            other.execute("ALTER SYSTEM SET max_connections = 12")  # soon full
        real_postgres.crash()
        real_postgres.start()

    real = RealSessions(partial(connect_to, real_postgres), psycopg, "postgresql", is_waiting, restart)
    model = ModelSessions(
        lambda network: PostgresServer(network, ("10.0.0.1", 5432)), psycopg_twin, psycopg, "postgresql"
    )
    for sessions in (real, model):
        on_postgresql(sessions)
        sessions.finish()
    assert len(real.outcomes) > 60
    assert "\n".join(model.outcomes) == "\n".join(real.outcomes)


MYSQL = {"database": "tests", "autocommit": True, "client_flag": 2, "init_command": READ_COMMITTED}  # FOUND_ROWS


@pytest.fixture(scope="module")
def mariadb_server():
    if not is_driver_there():
        missing("mariadb", "no driver; install mysqlclient or PyMySQL")
    if (server := program()) is None:
        missing("mariadb", "no mariadbd found; install the package mariadb-server-core")
    with MariaDB(server) as running:
        yield running


@pytest.fixture
def real_mariadb(mariadb_server, django_db_blocker):
    with django_db_blocker.unblock(), known_database(mariadb_server.settings()):
        yield mariadb_server


@pytest.mark.seconds(8)
def test_model_of_mariadb_answers_as_the_server(real_mariadb, monkeypatch):
    import pymysql

    def connect():
        return pymysql.connect(unix_socket=str(real_mariadb.socket), user="root", **MYSQL)

    def ask(sql):
        with contextlib.closing(connect()) as other, other.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchone()

    def is_waiting(raw):
        time.sleep(0.15)  # who asks again within a tenth of a second is told the same again
        where = f"WHERE trx_mysql_thread_id = {raw.thread_id()}"
        return ask(f"SELECT trx_state FROM information_schema.innodb_trx {where}") == ("LOCK WAIT",)

    def restart():
        eventually(lambda: ask("SHOW STATUS LIKE 'Innodb_buffer_pool_pages_dirty'")[1] == "0")
        real_mariadb.crash()
        real_mariadb.start()
        ask("SET GLOBAL max_connections = 10")  # soon full

    def connect_to_model(network):
        monkeypatch.setattr(pymysql.connections, "socket", SocketModule(network))
        monkeypatch.setattr(pymysql.connections, "SSL_ENABLED", False)
        return pymysql.connect(host="10.0.0.1", user="root", **MYSQL)

    real = RealSessions(connect, pymysql, "mysql", is_waiting, restart)
    ask("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    ask("SET GLOBAL innodb_max_dirty_pages_pct_lwm = 0")
    ask("SET GLOBAL innodb_max_dirty_pages_pct = 0")
    on_mariadb(real)
    real.finish()
    model = ModelSessions(
        lambda network: MariaDBServer(network, ("10.0.0.1", 3306)), connect_to_model, pymysql, "mysql"
    )
    on_mariadb(model)
    model.finish()
    assert len(real.outcomes) > 60
    assert "\n".join(model.outcomes) == "\n".join(real.outcomes)
