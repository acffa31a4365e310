"""Watches one server: each script that it executes, with the lock before and after, goes to the judges of that lock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.keys import OTHERS, Keys
from django_distlock.backends.redis.operations import (
    ACQUIRE,
    CROWDED,
    EXCHANGE,
    POLLS,
    RELEASE,
    RENEW,
    RENEW_SLOT,
    acquire_all_script,
)
from django_distlock.backends.redis.pubsub import BY_MESSAGE

from ..servers.resp import ServerError
from .leases import DRIFT, LeaseJudge
from .queues import QueueJudge

if TYPE_CHECKING:
    from ..engine.network import Socket
    from ..engine.scheduler import Process
    from ..servers.redis_server import Server
    from ..servers.sessions import Session
    from ..servers.store import Store
    from ..simulation import Simulation

SHORTER_BY_DRIFT = 0.002  # seconds, of a pause that a fast clock counts
OF_LISTENER = {told: kind for kind, told in BY_MESSAGE.items()}  # the kinds of inboxes, as they are subscribed to
SCRIPTS = {
    script.sha: name
    for name, scripts in (
        ("acquire", [ACQUIRE]),
        ("release", [RELEASE]),
        ("renew", [RENEW, RENEW_SLOT]),
        ("exchange", [EXCHANGE]),
    )
    for script in scripts
}
KEYS, WORDS = 5, 3  # of each lock that is asked for together with others
SCRIPTS_FOR_ALL = {acquire_all_script(locks).sha for locks in (2, 3)}


class StoredLease(NamedTuple):
    """``state``: "h" held, "c" handed to a waiter that did not take it yet, "r" released and kept for its min_hold."""

    token: str
    state: str
    fence: int
    expires_at: float
    slot: int = 1

    @property
    def is_taken(self) -> bool:
        return self.state in "hr"


class LockState(NamedTuple):
    """``places``, ``inboxes``, ``numbers`` of slots: of those in the queue, by token. ``looks``: seconds for which the
    look of one that polls still counts."""

    leases: Sequence[StoredLease]
    places: Mapping[str, float]
    inboxes: Mapping[str, str]
    numbers: Mapping[str, int]
    looks: Mapping[str, float]

    def lease_of(self, token: str) -> StoredLease | None:
        return next((lease for lease in self.leases if lease.token == token), None)

    @property
    def tokens(self) -> set[str]:
        return {lease.token for lease in self.leases}

    def free_at(self, slots: int) -> float:
        """When there are fewer leases than that, if none is renewed. -inf: now."""
        ends = sorted(lease.expires_at for lease in self.leases)
        return ends[len(ends) - slots] if len(ends) >= slots else -inf

    def is_there(self, token: str, listeners: Callable[[str], int]) -> bool:
        """Whether a script may take it for one that waits."""
        inbox = self.inboxes.get(token, "")
        return token in self.looks if inbox == POLLS else bool(listeners(inbox))

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
    def exchanged(self) -> str:
        """The token whose lease ends in an exchange, whoever waits; "": none does."""
        return self.words[3] if self.script == "exchange" else ""

    def _word(self, number: int, default: str) -> str:
        """What is not said stands for a default."""
        return self.words[number] if number < len(self.words) else default

    @property
    def is_granted(self) -> bool:
        if self.script != "acquire":
            return False
        return (isinstance(self.reply, int) and self.reply > 0) or (
            isinstance(self.reply, list) and len(self.reply) == 2
        )

    @property
    def is_answered(self) -> bool:
        """Else the server refuses."""
        return isinstance(self.reply, int | list)

    @property
    def place(self) -> float | None:
        """Where the caller stands, as it was told."""
        place, _ = self._told
        return float(place) if place else None

    @property
    def left(self) -> float:
        """Seconds that the lease in the way has left, as a waiter was told; inf: it was not."""
        _, left = self._told
        return left / 1000 if left >= 0 else inf

    @property
    def _told(self) -> tuple[str, int]:
        if self.script != "acquire" or not isinstance(self.reply, list) or len(self.reply) != 4:
            return "", -1
        place, left, _lease, _ears = self.reply
        return place, left

    @property
    def ahead(self) -> int:
        """How many stand before one that polls, as it was told."""
        return int(self.reply[3]) if self.place is not None else 0

    @property
    def is_polling(self) -> bool:
        return self.script == "acquire" and self.inbox == POLLS

    @property
    def ttl(self) -> float:
        return int(self.words[1 if self.script == "renew" else 2]) / 1000

    # Of renew

    @property
    def takes_by_message(self) -> bool:
        return self.script == "renew" and len(self.words) > 2

    # Of acquire

    @property
    def mode(self) -> str:
        return self._word(4, "try")

    @property
    def known_place(self) -> float:
        return float(self._word(5, "") or inf)

    @property
    def inbox(self) -> str:
        return self._word(6, "")

    @property
    def slots(self) -> int:
        """How many leases there may be, with its own."""
        return int(self.words[8]) if self.script == "acquire" and len(self.words) > 8 else 1

    @property
    def most_places(self) -> int:
        """How many others may have a place when it takes one; 0: any number."""
        return int(self.words[9]) if self.script == "acquire" and len(self.words) > 9 else 0

    @property
    def is_crowded(self) -> bool:
        """It was given no place, because as many others have one."""
        has_told = self.script == "acquire" and isinstance(self.reply, list) and len(self.reply) == 4
        return has_told and self.reply[3] == CROWDED

    # Of release

    @property
    def cooldown(self) -> float:
        return int(self._word(2, "0")) / 1000

    @property
    def retires_for(self) -> float:
        return int(self._word(3, "0")) / 1000

    @property
    def knows_of_place(self) -> bool:
        return bool(self._word(4, ""))

    @property
    def is_offer(self) -> bool:
        return self._word(5, "0") == "1"

    @property
    def may_be_taken(self) -> bool:
        """By a message that has told of it already, so that it is not to be handed back."""
        return self._word(4, "")[:1] in OF_LISTENER

    @property
    def is_forced(self) -> bool:
        return self._word(6, "0") == "1"


class StoreJudge:
    """S9 of all keys. The other rules: see LeaseJudge and QueueJudge."""

    def __init__(self, simulation: Simulation, server: Server) -> None:
        self.simulation = simulation
        self.server = server
        self.keys = Keys("lock")
        self.last_fence = 0
        self._leases: dict[str, LeaseJudge] = {}
        self._queues: dict[str, QueueJudge] = {}
        self._lost_data_at = -inf
        self._subscribed: dict[Process, Socket] = {}  # the last connection of each that subscribed
        self._listened_at: dict[Process, float] = {}  # when somebody waited there for messages
        self._begun: dict[str, LockState] = {}  # of the locks that the script is about which begins

    @property
    def now(self) -> float:
        return self.simulation.scheduler.now

    @property
    def soon(self) -> float:
        return self.simulation.judges.soon

    def fail(self, text: str) -> None:
        self.simulation.judges.fail(text)

    def state(self, name: str) -> LockState:
        store = self.server.store
        queue = store.peek(self.keys.queue(name)) or {}
        places, inboxes, numbers = {}, {}, {}
        for entry, place in queue.items():
            _format, token, slots, waiter = entry.split(" ", 3)
            places[token], inboxes[token], numbers[token] = place, waiter.rpartition("|")[0], int(slots)
        ends, now = store.peek(self.keys.of_lock(name)[2]) or {}, store.micros() // 1000
        looks = {token[1:]: (end - now) / 1000 for token, end in ends.items() if token[0] == "?" and end > now}
        return LockState(leases_in(store, self.keys, name), places, inboxes, numbers, looks)

    def listeners(self, inbox: str) -> int:
        """How many connections hear what is said there, as far as the server knows."""
        kind = OF_LISTENER.get(inbox[:1], inbox[:1])
        return sum((kind, inbox[1:]) in session.channels for session in self.server.sessions)

    # For the world

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        """Whether so many held it, were kept or handed it, or somebody stood in its queue, at that moment or later."""
        if self._lost_data_at >= moment:
            return True
        return name in self._queues and self._queues[name].taken_until(slots) >= moment

    def most_places(self, name: str, moment: float) -> float:
        if self._lost_data_at >= moment:
            return inf
        return self._queues[name].most_places(moment) if name in self._queues else 0

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        self._lease(name).promised(token, about)

    def is_undisturbed(self, process: Process, since: float) -> bool:
        """Whether nothing failed since that moment, and the process runs."""
        return process.is_alive and not process.is_stopped and not self.simulation.judges.may_fail(since)

    # Told by the world

    def begins(self, session: Session, command: Sequence[str]) -> None:
        if names := self._names(command):
            self._begun = {name: self.state(name) for name in names}
            if _script(command) == "acquire" and command[3 + int(command[2]) :][6:7] not in ([], [""], [POLLS]):
                self._listened_at[session.socket.process] = self.now
        elif command[0].upper() in ("SSUBSCRIBE", "SUBSCRIBE"):
            self._judge_subscription(session.socket)

    def executed(self, session: Session, command: Sequence[str], reply: Any) -> None:
        if names := self._names(command):
            assert [*self._begun] == [*dict.fromkeys(names)]
            if isinstance(reply, ServerError) and str(reply).startswith("ERR"):
                self.fail(f"a script failed: {reply}")
            words = command[3 + int(command[2]) :]
            if script := _script(command):
                self._judge(session, script, names[0], words, reply)
            else:
                self._judge_all(session, names, words, reply)
        self._check_that_all_expire()

    def _judge(self, session: Session, script: str, name: str, words: Sequence[str], reply: Any) -> None:
        before, after = self._begun[name], self.state(name)
        executed = Executed(self.now, session.socket.process, script, name, words, reply, before, after)
        self._lease(name).executed(executed)
        self._queue(name).executed(executed)

    def _judge_all(self, session: Session, names: Sequence[str], words: Sequence[str], reply: Any) -> None:
        """Several locks in one step: all or none. Each is judged as if it had been tried alone."""
        tokens = words[::WORDS]
        had = [self._begun[name].lease_of(token) for name, token in zip(names, tokens, strict=True)]
        has = [self.state(name).lease_of(token) for name, token in zip(names, tokens, strict=True)]
        is_granted = isinstance(reply, list)
        if any(lease is None for lease in has) if is_granted else has != had:
            self.fail(f"several locks: {', '.join(names)}: {had} became {has}, and the reply is {reply}")
        if reply == 0 and all(lease is not None and lease.state == "h" for lease in had):
            self.fail(f"S3: {', '.join(names)} are refused to those who have them: {had}")
        for number, name in enumerate(names):
            own = words[number * WORDS : (number + 1) * WORDS]
            self._judge(session, "acquire", name, own, reply[number] if is_granted else None)

    def watch(self) -> None:
        for judge in (*self._leases.values(), *self._queues.values()):
            judge.watch()

    def lost_data(self) -> None:
        self.last_fence, self._lost_data_at = 0, self.now
        self._leases.clear()
        self._queues.clear()

    def _names(self, command: Sequence[str]) -> Sequence[str]:
        """Of the locks that the command is about; none where it is none of the scripts."""
        if _script(command):
            return [self.keys.name_in(command[3].replace(OTHERS, "", 1))]
        if _sha(command) in SCRIPTS_FOR_ALL:
            return [self.keys.name_in(key) for key in command[3 : 3 + int(command[2]) : KEYS]]
        return ()

    def _lease(self, name: str) -> LeaseJudge:
        return self._leases.setdefault(name, LeaseJudge(self, name))

    def _queue(self, name: str) -> QueueJudge:
        return self._queues.setdefault(name, QueueJudge(self, name))

    def _judge_subscription(self, socket: Socket) -> None:
        """S11: a listener that is ended subscribes again after a pause."""
        last = self._subscribed.get(socket.process, socket)
        if socket.connected_at < last.connected_at:
            return  # given up before it was heard
        pause = socket.connected_at - last.connected_at
        if last is not socket and pause < Timing.resubscribe_after - SHORTER_BY_DRIFT:
            self.fail(f"S11: {socket.process} subscribed again after {pause:.3f} s")
        was_used = self.now - self._listened_at.get(socket.process, -inf) < Timing.listener_idle * (1 - DRIFT)
        if last is not socket and was_used and self.is_undisturbed(socket.process, last.connected_at):
            self.fail(f"S11: {socket.process} subscribed again, though its subscription stood and was used")
        self._subscribed[socket.process] = socket

    def _check_that_all_expire(self) -> None:
        store = self.server.store
        for key in store.keys() - {"lock|f"}:
            if store.expires_at(key) == inf:
                self.fail(f"S9: the key {key} has no expiry")


def leases_in(store: Store, keys: Keys, name: str) -> Sequence[StoredLease]:
    """Of the lock, in the order of their slots."""
    found, key = [], keys.lease(name)
    if isinstance(value := store.peek(key), str):
        _format, token, state, fence, _holder = value.split(" ", 4)
        found.append(StoredLease(token, state, int(fence), store.expires_at(key)))
    others, now = store.peek(keys.others(name)) or {}, store.micros() // 1000
    for value, end in others.items() if isinstance(others, dict) else ():
        _format, token, state, fence, slot, _holder = value.split(" ", 5)
        if end > now:
            lasts = end / 1000 - store.micros() / 1_000_000
            found.append(StoredLease(token, state, int(fence), store.seconds() + lasts, int(slot)))
    return sorted(found, key=lambda lease: lease.slot)


def holders_in(store: Store, keys: Keys, name: str) -> set[str]:
    """The tokens of those that hold the lock, or may by what a message told them."""
    return {lease.token for lease in leases_in(store, keys, name) if lease.state in "hc"}


def _script(command: Sequence[str]) -> str:
    """About one lock."""
    return SCRIPTS.get(_sha(command), "")


def _sha(command: Sequence[str]) -> str:
    match command[0].upper():
        case "EVALSHA":
            return command[1]
        case "EVAL":
            return hashlib.sha1(command[1].encode("latin-1"), usedforsecurity=False).hexdigest()
    return ""
