"""A model of one server: what it knows of its clients, what it refuses, and the commands that are not about keys."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from . import info
from .commands import CONTAINERS, SPECS, Spec
from .connection_commands import ConnectionCommands
from .refusals import LISTENERS_ONLY, OUT_OF_MEMORY, REFUSALS, WRITE_REFUSALS
from .resp import OK, ServerError
from .scripting import compiled
from .sessions import Session
from .store import Entry, Store

if TYPE_CHECKING:
    from ..engine.network import Address, Network, Socket

Watch = Callable[[Session, list[str], Any], None]  # told of each command that was executed, and of its reply
WatchBefore = Callable[[Session, list[str]], None]  # told of it before


class Server(ConnectionCommands):
    """A server on a host of its own.

    ``states``: names of REFUSALS and WRITE_REFUSALS, and "OOM". ``latency``: seconds that each command takes.
    ``told``: what PUBLISH returns, or raises; of a channel, and what sends the message and counts.
    ``password``, ``maxclients``, ``maxmemory`` (bytes, 0: any), ``min_replicas``: as in its configuration.
    """

    def __init__(self, network: Network, address: Address, watch: Watch | None = None) -> None:
        self.network, self.scheduler = network, network.scheduler
        self.address = address
        self.watch = watch
        self.watch_before: WatchBefore | None = None
        self.sessions = []
        self.states: set[str] = set()
        self.is_up = True
        self.has_power = True
        self.is_hanging = False
        self.is_paused = False
        self._pauses = 0
        self.latency = 0.0
        self.told: Callable[[str, Callable[[], int]], int] = lambda channel, publish: publish()
        self.password = ""
        self.maxclients = 10_000
        self.maxmemory = 0
        self.min_replicas = 0
        self.started_at = self.scheduler.now
        self.store = Store(lambda: self.scheduler.now, self._publish, self.ears, self.check_in_script)
        self.scripts: dict[str, str] = {}
        self.forgot_at = (-inf, -inf)  # its scripts: the last two times that it was made to
        self._turns: deque[Session] = deque()
        self._is_busy = False  # with the first of these
        self._deferred: list[Callable[[], None]] = []  # what other servers told it while it hung
        self._client_ids = 0
        self.run_id = f"{self.scheduler.random.getrandbits(160):040x}"
        self._is_out_of_memory = False  # when the script began
        self._has_written = False  # the script, until now
        self._running: Session | None = None
        network.servers[address] = self

    # For the network

    def accept(self, socket: Socket) -> Session | None:
        if not self.has_power:
            return None
        self._client_ids += 1
        session = Session(self, socket, self._client_ids)
        if len(self.sessions) >= self.maxclients:
            session.send(ServerError("ERR max number of clients reached"))
            socket.hang_up()
            session.is_open = False
            return session
        self.sessions.append(session)
        return session

    # What happens to it

    def stop(self) -> None:
        """The process ends: its connections, too."""
        self.is_up = False
        for session in list(self.sessions):
            session.end()

    def lose_power(self) -> None:
        """Nobody is told. Its connections are met by a reset when it is back."""
        self.is_up = self.has_power = False
        for session in list(self.sessions):
            session.is_open = False
        self.sessions.clear()

    def start(self, *, keeps_data: bool = False, snapshot: dict[str, Entry] | None = None) -> None:
        """After ``stop`` or ``lose_power``. Scripts are gone; ``snapshot``: the data that its disk has."""
        self.is_up = self.has_power = True
        self.is_hanging = self.is_paused = False
        self.started_at = self.scheduler.now
        self.run_id = f"{self.scheduler.random.getrandbits(160):040x}"
        self.scripts.clear()
        self._deferred.clear()
        self.states -= {"LOADING", "BUSY"}
        if not keeps_data:
            self.store.restore(snapshot or {})

    def hang(self) -> None:
        """It takes bytes, and connections, and answers nothing."""
        self.is_hanging = True

    def go_on(self) -> None:
        self.is_hanging = False
        for session in list(self.sessions):
            session.go_on()
        deferred, self._deferred = self._deferred, []
        for happen in deferred:
            happen()

    def pause(self, seconds: float) -> None:
        """What may change something waits meanwhile, unless ``resume`` comes before."""
        self.is_paused = True
        self._pauses += 1
        number = self._pauses
        self.scheduler.at(seconds, lambda: self.resume() if number == self._pauses else None)

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            for session in list(self.sessions):
                session.go_on()

    def holds(self, command: list[str]) -> bool:
        spec = SPECS.get(command[0].lower())
        return self.is_paused and spec is not None and bool(spec.flags & {"write", "script", "replicates"})

    def load(self, seconds: float) -> None:
        """It reads its data from disk."""
        self.states.add("LOADING")
        self.scheduler.at(seconds, lambda: self.states.discard("LOADING"))

    def forget_scripts(self) -> None:
        self.scripts.clear()
        self.forgot_at = (self.forgot_at[1], self.scheduler.now)

    def end_clients(self, kind: str) -> int:
        """As CLIENT KILL TYPE does: "normal", or "pubsub"."""
        found = [session for session in self.sessions if session.kind == kind]
        for session in found:
            session.end()
        return len(found)

    # Between servers

    def tell(self, other: Server, happen: Callable[[], None], extra: float = 0.0) -> bool:
        """Let it happen there when the message arrives. False: it does not pass."""
        delay = self.network.passes(self.address, other.address)
        if delay is None:
            return False
        self.scheduler.at(delay + extra, lambda: other.arrived(happen))
        return True

    def arrived(self, happen: Callable[[], None]) -> None:
        if self.is_up and self.is_hanging:
            self._deferred.append(happen)
        elif self.is_up:
            happen()

    # Commands

    def must_wait(self, session: Session) -> bool:
        """For its turn at a slow server, which executes one command after the other, as they came."""
        if not (self.latency or self._turns):
            return False
        self._turns.append(session)
        if not self._is_busy:
            self._is_busy = True
            self.scheduler.at(self.latency, self._serve)
        return True

    def _serve(self) -> None:
        self._turns.popleft().execute_late()
        self._is_busy = bool(self._turns)
        if self._is_busy:
            self.scheduler.at(self.latency, self._serve)

    def execute(self, session: Session, command: list[str]) -> Any:
        """The reply; a ServerError where it refuses."""
        try:
            spec = self._spec(command)
            self._check(session, spec, command)
            reply = self._perform(session, spec, command)
        except ServerError as error:
            reply = error
        session.is_asking = command[0].lower() == "asking"
        self.settle()
        return reply

    def settle(self) -> None:
        """Pass on what the command changed."""
        self.store.take_changes()

    def _spec(self, command: list[str]) -> Spec:
        name = command[0].lower()
        if name in CONTAINERS:
            if len(command) == 1:
                raise ServerError(f"ERR wrong number of arguments for '{name}' command")
            inside = f"{name}|{command[1].lower()}"
            if not self._knows(inside):
                raise ServerError(f"ERR unknown subcommand '{command[1]}'. Try {name.upper()} HELP.")
            name = inside
        elif not self._knows(name):
            words = "".join(f"'{word}' " for word in command[1:])
            raise ServerError(f"ERR unknown command '{command[0]}', with args beginning with: {words}")
        spec = SPECS[name]
        if not spec.allows(len(command)):
            raise ServerError(f"ERR wrong number of arguments for '{name}' command")
        return spec

    def _knows(self, name: str) -> bool:
        return name in SPECS and (self.store.knows(name) or hasattr(self, _method(name)))

    def _check(self, session: Session, spec: Spec, command: list[str]) -> None:
        """In the order in which a server does it."""
        flags = spec.flags
        if self.password and not session.is_authenticated and "no_auth" not in flags:
            raise ServerError("NOAUTH Authentication required.")
        self._route(session, spec, command)
        if "denyoom" in flags and self.is_out_of_memory:
            raise ServerError(OUT_OF_MEMORY)
        if "MISCONF" in self.states and flags & {"write", "disk"}:
            raise ServerError(WRITE_REFUSALS["MISCONF"])
        if "write" in flags:
            self._check_write()
        if session.channels and session.version == 2 and "listener" not in flags:
            raise ServerError(f"ERR Can't execute '{spec.name}': {LISTENERS_ONLY}")
        for state in ("MASTERDOWN", "LOADING", "BUSY"):
            if state in self.states and not flags & REFUSALS[state].spares:
                raise ServerError(REFUSALS[state].text)

    def _route(self, session: Session, spec: Spec, command: list[str]) -> None:
        """Raise the redirection of a Cluster."""

    def _check_write(self) -> None:
        if "NOREPLICAS" in self.states or self.good_replicas < self.min_replicas:
            raise ServerError(WRITE_REFUSALS["NOREPLICAS"])
        if "READONLY" in self.states:
            raise ServerError(WRITE_REFUSALS["READONLY"])

    @property
    def good_replicas(self) -> int:
        return 0

    @property
    def is_out_of_memory(self) -> bool:
        return "OOM" in self.states or 0 < self.maxmemory < self.store.used_memory

    def _perform(self, session: Session, spec: Spec, command: list[str]) -> Any:
        words = command[2:] if "|" in spec.name else command[1:]
        if self.store.knows(spec.name):
            return self.store.execute(spec.name, *words)
        return getattr(self, _method(spec.name))(session, *words)

    def _publish(self, kind: str, channel: str, text: str) -> int:
        return self.told(channel, lambda: self.publish(kind, channel, text))

    # Scripts

    def check_in_script(self, name: str, words: list[str]) -> None:
        """What a script asks for is refused as from a client, but for memory, once it has written."""
        flags = SPECS[name].flags
        if "denyoom" in flags and self._is_out_of_memory and not self._has_written:
            raise ServerError(OUT_OF_MEMORY)
        if "MASTERDOWN" in self.states and "stale" not in flags:
            raise ServerError(REFUSALS["MASTERDOWN"].text)
        if "write" in flags:
            if "READONLY" in self.states:
                raise ServerError(WRITE_REFUSALS["READONLY"])
            if "MISCONF" in self.states:
                raise ServerError(WRITE_REFUSALS["MISCONF"])
            self._check_write()
            self._has_written = True

    def _do_eval(self, session: Session, text: str, number: str, *rest: str) -> Any:
        if not number.lstrip("-").isdecimal():
            raise ServerError("ERR value is not an integer or out of range")
        amount = int(number)
        if amount > len(rest):
            raise ServerError("ERR Number of keys can't be greater than number of args")
        if amount < 0:
            raise ServerError("ERR Number of keys can't be negative")
        if "MASTERDOWN" in self.states:
            raise ServerError(REFUSALS["MASTERDOWN"].text)
        self._is_out_of_memory, self._has_written = self.is_out_of_memory, False
        self.scripts[_digest(text)] = text
        self._running = session
        try:
            return self.store.run(text, list(rest[:amount]), list(rest[amount:]))
        finally:
            self._running = None

    def _do_evalsha(self, session: Session, sha: str, number: str, *rest: str) -> Any:
        if (text := self.scripts.get(sha.lower())) is None:
            raise ServerError("NOSCRIPT No matching script.")
        return self._do_eval(session, text, number, *rest)

    def _do_script_load(self, session: Session, text: str) -> Any:
        compiled(text)
        self.scripts[_digest(text)] = text
        return _digest(text)

    def _do_script_exists(self, session: Session, *shas: str) -> Any:
        return [int(sha.lower() in self.scripts) for sha in shas]

    def _do_script_flush(self, session: Session, *mode: str) -> Any:
        self.forget_scripts()
        return OK

    def _do_script_kill(self, session: Session) -> Any:
        if "BUSY" not in self.states:
            raise ServerError("NOTBUSY No scripts in execution right now.")
        self.states.discard("BUSY")
        return OK

    # What it tells of itself

    def _do_info(self, session: Session, *sections: str) -> str:
        return info.text_of(self, [section.lower() for section in sections])

    def about_replication(self) -> dict[str, object]:
        """For INFO."""
        return {"role": "master", "connected_slaves": 0}

    def _do_role(self, session: Session) -> Any:
        return ["master", 0, []]

    def _do_config_get(self, session: Session, *names: str) -> Any:
        known = {"maxmemory": str(self.maxmemory), "maxmemory-policy": "noeviction"}
        return {name: known[name] for name in names if name in known}

    def _do_config_set(self, session: Session, name: str, value: str) -> Any:
        if not self.configure(name, value):
            raise ServerError(f"ERR Unknown option or number of arguments for CONFIG SET - '{name}'")
        return OK

    def configure(self, name: str, value: str) -> bool:
        """False: it has no such setting."""
        match name:
            case "maxmemory":
                self.maxmemory = int(value)
            case "min-replicas-to-write":
                self.min_replicas = int(value)
            case "requirepass":
                self.password = value
            case "maxclients":
                self.maxclients = int(value)
            case _:
                return False
        return True


def _method(name: str) -> str:
    return "_do_" + name.replace("|", "_").replace("-", "_")


def _digest(text: str) -> str:
    return hashlib.sha1(text.encode("latin-1"), usedforsecurity=False).hexdigest()
