"""The stores of long runs, and what can happen to each of them."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import redis
from django.db import connections
from redis.backoff import ConstantBackoff
from redis.exceptions import BusyLoadingError, ConnectionError
from redis.retry import Retry

from example_project.valkey import Valkey
from tests.support import mariadb, postgres, zookeeper
from tests.support.cluster import Cluster
from tests.support.databases import known_database
from tests.support.history import left_behind
from tests.support.mysql_driver import is_driver_there
from tests.support.proxy import Proxy
from tests.support.quorum import Quorum
from tests.support.sentinel import Watched
from tests.support.tools import locked_names

RECORDING_REDIS = "tests.support.history.RecordingBackend"
RECORDING_CLUSTER = "tests.support.history.RecordingClusterBackend"
RECORDING_DATABASE = "tests.support.history_in_database.RecordingDatabaseBackend"
RECORDING_ZOOKEEPER = "tests.support.history_in_zookeeper.RecordingZooKeeperBackend"
REDLOCK = "django_distlock.backends.redlock.RedlockBackend"

Heal = Callable[[], None]
Harm = Callable[[random.Random], Heal]  # begins a fault, and returns what ends it


class Store:
    """Servers, the settings of those who use them, and faults.

    ``loses_writes``: a failover may forget a lease, so two holders for at most a TTL are counted, not condemned.
    """

    locks: Mapping[str, Any]
    databases: Mapping[str, Any] = MappingProxyType({})
    loses_writes = False

    def harms(self) -> dict[str, Harm]:
        raise NotImplementedError

    def left_behind(self) -> list[str]:
        """What is in the store though nobody uses it."""
        raise NotImplementedError


def stopped(pid: int) -> Heal:
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def nothing() -> None:
    """For faults that are over at once."""


class OneRedis(Store):
    """A server that keeps its data, behind a proxy that loses replies."""

    def __init__(self, server: Valkey, proxy: Proxy) -> None:
        self._server, self._proxy = server, proxy
        self.locks = {"BACKEND": RECORDING_REDIS, "LOCATION": proxy.url}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[OneRedis]:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            durable = "--appendonly", "yes", "--appendfsync", "no"
            with Valkey(*durable, folder=Path(folder)) as server, tempfile.TemporaryDirectory(prefix="p-") as socket:
                with Proxy(server.socket, Path(socket)) as proxy:
                    yield cls(server, proxy)

    def harms(self) -> dict[str, Harm]:
        return {
            "server stopped": lambda _: stopped(self._server.process.pid),
            "server restarted": self._restart,
            "connections refused": self._refuse,
            "requests hang": self._hang,
            "replies lost": self._lose_replies,
            "connections killed": self._kill_connections,
            "scripts flushed": self._flush_scripts,
        }

    def _restart(self, chance: random.Random) -> Heal:
        self._server.process.terminate()
        self._server.process.wait()
        self._server.socket.unlink(missing_ok=True)
        return lambda: void(self._server.start())

    def _refuse(self, chance: random.Random) -> Heal:
        self._proxy.refuse()
        return self._proxy.accept

    def _hang(self, chance: random.Random) -> Heal:
        self._proxy.hang = True

        def end() -> None:
            self._proxy.hang = False

        return end

    def _lose_replies(self, chance: random.Random) -> Heal:
        self._proxy.cut_reply("EVALSHA", chance.randint(3, 30))
        return self._proxy.to_cut.clear

    def _kill_connections(self, chance: random.Random) -> Heal:
        with self._client() as client:
            client.client_kill_filter(_type=chance.choice(("normal", "pubsub")), skipme=True)
        return nothing

    def _flush_scripts(self, chance: random.Random) -> Heal:
        with self._client() as client:
            client.script_flush()
        return nothing

    def _client(self) -> redis.Redis:
        """Waits for a server that was started a moment ago and still reads its data."""
        patient = Retry(ConstantBackoff(0.1), 100, supported_errors=(BusyLoadingError, ConnectionError))
        return redis.Redis.from_url(self._server.url, socket_timeout=5, decode_responses=True, retry=patient)

    def left_behind(self) -> list[str]:
        with self._client() as client:
            return left_behind(client.keys())


class Sentinels(Store):
    loses_writes = True

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self.locks = {"BACKEND": RECORDING_REDIS, "OPTIONS": watched.options}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Sentinels]:
        careful = "min-replicas-to-write 1", "min-replicas-max-lag 2"
        with Watched(replicas=2, server=careful) as watched:
            yield cls(watched)

    def harms(self) -> dict[str, Harm]:
        return {
            "master killed": self._kill_master,
            "master stopped": self._stop_master,
            "failover by command": self._fail_over,
            "replicas stopped": self._stop_replicas,
            "sentinel stopped": self._stop_sentinel,
            "sentinel killed": self._kill_sentinel,
        }

    def _kill_master(self, chance: random.Random) -> Heal:
        master = self._watched.master
        master.kill()
        return lambda: self._settle(lambda: void(master.start()), master)

    def _stop_master(self, chance: random.Random) -> Heal:
        master = self._watched.master
        master.stop()
        return lambda: self._settle(master.go_on, master)

    def _fail_over(self, chance: random.Random) -> Heal:
        with suppress(redis.ResponseError):  # one is going on
            self._watched.fail_over()
        return nothing

    def _stop_replicas(self, chance: random.Random) -> Heal:
        master = self._watched.master
        replicas = [server for server in self._watched.servers if server is not master]
        for replica in replicas:
            replica.stop()

        def end() -> None:
            for replica in replicas:
                replica.go_on()

        return end

    def _stop_sentinel(self, chance: random.Random) -> Heal:
        sentinel = chance.choice(self._watched.sentinels)
        sentinel.stop()
        return sentinel.go_on

    def _kill_sentinel(self, chance: random.Random) -> Heal:
        sentinel = chance.choice(self._watched.sentinels)
        sentinel.kill()
        return lambda: void(sentinel.start())

    def _settle(self, bring_back: Heal, old: Any) -> None:
        """The former master comes back when another one is there, as a supervisor's restart takes its time."""
        self._watched.wait_for_another(old)
        bring_back()

    def left_behind(self) -> list[str]:
        with self._watched.master.client() as client:
            return left_behind(client.keys())


