"""Servers of the test run, and the settings that point at them."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
from django.core.signals import request_finished
from django.db import close_old_connections
from pytest_django.plugin import blocking_manager_key

from django_distlock import locks
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redlock import RedlockBackend
from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.testing.tools import WAYS, calling
from django_distlock.unique import options
from example_project.valkey import Valkey
from tests.support import certificates
from tests.support import mariadb as mariadb_server
from tests.support import postgres as postgres_server
from tests.support import rabbitmq as rabbitmq_server
from tests.support import zookeeper as zookeeper_server
from tests.support.callers import Caller
from tests.support.cluster import Cluster
from tests.support.databases import end_sessions, known_database, make_databases, quick_flushes
from tests.support.inside import client_of, forget_what_is_left
from tests.support.mariadb import MariaDB
from tests.support.mysql_driver import is_driver_there
from tests.support.postgres import Postgres
from tests.support.programs import Programs
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.requirements import left_out, missing
from tests.support.stores import DATABASE, LOCMEM, REDIS, REDIS_CLUSTER, REDLOCK, ZOOKEEPER
from tests.support.terminal import Terminal
from tests.support.tools import PATIENCE, backend_on, eventually, renewer_of, threads_of

pytest_plugins = ["tests.support.forked_run", "tests.support.quick_redis"]

# As the plugin does where it is installed
pytest.register_assert_rewrite(
    *(
        f"django_distlock.testing.{name}"
        for name in ("contract", "exchange_contract", "runs_contract", "slots_contract")
    )
)

# How fast examples are made says more about what else the machine does.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")

# Each context of TLS reads them, for connections that may be encrypted, too: 40 ms of the processor. Tests trust no
# authority but their own.
os.environ["SSL_CERT_FILE"] = os.devnull

# On a disk, a tenth of what tests with files cost the processor goes into making and removing them.
MEMORY, NEEDED = Path("/dev/shm"), 6 << 30  # bytes, for the files of 32 processes with a server of each kind
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY, os.W_OK)
    and shutil.disk_usage(MEMORY).free > NEEDED
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC  # what is built there could not run
):
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)

# What nohup or the background of a script ignores, programs under test would ignore, too. They inherit no handler.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

# Of real programs and topologies, and of random runs. Modules elsewhere that wait for servers or for time to pass say
# so themselves; the rest is done in a minute or two: -m "not slow".
SLOW = ("backends/redis/cluster", "backends/redis/sentinel", "processes", "simulation")
# Of topologies, fleets and what is planted, which depend least on the versions of Python, Django, redis-py and Celery:
# CI runs them on one of each. Modules elsewhere say so themselves.
ONCE = ("backends/redis/cluster", "backends/redlock", "backends/zookeeper", "processes", "simulation")
TESTS = Path(__file__).parent
SELDOM = "--hz", "2"  # a server looks after itself, which is all that most of them do most of the time; default: 10


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for path, tests in groupby(items, key=lambda item: item.path):
        folder = path.parent.relative_to(TESTS)
        marks = ["slow"] * (folder.as_posix() in SLOW) + ["once"] * any(map(folder.is_relative_to, ONCE))
        for item in tests:
            for mark in marks:
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives to the end. Nobody looks at it for garbage, neither now nor in the tests that do so."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)  # the rest is small, and what each test makes is mostly gone with it
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    if session.config.getoption("processes") != "0" and session.items and not session.config.option.collectonly:
        # Processes are forked from this one, with the databases.
        make_databases(session.config.stash[blocking_manager_key])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # below all else
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    if without := left_out(str(report.longrepr[-1]) for report in skipped):
        terminalreporter.write_line(f"Left out for want of programs: {without}", yellow=True)


@pytest.fixture(autouse=True)
def unique_aliases(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of no unique tasks but those of the test, for system checks: the process may have loaded tasks of any test."""
    aliases: set[str] = set()
    monkeypatch.setattr(options, "unique_aliases", aliases)
    monkeypatch.setattr(options, "task_backends", set())
    return aliases


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Nobody asks stores that the tests of a module have ended for what those tests left there.

    Else other tests would read of it, and the exit would wait for each store that may fail over.
    """
    yield
    forget_what_is_left()


@pytest.fixture(scope="session", autouse=True)
def patient_databases() -> Iterator[None]:
    """A busy machine is no outage: only locks of tests that name a ``timeout`` give their database up sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseBackend, "options", {**DatabaseBackend.options, "timeout": PATIENCE})
        yield


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """The server of this test process; its own, on a socket in its own folder."""
    with Valkey(*SELDOM) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """One of the module's own: its workers go on while tests come and go."""
    with Valkey(*SELDOM) as server:
        yield server


