"""What is asked of the nodes, and what they answered so far: shared by threads and tasks."""

from __future__ import annotations

import builtins
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any, NamedTuple

from redis.exceptions import ConnectionError, TimeoutError

from ...exceptions import LockBackendError
from ...utils.clock import clock
from ..redis.errors import is_transient
from ..redis.scripts import Command, Script, pack

ACQUIRE, RELEASE, RENEW = (Script(name, "redlock") for name in ("acquire", "release", "renew"))
LOADS = [pack("SCRIPT", "LOAD", script.text) for script in (ACQUIRE, RELEASE, RENEW)]  # for each new connection

AGAIN = 0.5  # seconds before another connection is tried to a node that failed
PACE = 0.1  # the same where a majority is missing
GIVEN_UP = 2.0  # seconds without a reply after which a connection is closed
MOST_AWAITED = 16  # replies that one connection may owe: what a node that hangs takes in without blocking us
GRACE = 0.01  # seconds that a node which is being connected to may come later than the majority
HANDSHAKE = 0.35  # seconds that a caller waits for a connection beyond the time in which it is opened


def check_process(pid: int) -> None:
    """Raise LockBackendError where process ``pid`` began what runs here: a fork copies greenlets, too.

    What the parent asked for is the parent's. Its copy neither sends anything nor reads what the parent is answered.
    """
    if os.getpid() != pid:
        raise LockBackendError(
            f"Process {pid} was forked while it asked its nodes. It goes on to ask; in its child, process"
            f" {os.getpid()}, nobody does. Ask anew there."
        )


class NotYetConnected(TimeoutError):
    """A connection is only being opened."""

    def __init__(self) -> None:
        super().__init__("no connection yet")


class Asked:
    """One node, asked in one round. A reply may come after the round is over.

    ``was_sent``: the node may have executed it, or may do so yet, whatever is known. ``connection``: on which.
    ``is_settled``: it was answered, or failed for this round. ``remedy``: makes what undoes the request, to be
    sent behind it if nobody can wait for its reply any more. ``patience``: seconds that its round lasts.
    """

    __slots__ = (
        "connection", "expects", "failure", "is_answered", "is_settled", "notify", "patience", "remedy", "replies",
        "sent_at", "was_sent",
    )  # fmt: skip

    def __init__(
        self, expects: int, sent_at: float = 0.0, connection: object = None, *, failure: Exception | None = None
    ) -> None:
        self.expects, self.sent_at, self.connection = expects, sent_at, connection
        self.failure = failure
        self.was_sent = failure is None and expects > 0
        self.replies: list[Any] = []
        self.is_answered = not expects
        self.is_settled = not self.was_sent
        self.notify: Callable[[], None] | None = None
        self.remedy: Callable[[], Message] | None = None
        self.patience = 0.0

    def take(self, reply: Any) -> bool:
        """Whether this was the last reply."""
        self.replies.append(reply)
        if len(self.replies) < self.expects:
            return False
        self.is_answered = True
        self._settle()
        return True

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self._settle()

    @property
    def hangs(self) -> bool:
        """Nothing could be sent, and the node does not refuse connections either."""
        return not self.was_sent and isinstance(self.failure, TimeoutError | builtins.TimeoutError)

    @property
    def was_missed(self) -> bool:
        """Its connection broke, or was not open yet: another try may reach the node."""
        broke = self.was_sent and isinstance(self.failure, ConnectionError)
        return broke or isinstance(self.failure, NotYetConnected)

    def _settle(self) -> None:
        self.is_settled = True
        if self.notify:
            self.notify()


NOT_ASKED = Asked(0)


class Message(NamedTuple):
    """Commands, packed once for all nodes that are sent them."""

    packed: bytes
    replies: int

    @classmethod
    def of(cls, *commands: Command) -> Message:
        return cls(b"".join([command.packed for command in commands]), len(commands))


class Verdict(Exception):
    """How steps end that have no result. It says nothing against the connections."""


class Round(NamedTuple):
    """``message``: what to send to a node, by its number, on a connection; None where it is not asked.

    ``enough``: whether the answers that came suffice; asked again with each further one, until all are settled.
    """

    message: Callable[[int, object], Message | None]
    enough: Callable[[Sequence[Asked]], bool]


NodeSteps = Generator[Round, list[Asked], Any]


def all_settled(asked: Sequence[Asked]) -> bool:
    return all(one.is_settled for one in asked)


def time_out(asked: Sequence[Asked], patience: float) -> None:
    for one in asked:
        if not one.is_settled:
            one.fail(TimeoutError(f"no answer within {patience:g} s"))


class NodeState(ABC):
    """What is known of reaching one node, whoever asks."""

    failure: Exception | None = None  # why it is not asked just now
    connecting_since = 0.0
    _failed_at = -inf

    @property
    @abstractmethod
    def openings(self) -> int:
        """Connections that are being opened.

        Asked of what opens them, because a handler of a signal may raise between any two steps of who begins that.
        """

    @property
    def is_connecting(self) -> bool:
        return self.openings > 0

    @property
    def is_hopeful(self) -> bool:
        """It may be there in a moment, for all we know."""
        return self.is_connecting and self.failure is None

    def may_connect(self, wanted: int, *, insist: bool) -> bool:
        """Whether to open one more connection, where so many are wanted; to a node that fails, one at a time."""
        if self.failure is None:
            return self.openings < wanted
        pause = PACE if insist and not self.is_refused else AGAIN
        return not self.is_connecting and clock() >= self._failed_at + pause

    def may_come(self, since: float, *, persists: bool) -> bool:
        """Whether to wait for a connection to it. What an attempt met that began before then is no answer."""
        return self.is_connecting or (not self.is_refused and (persists or self.connecting_since < since))

    @property
    def is_refused(self) -> bool:
        """Somebody has to correct something first, such as a password or a certificate."""
        return self.failure is not None and not is_transient(self.failure)

    def fail(self, error: Exception) -> None:
        self.failure, self._failed_at = error, clock()


class ConnectWait:
    """How long to wait for nodes that are not connected.

    ``persists``: also for those that refuse a connection, which are asked again and again; else a majority that
    refuses is an answer. What an attempt met that was made before is none: the nodes may be back. Where somebody
    has to correct something first, it always is.
    """

    def __init__(self, majority: int, patience: float, *, persists: bool) -> None:
        self._majority, self._persists = majority, persists
        self._began = clock()
        self._patience = patience
        self._decided_after: float | None = None

    def wait(self, ready: int, missing: Sequence[NodeState]) -> float:
        """Seconds, at most ``PACE`` at a time; 0 or less: go on with those that are there.

        Once a majority is there, or has refused: as long again as that took, counted for each node from when we
        began to connect to it.
        """
        now = clock()
        if ready < self._majority:
            coming = sum(node.may_come(self._began, persists=self._persists) for node in missing)
            if ready + coming >= self._majority:
                return min(PACE, self._began + self._patience - now)
        if self._decided_after is None:
            self._decided_after = now - self._began
        grace = 2 * self._decided_after + GRACE
        return max((node.connecting_since + grace - now for node in missing if node.is_hopeful), default=0.0)