class RedisCluster(Store):
    loses_writes = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.locks = {"BACKEND": RECORDING_CLUSTER, "LOCATION": cluster.urls[:3]}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[RedisCluster]:
        with Cluster() as cluster:
            yield cls(cluster)

    def harms(self) -> dict[str, Harm]:
        return {
            "primary killed": self._kill,
            "primary stopped": self._stop,
            "failover by command": self._fail_over,
            "slots moved": self._move,
            "replica stopped": self._stop_replica,
            "connections killed": self._kill_connections,
        }

    def _kill(self, chance: random.Random) -> Heal:
        chance.choice(self._cluster.primaries).kill()
        return self._cluster.heal

    def _stop(self, chance: random.Random) -> Heal:
        chance.choice(self._cluster.primaries).stop()
        return self._cluster.heal

    def _fail_over(self, chance: random.Random) -> Heal:
        self._cluster.fail_over(chance.choice(self._cluster.primaries))
        return self._cluster.wait_until_whole

    def _move(self, chance: random.Random) -> Heal:
        slots = [self._slot_of(key) for key in self._cluster.all_keys() if "{" in key]
        for slot in sorted(set(slots))[:8]:
            to = [node for node in self._cluster.primaries if node is not self._cluster.owner(slot)]
            self._cluster.move(slot, chance.choice(to))
        return nothing

    def _slot_of(self, key: str) -> int:
        return int(self._cluster.primaries[0].cluster("KEYSLOT", key))

    def _stop_replica(self, chance: random.Random) -> Heal:
        primaries = self._cluster.primaries
        chance.choice([node for node in self._cluster.nodes if node not in primaries]).stop()
        return self._cluster.heal

    def _kill_connections(self, chance: random.Random) -> Heal:
        for node in self._cluster.primaries:
            node.client.client_kill_filter(_type=chance.choice(("normal", "pubsub")), skipme=True)
        return nothing

    def left_behind(self) -> list[str]:
        return left_behind(self._cluster.all_keys())