@pytest.fixture(scope="session")
def postgres(folder_of_run: Path) -> Iterator[Postgres]:
    """The PostgreSQL of this test process."""
    if (folder := postgres_server.programs()) is None:
        missing("postgresql", "no initdb and postgres found; install PostgreSQL's server package")
    with Postgres(folder, template=folder_of_run / "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The MariaDB of this test process."""
    if not is_driver_there():
        missing("mariadb", "no driver; install mysqlclient or PyMySQL")
    if (program := mariadb_server.program()) is None:
        missing("mariadb", "no mariadbd found; install the package mariadb-server-core")
    with MariaDB(program) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The RabbitMQ of this test process."""
    if (programs := rabbitmq_server.programs()) is None:
        missing("rabbitmq", "no rabbitmq-server and epmd found; install the package rabbitmq-server")
    with RabbitMQ(*programs) as server:
        yield server


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any) -> Iterator[None]:
    with quick_flushes(make_databases(django_db_blocker)):
        yield


@pytest.fixture
def sqlite_database(tmp_path: Path, django_db_blocker: Any) -> Iterator[dict[str, Any]]:
    """The alias ``locks`` is a new SQLite file."""
    file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.sqlite3")}
    with django_db_blocker.unblock(), known_database(file):
        yield file


@pytest.fixture
def postgres_database(postgres: Postgres, django_db_blocker: Any) -> Iterator[dict[str, Any]]:
    """The alias ``locks`` is PostgreSQL, with an empty table, and no session but the one by which tests look at it."""
    with django_db_blocker.unblock(), known_database(postgres.settings(), keeps=True):
        end_sessions()
        yield postgres.settings()


@pytest.fixture
def mariadb_database(mariadb: MariaDB, django_db_blocker: Any) -> Iterator[dict[str, Any]]:
    """The alias ``locks`` is MariaDB, with an empty table."""
    with django_db_blocker.unblock(), known_database(mariadb.settings(), keeps=True):
        yield mariadb.settings()


def database_locks(settings: Any) -> Iterator[DatabaseBackend]:
    options = dict(DatabaseBackend.options)  # also for programs that are given these settings
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "locks", "OPTIONS": options}}
    backend = locks["default"]
    renewer = renewer_of(backend)  # a test may set up others since
    yield backend
    eventually(lambda: not renewer.is_cleaning)
    locks.close()


@pytest.fixture
def sqlite_locks(sqlite_database: Any, settings: Any, long_calls: None) -> Iterator[DatabaseBackend]:
    yield from database_locks(settings)


@pytest.fixture
def postgres_locks(postgres_database: Any, settings: Any, long_calls: None) -> Iterator[DatabaseBackend]:
    yield from database_locks(settings)


@pytest.fixture
def mariadb_locks(mariadb_database: Any, settings: Any, long_calls: None) -> Iterator[DatabaseBackend]:
    yield from database_locks(settings)


@pytest.fixture(scope="session")
def client_of_valkey(valkey: Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url, socket_timeout=5, decode_responses=True) as client:
        assert client.info("server")["process_id"] == valkey.process.pid
        yield client


@pytest.fixture
def store(client_of_valkey: redis.Redis) -> redis.Redis:
    """A client of the emptied server, to look behind the backend's back."""
    client_of_valkey.flushall()
    return client_of_valkey


@pytest.fixture
def valkey_locks(valkey: Valkey, store: redis.Redis, settings: Any, long_calls: None) -> Iterator[RedisBackend]:
    """``locks["default"]`` is the emptied server."""
    timeouts = {"socket_timeout": PATIENCE, "socket_connect_timeout": PATIENCE}
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": valkey.url, "OPTIONS": timeouts}}
    yield locks["default"]
    locks.close()


@pytest.fixture
def program(valkey: Valkey, valkey_locks: RedisBackend) -> Iterator[Programs]:
    """Starts Python programs that share the store; ends what is left of them."""
    programs = Programs(valkey.url)
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def redlock_servers() -> Iterator[dict[Valkey, redis.Redis]]:
    """Servers of this test process that know nothing of each other, each with a client."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Valkey(*SELDOM)) for _ in range(5)]
        yield {
            server: stack.enter_context(redis.Redis.from_url(server.url, socket_timeout=PATIENCE)) for server in servers
        }


@pytest.fixture
def five_valkeys(redlock_servers: dict[Valkey, redis.Redis]) -> list[Valkey]:
    """The same, emptied, for tests that leave them running."""
    for client in redlock_servers.values():
        client.flushall()
        client.script_flush()
    return [*redlock_servers]


@pytest.fixture
def redlock_locks(five_valkeys: list[Valkey], settings: Any, long_calls: None) -> Iterator[RedlockBackend]:
    """``locks["default"]`` is a quorum of five emptied servers, which fail by what they answer alone."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {
            "BACKEND": REDLOCK,
            "LOCATION": [server.url for server in five_valkeys],
            "OPTIONS": {"node_timeout": PATIENCE, "socket_connect_timeout": PATIENCE},
        }
    }
    yield locks["default"]
    locks.close()


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[Cluster]:
    """Three primaries with a replica each. Tests that break it say that it shall fail over, and heal it."""
    with Cluster() as cluster:
        cluster.be_patient()
        yield cluster


