"""Where a scenario runs that real servers and their models play alike. Each step is kept with the raw reply to it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from django_distlock.backends.redis.scripts import Command, Script, pack

from ..engine.scheduler import Scheduler
from ..servers.redis_server import Server
from .wires import ModelWire, Place, RealWire, Wire, elements

PATIENCE = 60.0  # seconds in which happens what will
MOMENT = 0.05  # seconds between two looks

# What differs from run to run: ids, times, and how far replication is, which real servers count in bytes.
_VARYING = re.compile(
    rb"(\r\n(?:link-pending-commands|last-ping-sent|last-ok-ping-reply|last-ping-reply|info-refresh|s-down-time"
    rb"|role-reported-time|o-down-time|last-hello-message|master-link-down-time|slave-repl-offset|runid)\r\n)"
    rb"\$\d+\r\n[^\r]*\r\n"
)
_ANYWHERE: list[tuple[bytes | re.Pattern[bytes], bytes]] = [
    (rb"\b[0-9a-f]{40}\b", b"ID"),
    (rb"(\$2\r\nid\r\n):\d+", rb"\1:ID"),
    (rb"\b\d{16}\b", b"MICROSECONDS"),
    (_VARYING, rb"\1VARIES\r\n"),
    (rb"(config-epoch\r\n)\$\d+\r\n[1-9]\d*\r\n", rb"\1LATER\r\n"),  # an election may need another round
]
_IN_REPLIES_TO: dict[str, list[tuple[bytes, bytes]]] = {
    "EVALSHA": [(rb":\d{4,6}\r\n", b":MILLISECONDS\r\n")],
    "ZRANGE": [(rb"\$13\r\n\d{13}\r\n", b"MILLISECONDS\r\n")],
    "PTTL": [(rb":\d{4,6}\r\n", b":MILLISECONDS\r\n")],
    "TIME": [(rb"\$\d+\r\n\d+\r\n", b"TIME\r\n")],
    "ROLE": [
        (rb"(master|connected)\r\n:\d+\r\n", rb"\1\r\n:OFFSET\r\n"),
        (rb"(\$\d+\r\n\d+\r\n)\$\d+\r\n\d+\r\n", rb"\1OFFSET\r\n"),
    ],
    "NODES": [
        (rb"@\d+", b"@BUS"),
        (rb"(ID|-) \d+ \d+ ", rb"\1 TIMES "),
        (rb"TIMES (?:[7-9]|\d\d+) ", b"TIMES LATER "),  # an election may need another round
    ],
}
# Of INFO and CLUSTER INFO, which tell more than anybody here reads.
_LINES = {
    "redis_version", "server_name", "valkey_version", "server_mode", "maxmemory", "maxmemory_policy", "loading",
    "aof_enabled", "role", "master_host", "master_port", "master_link_status", "master_sync_in_progress",
    "slave_priority", "slave_read_only", "connected_slaves", "min_slaves_good_slaves", "cluster_enabled",
    "cluster_state", "cluster_slots_assigned", "cluster_slots_ok", "cluster_slots_pfail", "cluster_slots_fail",
    "cluster_known_nodes", "cluster_size",
}  # fmt: skip


def normal(words: tuple[str | bytes | int, ...], reply: bytes) -> bytes:
    """Without what differs from run to run."""
    names = [str(word).upper() for word in words[:2]]
    if names[0] == "INFO" or names == ["CLUSTER", "INFO"]:
        lines = reply.decode().split("\r\n")
        return "\n".join(line for line in lines if line.partition(":")[0] in _LINES).encode()
    if names == ["CLUSTER", "NODES"]:
        return b"\n".join(sorted(_without_varying(names, line) for line in reply.split(b"\n")[1:]))
    if names == ["SENTINEL", "SENTINELS"] and reply.startswith(b"*"):
        return b"".join(sorted(_without_varying(names, element) for element in elements(reply)))
    return _without_varying(names, reply)


def _without_varying(names: Sequence[str], reply: bytes) -> bytes:
    for pattern, text in [*_ANYWHERE, *(rule for name in names for rule in _IN_REPLIES_TO.get(name, ()))]:
        reply = re.sub(pattern, text, reply)
    return reply


class Process(Protocol):
    """A server, real or not, to be harmed."""

    def kill(self) -> None: ...
    def start(self) -> object: ...
    def stop(self) -> None:
        """It hangs."""

    def go_on(self) -> None: ...


class Stage:
    """Servers by their names, connections by theirs. ``steps``: what was done, and what came back."""

    def __init__(self, processes: Mapping[str, Process]) -> None:
        self.processes = processes
        self.steps: list[tuple[str, bytes]] = []
        self._wires: dict[str, Wire] = {}

    # Steps

    def connect(self, name: str, to: str) -> None:
        if name in self._wires:
            self._wires.pop(name).close()
        try:
            self._wires[name] = self.open(to)
        except ConnectionRefusedError:
            self._keep(f"{name} connects to {to}", b"refused")

    def say(self, name: str, *words: str | bytes | int) -> bytes:
        """A command and its reply."""
        self.pass_time()
        self._wires[name].send(pack(*words))
        reply = self._wires[name].receive()
        self._keep(f"{name}: {' '.join(map(_text, words))[:80]}", normal(words, reply))
        return reply

    def call(self, name: str, *commands: Command) -> bytes:
        """Those of the package for one call; the reply to the last of them."""
        reply = b""
        for command in commands:
            self.pass_time()
            words = [*command.packed.decode().split("\r\n")[2::2]]
            self._wires[name].send(command.packed)
            reply = self._wires[name].receive()
            self._keep(f"{name}: {' '.join(words)}", normal(tuple(words), reply))
        return reply

    def load(self, name: str, *scripts: Script) -> None:
        for script in scripts:
            self.say(name, "SCRIPT", "LOAD", script.text)

    def send(self, name: str, *words: str | bytes | int) -> None:
        """Without waiting for the reply."""
        self._wires[name].send(pack(*words))

    def hear(self, name: str) -> None:
        """What comes by itself, or late."""
        reply = b""

        def has_come() -> bool:
            nonlocal reply
            reply = self._wires[name].receive(soon=True)
            return bool(reply)

        self.until(has_come)
        self._keep(f"{name} hears", normal(("",), reply))

    def hear_nothing(self, name: str) -> None:
        self._keep(f"{name} hears nothing", self._wires[name].receive(soon=True))

    def hear_end(self, name: str) -> None:
        """The server hangs up."""
        wire = self._wires[name]
        self.until(lambda: not wire.receive(soon=True) and wire.is_ended)
        self._keep(f"{name} ends", b"")

    def _keep(self, step: str, reply: bytes) -> None:
        self.steps.append((re.sub(r"\b(\d{16}|[0-9a-f]{40})\b", "VARIES", step), reply))

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()

    # Between the steps

    def until(self, is_so: Callable[[], bool]) -> None:
        ends = self.now() + PATIENCE
        while not is_so():
            self.pause()
            assert self.now() < ends, f"it did not come to that after {self.steps[-1]}"

    def until_told(self, to: str, *words: str | int, reply: bytes | Callable[[bytes], bool]) -> None:
        """Until the server answers so; over connections of its own."""

        def is_told() -> bool:
            told = self.ask(to, words)
            return reply(told) if callable(reply) else told == reply

        self.until(is_told)

    def ask(self, to: str, *commands: Sequence[str | int]) -> bytes:
        """The reply to the last of the commands, over a connection of their own; b"" if there is none."""
        try:
            wire = self.open(to)
        except ConnectionRefusedError:
            return b""
        with wire:
            for words in commands:
                wire.send(pack(*words))
                reply = wire.receive(soon=True)
        return reply

    def is_running(self, name: str) -> bool:
        try:
            self.open(name).close()
        except ConnectionRefusedError:
            return False
        return True

    def port(self, name: str) -> int:
        raise NotImplementedError

    def open(self, to: str) -> Wire:
        raise NotImplementedError

    def pass_time(self) -> None:
        """As it passes with each command."""

    def pause(self) -> None:
        """For a moment."""
        raise NotImplementedError

    def now(self) -> float:
        """In seconds."""
        raise NotImplementedError


class RealStage(Stage):
    """``places``: where the servers are."""

    def __init__(self, processes: Mapping[str, Process], places: Mapping[str, Place]) -> None:
        super().__init__(processes)
        self.places = places

    def port(self, name: str) -> int:
        port = self.places[name]
        assert isinstance(port, int)
        return port

    def open(self, to: str) -> Wire:
        return RealWire(self.places[to])

    def pause(self) -> None:
        time.sleep(MOMENT)

    def now(self) -> float:
        return time.monotonic()


class ModelProcess:
    """A model, as a process."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def kill(self) -> None:
        self.server.stop()

    def start(self) -> object:
        self.server.start()
        return None

    def stop(self) -> None:
        self.server.hang()

    def go_on(self) -> None:
        self.server.go_on()


class ModelStage(Stage):
    def __init__(self, scheduler: Scheduler, servers: Mapping[str, Server]) -> None:
        super().__init__({name: ModelProcess(server) for name, server in servers.items()})
        self.scheduler, self.servers = scheduler, servers

    def port(self, name: str) -> int:
        return self.servers[name].address[1]

    def open(self, to: str) -> Wire:
        return ModelWire(self.servers[to])

    def pass_time(self) -> None:
        self.scheduler.run(self.scheduler.now + 0.001)

    def pause(self) -> None:
        self.scheduler.run(self.scheduler.now + MOMENT)

    def now(self) -> float:
        return self.scheduler.now


def assert_same(real: Stage, model: Stage, at_least: int) -> None:
    """Both answered the same, word for word."""
    assert [step for step, _ in model.steps] == [step for step, _ in real.steps]
    pairs = zip(real.steps, model.steps, strict=True)
    different = [f"{step}\n   real {said!r}\n  model {told!r}" for (step, said), (_, told) in pairs if said != told]
    assert not different, "\n".join(different)
    assert len(real.steps) >= at_least


def _text(word: str | bytes | int) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
