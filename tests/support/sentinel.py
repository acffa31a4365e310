"""A master, replicas and sentinels that watch them, to be killed, stopped and failed over."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import redis

from django_distlock import lock
from example_project.valkey import binary
from tests.support.ports import free_port
from tests.support.tools import PATIENCE, eventually

SERVICE = "mymaster"
DOWN_AFTER = 0.6  # seconds without an answer after which a sentinel takes the master for dead


class Process:
    """A server on a port of 127.0.0.1, because sentinels tell each other addresses."""

    def __init__(self, program: Path, config: Path, port: int, lines: Sequence[str], *arguments: str) -> None:
        self.port = port
        config.write_text("\n".join(["bind 127.0.0.1", f"dir {config.parent}", f"dbfilename {port}.rdb", *lines, ""]))
        self._command = [str(program), str(config), *arguments]
        self.is_stopped = False
        self.environment: Mapping[str, str] = {}

    def start(self) -> Process:
        environment = {**os.environ, **self.environment}
        self.process = subprocess.Popen(self._command, env=environment, stdout=subprocess.DEVNULL)
        return self

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, socket_timeout=5, decode_responses=True, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.is_stopped = True

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.is_stopped = False


class Watched:
    """``with Watched() as watched: watched.options``. ``servers[0]`` begins as the master."""

    def __init__(
        self,
        replicas: int = 1,
        sentinels: int = 3,
        *,
        server: Sequence[str] = (),
        sentinel: Sequence[str] = (),
        auth: Mapping[str, Any] = MappingProxyType({}),
        sentinel_auth: Mapping[str, Any] = MappingProxyType({}),
        port: str = "port",
        program: Path | None = None,
        environment_of_replicas: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._environment_of_replicas = environment_of_replicas
        self._program, self._port = program or binary(), port
        self._sizes = replicas, sentinels
        self._server, self._sentinel = server, sentinel
        self.auth, self.sentinel_auth = auth, sentinel_auth
        self.servers: list[Process] = []
        self.sentinels: list[Process] = []

    def __enter__(self) -> Watched:
        self._folder = tempfile.TemporaryDirectory(prefix="sentinel-")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        replicas, sentinels = self._sizes
        quick = ["repl-diskless-sync-delay 0", "repl-ping-replica-period 1", "appendonly no"]
        for number in range(1 + replicas):
            follow = [f"replicaof 127.0.0.1 {self.servers[0].port}"] if self.servers else []
            server = self._process(f"server{number}", free_port(), [*quick, *follow, *self._server])
            if follow:
                server.environment = self._environment_of_replicas
            self.servers.append(server.start())
        with self.servers[0].client(**self.auth) as master:
            self._until(lambda: self._is_replicating(master))
        # They would find each other and the replicas by themselves, after seconds.
        known = [(free_port(), secrets.token_hex(20)) for _ in range(sentinels)]
        for number, (port, myid) in enumerate(known):
            lines = [
                f"sentinel myid {myid}",
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} {sentinels // 2 + 1}",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER * 1000:.0f}",
                f"sentinel failover-timeout {SERVICE} 2000",
                *(f"sentinel known-replica {SERVICE} 127.0.0.1 {server.port}" for server in self.servers[1:]),
                *(f"sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {it}" for other, it in known if it != myid),
                *self._sentinel,
            ]
            self.sentinels.append(self._process(f"sentinel{number}", port, lines, "--sentinel").start())
        for one in self.sentinels:
            with one.client(**self.sentinel_auth) as sentinel:
                self._until(lambda sentinel=sentinel: self._is_ready(sentinel))

    def _process(self, name: str, port: int, lines: Sequence[str], *arguments: str) -> Process:
        ports = [f"{kind} {port if kind == self._port else 0}" for kind in dict.fromkeys(("port", self._port))]
        config = Path(self._folder.name, f"{name}.conf")
        return Process(self._program, config, port, ["save ''", *ports, *lines], *arguments)

    def _is_replicating(self, master: redis.Redis) -> bool:
        about = master.info("replication")
        return all(about.get(f"slave{number}", {}).get("state") == "online" for number in range(len(self.servers) - 1))

    @staticmethod
    def _is_ready(sentinel: redis.Redis) -> bool:
        master = _about(sentinel.execute_command("SENTINEL", "MASTER", SERVICE))
        replicas = [_about(one) for one in sentinel.execute_command("SENTINEL", "REPLICAS", SERVICE)]
        return all(about["flags"] in ("master", "slave") for about in (master, *replicas)) and all(
            about["master-link-status"] == "ok" for about in replicas
        )

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        def is_true() -> bool:
            with suppress(redis.ConnectionError, redis.TimeoutError):
                return condition()
            return False

        eventually(is_true, 3 * PATIENCE)

    def __exit__(self, *_: object) -> None:
        for process in [*self.sentinels, *self.servers]:
            process.kill()
        self._folder.cleanup()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    @property
    def options(self) -> dict[str, Any]:
        return {"sentinels": self.addresses, "service_name": SERVICE}

    def told(self) -> int:
        """The port of the master, by the first sentinel that answers."""
        for sentinel in self.sentinels:
            if sentinel.is_stopped or sentinel.process.poll() is not None:
                continue
            with sentinel.client(**self.sentinel_auth) as client:
                return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        raise RuntimeError("no sentinel runs")

    @property
    def master(self) -> Process:
        return self.at(self.told())

    def at(self, port: int) -> Process:
        return next(server for server in self.servers if server.port == port)

    def fail_over(self) -> None:
        """As an operator does it; the old master lives and becomes a replica."""
        with self.sentinels[0].client(**self.sentinel_auth) as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)

    def set_up_anew(self, master: Process) -> None:
        """As an operator does it who gives the service to another server; the last master lives and stays one."""
        for verb, *arguments in (["REMOVE"], ["MONITOR", "127.0.0.1", master.port, len(self.sentinels) // 2 + 1]):
            for sentinel in self.sentinels:
                with sentinel.client(**self.sentinel_auth) as client:
                    client.execute_command("SENTINEL", verb, SERVICE, *arguments)
            with master.client(**self.auth) as client:
                client.execute_command("REPLICAOF", "NO", "ONE")

    def cut_from_sentinels(self, server: Process) -> None:
        """For them it is dead: it does not let them in any more. Who else is connected notices nothing."""
        with server.client(**self.auth) as client:
            client.config_set("requirepass", "unknown to them")
            for about in client.client_list():
                if about["name"].startswith("sentinel-"):
                    client.client_kill_filter(_id=about["id"])

    def wait_for_another(self, old: Process) -> Process:
        self._until(lambda: self.told() != old.port and self._takes_writes(self.told()))
        return self.master

    def _takes_writes(self, port: int) -> bool:
        with self.at(port).client(**self.auth) as client:
            return bool(client.info("replication")["role"] == "master")

    def wait_for_replicas(self, master: Process) -> None:
        """Return when they know all that was written until now."""
        with master.client(**self.auth) as client:
            written = client.info("replication")["master_repl_offset"]
        for replica in self.servers:
            if replica is not master:
                with replica.client(**self.auth) as client:
                    self._until(lambda client=client: client.info("replication")["slave_repl_offset"] >= written)

    def cut_off(self, master: Process) -> None:
        """The replicas get nothing of what is written from now on; they still can take over."""
        for replica in self.servers:
            if replica is not master:
                with replica.client(**self.auth) as client:
                    client.execute_command("REPLICAOF", "127.0.0.1", "1")


def _about(reply: Any) -> dict[str, str]:
    """Not by redis-py's own methods, which fail in its version 6.4."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def warm_up(calls, alias="default"):
    """Let a connection to the master stand."""
    handle = lock("warm", using=alias)
    assert calls(handle).acquire()
    calls(handle).release()
