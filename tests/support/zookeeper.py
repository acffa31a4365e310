"""Private ZooKeeper servers, one or an ensemble, on ports that were free a moment ago."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import kazoo.protocol.connection
import kazoo.retry
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError

from tests.support.inside import kazoo_of
from tests.support.ports import free_port, free_ports
from tests.support.proxy import Proxy, Stream
from tests.support.requirements import missing
from tests.support.tools import PATIENCE, eventually

# A session draws a number at each ping. Hypothesis would take that for the work of a strategy, in whatever test it is.
for module in (kazoo.protocol.connection, kazoo.retry):
    module.random = Random()

JARS = "/usr/share/java/zookeeper.jar"  # of Debian's package, whose manifest names what it needs
CLASSES = f"{JARS}:/usr/share/java/netty-codec.jar"  # which TLS needs besides, and that manifest leaves out
TICK_MS = 200
# Short in starting, and small: a test run has several of them.
JAVA_OPTIONS = (
    "-Xmx64m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto",
    "-Dzookeeper.forceSync=no", "-Dzookeeper.skipACL=no", "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.4lw.commands.whitelist=*", "-Dzookeeper.nio.numSelectorThreads=1",
    "-Dzookeeper.nio.numWorkerThreads=2", "-Dzookeeper.commitProcessor.numWorkerThreads=1",
)  # fmt: skip


def program() -> str | None:
    """The Java that runs it; None where that or ZooKeeper is missing."""
    return shutil.which("java") if Path(JARS).exists() else None


def needed_program() -> str:
    """It, for a test that is skipped where it is missing."""
    if (java := program()) is None:
        missing("zookeeper", "no java and zookeeper.jar found; install the package zookeeper")
    return java


class TcpProxy(Proxy):
    """Between two addresses of this machine."""

    def __init__(self, port_of_server: int, port: int = 0) -> None:
        self.port = port or free_port()
        super().__init__(Path(), Path("/nonexistent"))
        self.to = port_of_server

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _listening(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", self.port), backlog=128)

    async def _to_server(self) -> Stream:
        return await asyncio.open_connection("127.0.0.1", self.to)


class Server:
    """One process. ``peers``: the lines on an ensemble in its settings; "": it stands alone."""

    def __init__(self, java: str, peers: str = "", number: int = 1, port: int = 0, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="zookeeper-"))
        self.port = port or free_port()
        self.number = number
        (self.folder / "data").mkdir()
        (self.folder / "data" / "myid").write_text(f"{number}\n")
        given = {
            "tickTime": TICK_MS,
            "initLimit": 20,
            "syncLimit": 5,
            "dataDir": self.folder / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "maxClientCnxns": 0,
            "minSessionTimeout": 2 * TICK_MS,
            "maxSessionTimeout": 600_000,
            "preAllocSize": 1024,
            **settings,
        }
        lines = [f"{key}={value}" for key, value in given.items()]
        (self.folder / "zoo.cfg").write_text("\n".join([*lines, peers]) + "\n")
        self._command = [
            java, *JAVA_OPTIONS, "-cp", CLASSES, "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "zoo.cfg"),
        ]  # fmt: skip
        self._log = (self.folder / "log").open("wb")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Server:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, cwd=self.folder)
        return self

    def wait(self) -> None:
        """Until it serves clients. It ends where somebody's connection has one of its ports just then."""
        starts = iter(range(10))

        def serves() -> bool:
            if self.process.poll() is not None:
                assert next(starts, None) is not None, (self.folder / "log").read_text()
                time.sleep(0.5)
                self.start()
            # One that begins may take a connection and never answer on it.
            return "\nMode: " in self.ask(b"srvr", timeout=1.0)

        eventually(serves, 90)

    @property
    def mode(self) -> str:
        """What it is in its ensemble: "leader", "follower", "standalone"; "" while it serves nobody."""
        told = [line for line in self.ask(b"srvr").splitlines() if line.startswith("Mode: ")]
        return told[0].removeprefix("Mode: ") if told else ""

    def ask(self, word: bytes, timeout: float = 5.0) -> str:
        """A command of four letters; "" where nobody answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
                connection.sendall(word)
                return b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        except OSError:
            return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """Hang, until ``go_on()``."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.go_on()
            self.kill()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        with ExitStack() as stack:
            stack.callback(self.close)
            self.start()
            self.wait()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Ensemble:
    """Three servers, of which one may be lost. The first one reaches the others as a follower through ``links``."""

    def __init__(self, java: str, **settings: object) -> None:
        free = iter(free_ports(11))
        ports = {number: (next(free), next(free), next(free)) for number in (1, 2, 3)}
        self.links = [TcpProxy(ports[number][1], next(free)) for number in (2, 3)]
        peers = {number: peer for number, (_, peer, _) in ports.items()}
        linked = {1: peers[1], 2: self.links[0].port, 3: self.links[1].port}
        self.servers = []
        for number, (client, _, _) in ports.items():
            seen = linked if number == 1 else peers
            lines = [f"server.{other}=127.0.0.1:{seen[other]}:{ports[other][2]}" for other in ports]
            self.servers.append(Server(java, "\n".join(lines), number, client, **settings))

    @property
    def location(self) -> str:
        return ",".join(server.address for server in self.servers)

    @property
    def leader(self) -> Server:
        found: Server = eventually(lambda: next((one for one in self.servers if one.mode == "leader"), None), 90)
        return found

    @property
    def followers(self) -> list[Server]:
        """Of an ensemble that is whole."""
        found: list[Server] = eventually(lambda: [one for one in self.servers if one.mode == "follower"], 90)
        return found

    def linked_follower(self) -> Server:
        """The first server, which the links connect with its leader."""
        first = self.servers[0]
        if self.leader is first:
            first.kill()
            eventually(lambda: any(one.mode == "leader" for one in self.servers[1:]), 90)
            first.start()
            first.wait()
        return first

    def cut(self) -> None:
        """Nothing passes between the first server and its leader, and neither is told."""
        for link in self.links:
            link.hang = True

    def heal(self) -> None:
        """Start, wake and connect what was killed, stopped and cut off, and wait until all serve."""
        for link in self.links:
            link.hang = False
            link.refuse()  # what was held up would come late
            link.accept()
        for server in self.servers:
            if server.process.poll() is not None:
                server.start()
            server.go_on()
        for server in self.servers:
            server.wait()

    def __enter__(self) -> Ensemble:
        with ExitStack() as stack:
            for link in self.links:
                stack.enter_context(link)
            for server in self.servers:
                stack.callback(server.close)
                server.start()
            for server in self.servers:
                server.wait()
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()


def expire_session(backend: Any) -> None:
    """Let the servers end the session of a backend, as they do with one of which they hear nothing."""
    if (opened := kazoo_of(backend)) is None or (session := opened.client_id) is None:
        return

    def is_over() -> bool:
        """The backend connects again, which may cut the twin off before it has ended the session."""
        twin = KazooClient(backend.config.addresses, client_id=session, timeout=10.0)
        try:
            twin.start(10)
            return bool(twin.client_id != session)  # it was given another one
        except KazooTimeoutError:
            return False
        finally:
            twin.stop()
            twin.close()

    eventually(is_over, 2 * PATIENCE)