@pytest.fixture
def cluster_locks(valkey_cluster: Cluster, settings: Any) -> Iterator[RedisBackend]:
    """``locks["default"]`` is the emptied Cluster."""
    valkey_cluster.flush()
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS_CLUSTER, "LOCATION": valkey_cluster.urls[:2]}}
    yield locks["default"]
    locks.close()


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[zookeeper_server.Server]:
    """The ZooKeeper of this test process."""
    with zookeeper_server.Server(zookeeper_server.needed_program()) as server:
        yield server


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.needed(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def zookeeper_entry(zookeeper: zookeeper_server.Server) -> dict[str, Any]:
    """An entry of the settings whose store is empty: each test has a path of its own there."""
    location = f"{zookeeper.address}/test-{secrets.token_hex(4)}"
    # Longer than the TTLs of tests, which are kept by their process then, as those of other stores are; and the machine
    # that runs tests is busy.
    return {"BACKEND": ZOOKEEPER, "LOCATION": location, "OPTIONS": {"timeout": 120.0, "request_timeout": PATIENCE}}


@pytest.fixture
def zookeeper_locks(zookeeper_entry: dict[str, Any], settings: Any) -> Iterator[ZooKeeperBackend]:
    settings.DISTRIBUTED_LOCKS = {"default": zookeeper_entry}
    backend = locks["default"]
    renewer = renewer_of(backend)  # a test may set up others since
    yield backend
    eventually(lambda: not renewer.is_cleaning)
    for one in (backend, locks["default"]):  # also where a test leaves something held
        if isinstance(one, ZooKeeperBackend):
            client_of(one).close()
    locks.close()
    eventually(lambda: not threads_of("zookeeper") + threads_of("closing"))


@pytest.fixture
def long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers who wait for milliseconds or not at all get their answer from a busy machine, too."""
    monkeypatch.setattr(Timing, "shortest_call", PATIENCE)


@pytest.fixture
def locmem_locks(settings: Any) -> Iterator[BaseLockBackend]:
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
    yield locks["default"]
    locks.close()


backend = backend_on("locmem")  # what is above the stores is tested there, and on each by a few: on_stores()


@pytest.fixture
def proxy(valkey: Valkey, store: redis.Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with Proxy(valkey.socket, tmp_path_factory.mktemp("p")) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: Proxy, settings: Any, request: pytest.FixtureRequest, long_calls: None) -> Iterator[RedisBackend]:
    """``locks["default"]`` behind the proxy. A busy machine is no outage; see ``GIVES_UP_SOON``."""
    seconds = getattr(request, "param", PATIENCE)
    timeouts = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": proxy.url, "OPTIONS": timeouts}}
    backend = locks["default"]
    renewer = renewer_of(backend)  # a test may set up others since
    yield backend
    proxy.hang = False
    proxy.accept()
    eventually(lambda: not renewer.is_cleaning)
    locks.close()


@pytest.fixture(params=WAYS)
def calls(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Wraps an object so that ``wrapped.method()`` calls the method, or its ``a`` twin."""
    with calling(request.param) as wrap:
        yield wrap


@pytest.fixture
def callers() -> Iterator[Callable[..., Caller]]:
    """Starts callers, and ends those that a failed test leaves."""
    started: list[Caller] = []

    def start(*args: Any, **options: Any) -> Caller:
        started.append(Caller(*args, **options))
        return started[-1]

    yield start
    for one in started:
        one.go.set()
        one.cancel()
    for one in started:
        one.thread.join(2 * PATIENCE)
        assert not one.thread.is_alive()


@pytest.fixture
def keep_connections() -> Iterator[None]:
    """For responses that are closed by hand: Django looks after its database connections then, but in its client."""
    request_finished.disconnect(close_old_connections)
    yield
    request_finished.connect(close_old_connections)


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., Valkey]]:
    """Starts further servers with arguments of their own."""
    servers: list[Valkey] = []

    def start(*arguments: str) -> Valkey:
        servers.append(Valkey(*arguments).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def terminal(valkey: Valkey, store: redis.Redis) -> Iterator[Terminal]:
    """Its commands keep their locks in the emptied server."""
    terminal = Terminal(valkey.url)
    yield terminal
    terminal.close()


@pytest.fixture
def pages(settings):
    """Django's admin, at /admin/."""
    from tests.support.admin_pages import use_admin

    use_admin(settings)


@pytest.fixture
def operator(pages, client):
    """Somebody who may do everything, logged in."""
    from django.contrib.auth.models import User

    client.force_login(User.objects.create_superuser("operator"))
    return client


@pytest.fixture(scope="session")
def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing("chromium", "install the package chromium")
    return found
