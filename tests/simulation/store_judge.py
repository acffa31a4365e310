"""Watches one server: each script that it executes, with the lock before and after, goes to the judges of that lock."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.redis.keys import Keys
from django_distlock.backends.redis.operations import ACQUIRE, RELEASE, RENEW
from django_distlock.types import TOKEN_LENGTH

from .lease_judge import LeaseJudge
from .queue_judge import QueueJudge

if TYPE_CHECKING:
    from .redis_server import Server
    from .scheduler import Process
    from .sessions import Session
    from .simulation import Simulation

SCRIPTS = {script.sha: name for name, script in (("acquire", ACQUIRE), ("release", RELEASE), ("renew", RENEW))}


class StoredLease(NamedTuple):
    """``state``: "h" held, "c" handed to a waiter that did not take it yet, "r" released and kept for its min_hold."""

    token: str
    state: str
    fence: int
    expires_at: float

    @property
    def is_taken(self) -> bool:
        return self.state in "hr"


class LockState(NamedTuple):
    """``places``, ``inboxes``: of those in the queue, by token."""

    lease: StoredLease | None
    places: Mapping[str, float]
    inboxes: Mapping[str, str]

    @property
    def first(self) -> str:
        return min(self.places, key=self.places.__getitem__, default="")


class Executed(NamedTuple):
    """A script that a server executed for a process. What its words mean, the heads of the scripts tell."""

    at: float
    process: Process
    script: str
    name: str
    words: Sequence[str]
    reply: Any
    before: LockState
    after: LockState

    @property
    def token(self) -> str:
        return self.words[0]

    @property
    def is_granted(self) -> bool:
        return self.script == "acquire" and isinstance(self.reply, list) and self.reply[0] == 1

    @property
    def place(self) -> float | None:
        """Where the caller stands, as it was told."""
        is_queued = self.script == "acquire" and isinstance(self.reply, list) and self.reply[0] == 0 and self.reply[1]
        return float(self.reply[1]) if is_queued else None

    # Of acquire

    @property
    def mode(self) -> str:
        return self.words[3]

    @property
    def known_place(self) -> float:
        return float(self.words[4] or inf)

    # Of release

    @property
    def cooldown(self) -> float:
        return int(self.words[1]) / 1000

    @property
    def retires_for(self) -> float:
        return int(self.words[2]) / 1000

    @property
    def is_offer(self) -> bool:
        return self.words[5] == "1"

    @property
    def is_forced(self) -> bool:
        return self.words[6] == "1"


class StoreJudge:
    """S9 of all keys. The other rules: see LeaseJudge and QueueJudge."""

    def __init__(self, simulation: Simulation, server: Server) -> None:
        self.simulation = simulation
        self.server = server
        self.keys = Keys("lock")
        self.last_fence = 0
        self._leases: dict[str, LeaseJudge] = {}
        self._queues: dict[str, QueueJudge] = {}
        self._begun: tuple[str, LockState] = ("", LockState(None, {}, {}))

    @property
    def now(self) -> float:
        return self.simulation.scheduler.now

    def fail(self, text: str) -> None:
        self.simulation.judges.fail(text)

    def state(self, name: str) -> LockState:
        store = self.server.store
        lease, key = None, self.keys.lease(name)
        if isinstance(value := store.peek(key), str):
            token, state, fence, _ = value.split(" ", 3)
            lease = StoredLease(token, state, int(fence), store.expires_at(key))
        queue = store.peek(self.keys.queue(name)) or {}
        places = {member[:TOKEN_LENGTH]: place for member, place in queue.items()}
        return LockState(lease, places, {member[:TOKEN_LENGTH]: member[TOKEN_LENGTH + 1 :] for member in queue})

    def listeners(self, inbox: str) -> int:
        """How many connections hear what is said there, as far as the server knows."""
        return sum((inbox[:1], inbox[1:]) in session.channels for session in self.server.sessions)

    # Told by the world

    def begins(self, session: Session, command: Sequence[str]) -> None:
        if name := self._name(command):
            self._begun = name, self.state(name)

    def executed(self, session: Session, command: Sequence[str], reply: Any) -> None:
        if name := self._name(command):
            assert self._begun[0] == name
            script, amount = _script(command), int(command[2])
            words = command[3 + amount :]
            executed = Executed(
                self.now, session.socket.process, script, name, words, reply, self._begun[1], self.state(name)
            )
            self._lease(name).executed(executed)
            self._queue(name).executed(executed)
        self._check_that_all_expire()

    def watch(self) -> None:
        for queue in self._queues.values():
            queue.watch()

    def lost_data(self) -> None:
        self.last_fence = 0
        self._leases.clear()
        self._queues.clear()

    def _name(self, command: Sequence[str]) -> str:
        """Of the lock that the command is about; "" where it is none of the scripts."""
        return self.keys.locked_by(command[3]) if _script(command) else ""

    def _lease(self, name: str) -> LeaseJudge:
        return self._leases.setdefault(name, LeaseJudge(self, name))

    def _queue(self, name: str) -> QueueJudge:
        return self._queues.setdefault(name, QueueJudge(self, name))

    def _check_that_all_expire(self) -> None:
        store = self.server.store
        for key in store.keys() - {"lock|f"}:
            if store.expires_at(key) == inf:
                self.fail(f"S9: the key {key} has no expiry")


def _script(command: Sequence[str]) -> str:
    match command[0].upper():
        case "EVALSHA":
            return SCRIPTS.get(command[1], "")
        case "EVAL":
            return SCRIPTS.get(hashlib.sha1(command[1].encode("latin-1"), usedforsecurity=False).hexdigest(), "")
    return ""