class FiveNodes(Store):
    """A node that lost its data stays away for the longest TTL, as the documentation asks."""

    LONGEST_TTL = 3.0

    def __init__(self, quorum: Quorum) -> None:
        self._quorum = quorum
        self.locks = {"BACKEND": REDLOCK, "LOCATION": quorum.urls, "OPTIONS": {"retry_delay": (0.005, 0.05)}}

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[FiveNodes]:
        with Quorum() as quorum:
            yield cls(quorum)

    def harms(self) -> dict[str, Harm]:
        return {
            "one killed": lambda chance: self._kill(chance, 1),
            "two killed": lambda chance: self._kill(chance, 2),
            "one stopped": lambda chance: self._stop(chance, 1),
            "two stopped": lambda chance: self._stop(chance, 2),
            "three stopped": lambda chance: self._stop(chance, 3),
            "connections killed": self._kill_connections,
        }

    def _kill(self, chance: random.Random, number: int) -> Heal:
        began = time.monotonic()
        nodes = chance.sample(range(5), number)
        for node in nodes:
            self._quorum.kill(node)

        def end() -> None:
            time.sleep(max(0.0, began + self.LONGEST_TTL - time.monotonic()))
            for node in nodes:
                self._quorum.start(node)

        return end

    def _stop(self, chance: random.Random, number: int) -> Heal:
        nodes = chance.sample(range(5), number)
        for node in nodes:
            self._quorum.stop(node)

        def end() -> None:
            for node in nodes:
                self._quorum.go_on(node)

        return end

    def _kill_connections(self, chance: random.Random) -> Heal:
        with self._quorum.clients() as clients:
            for client in clients.values():
                client.client_kill_filter(_type="normal", skipme=True)
        return nothing

    def left_behind(self) -> list[str]:
        return sorted({key for keys in self._quorum.all_keys() for key in left_behind(keys)})


class Database(Store):
    """One of Django's databases; ``database`` is the entry for DATABASES."""

    def __init__(self, database: dict[str, Any]) -> None:
        self.databases = {"default": {}, "locks": database}
        self.locks = {"BACKEND": RECORDING_DATABASE, "LOCATION": "locks"}

    def left_behind(self) -> list[str]:
        from django_distlock import locks

        return locked_names(locks["default"])


class PostgreSQL(Database):
    def __init__(self, server: postgres.Postgres) -> None:
        super().__init__(server.settings())
        self._server = server

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[PostgreSQL]:
        if (folder := postgres.programs()) is None:
            raise SystemExit("initdb and postgres are not installed.")
        with postgres.Postgres(folder) as server, known_database(server.settings()):
            yield cls(server)

    def harms(self) -> dict[str, Harm]:
        return {
            "sessions ended": self._end_sessions,
            "server stopped": self._stop,
            "server crashed": self._crash,
            "table locked": self._lock_table,
        }

    def _end_sessions(self, chance: random.Random) -> Heal:
        with connections["locks"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        return nothing

    def _stop(self, chance: random.Random) -> Heal:
        """The sessions, in which the statements run, and the process that makes them."""
        with connections["locks"].cursor() as cursor:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname IS NOT NULL")
            sessions = [pid for (pid,) in cursor.fetchall()]
        ends = []
        for pid in (self._server.process.pid, *sessions):
            with suppress(ProcessLookupError):
                ends.append(stopped(pid))

        def end() -> None:
            for go_on in ends:
                with suppress(ProcessLookupError):
                    go_on()

        return end

    def _crash(self, chance: random.Random) -> Heal:
        connections["locks"].close()
        self._server.crash()
        return self._server.start

    def _lock_table(self, chance: random.Random) -> Heal:
        connection = connections["locks"].copy()
        connection.set_autocommit(False)
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLE distlock_lock IN EXCLUSIVE MODE")

        def end() -> None:
            connection.rollback()
            connection.close()

        return end


class MariaDB(Database):
    def __init__(self, server: mariadb.MariaDB) -> None:
        super().__init__(server.settings())
        self._server = server

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[MariaDB]:
        program = mariadb.program()
        if program is None or not is_driver_there():
            raise SystemExit("mariadbd or its driver is not installed.")
        with mariadb.MariaDB(program) as server, known_database(server.settings()):
            yield cls(server)

    def harms(self) -> dict[str, Harm]:
        return {
            "sessions ended": self._end_sessions,
            "server stopped": lambda _: stopped(self._server.process.pid),
            "table locked": self._lock_table,
        }

    def _end_sessions(self, chance: random.Random) -> Heal:
        with connections["locks"].cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user <> ''")
            for (session,) in cursor.fetchall():
                with suppress(Exception):  # it may be gone
                    cursor.execute(f"KILL CONNECTION {session}")
        return nothing

    def _lock_table(self, chance: random.Random) -> Heal:
        connection = connections["locks"].copy()
        with connection.cursor() as cursor:
            cursor.execute("LOCK TABLES distlock_lock READ")
        return connection.close


class SQLite(Database):
    def __init__(self, database: dict[str, Any]) -> None:
        super().__init__(database)
        self._file = f"{database['NAME']}-locks"

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[SQLite]:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            database = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/shop.sqlite3"}
            with known_database(database):
                yield cls(database)

    def harms(self) -> dict[str, Harm]:
        return {"file locked": self._lock_file}

    def _lock_file(self, chance: random.Random) -> Heal:
        import sqlite3

        connection = sqlite3.connect(self._file, isolation_level=None, timeout=10)
        connection.execute("BEGIN IMMEDIATE")

        def end() -> None:
            connection.execute("ROLLBACK")
            connection.close()

        return end


class ZooKeeper(Store):
    """Three servers, each behind a proxy for its clients."""

    def __init__(self, ensemble: zookeeper.Ensemble, proxies: list[zookeeper.TcpProxy]) -> None:
        self._ensemble, self._proxies = ensemble, proxies
        self.locks = {
            "BACKEND": RECORDING_ZOOKEEPER,
            "LOCATION": ",".join(proxy.address for proxy in proxies) + "/soak",
            "OPTIONS": {"timeout": 2.0, "request_timeout": 8.0},
        }

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[ZooKeeper]:
        if (java := zookeeper.program()) is None:
            raise SystemExit("ZooKeeper is not installed.")
        with ExitStack() as stack:
            ensemble = stack.enter_context(zookeeper.Ensemble(java))
            proxies = [stack.enter_context(zookeeper.TcpProxy(server.port)) for server in ensemble.servers]
            yield cls(ensemble, proxies)

    def harms(self) -> dict[str, Harm]:
        return {
            "leader killed": self._kill_leader,
            "leader killed again": self._kill_leader,
            "leader stopped": lambda _: self._stop([self._ensemble.leader]),
            "follower killed": self._kill_follower,
            "follower stopped": lambda chance: self._stop([chance.choice(self._ensemble.followers)]),
            "followers stopped": lambda _: self._stop(self._ensemble.followers),
            "follower cut off": self._cut,
            "clients cut off": self._hang,
            "connections refused": self._refuse,
            "replies lost": self._lose_replies,
        }

    def _kill_leader(self, chance: random.Random) -> Heal:
        self._ensemble.leader.kill()
        return self._ensemble.heal

    def _kill_follower(self, chance: random.Random) -> Heal:
        chance.choice(self._ensemble.followers).kill()
        return self._ensemble.heal

    def _stop(self, servers: Sequence[zookeeper.Server]) -> Heal:
        for server in servers:
            server.stop()
        return self._ensemble.heal

    def _cut(self, chance: random.Random) -> Heal:
        self._ensemble.linked_follower()
        self._ensemble.cut()
        return self._ensemble.heal

    def _hang(self, chance: random.Random) -> Heal:
        hanging = chance.sample(self._proxies, chance.randint(1, 3))
        for proxy in hanging:
            proxy.hang = True

        def end() -> None:
            for proxy in hanging:
                proxy.hang = False

        return end

    def _refuse(self, chance: random.Random) -> Heal:
        refusing = chance.sample(self._proxies, chance.randint(1, 3))
        for proxy in refusing:
            proxy.refuse()

        def end() -> None:
            for proxy in refusing:
                proxy.accept()

        return end

    def _lose_replies(self, chance: random.Random) -> Heal:
        for proxy in self._proxies:
            proxy.cut_reply("lock:", chance.randint(1, 10))

        def end() -> None:
            for proxy in self._proxies:
                proxy.to_cut.clear()

        return end

    def left_behind(self) -> list[str]:
        from django_distlock import locks

        return locked_names(locks["default"])


def void(_: object) -> None:
    """The result is not wanted."""


STORES = {
    "redis": OneRedis,
    "sentinel": Sentinels,
    "cluster": RedisCluster,
    "quorum": FiveNodes,
    "postgres": PostgreSQL,
    "mariadb": MariaDB,
    "sqlite": SQLite,
    "zookeeper": ZooKeeper,
}
