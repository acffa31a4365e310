"""Messages to the nodes, their replies so far, and the state of each node: shared by threads and tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from math import inf
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import ConnectionError, TimeoutError

from ...exceptions import LockBackendError
from ...utils import fork
from ...utils.clock import clock
from ..common.timing import Timing
from ..redis.breaker import ServerBreaker
from ..redis.errors import is_about_leaving, is_refused, is_transient, without_traceback
from ..redis.scripts import Command, Script, pack

ACQUIRE = Script("acquire", "redlock", keys=3)
RELEASE, RENEW = Script("release", "redlock", keys=2), Script("renew", "redlock", keys=1)
SCRIPT_LOADS = [pack("SCRIPT", "LOAD", script.text) for script in (ACQUIRE, RELEASE, RENEW)]  # for each new connection

MAX_PENDING = 16  # requests without a reply on one connection: a node that hangs accepts so many without blocking us


def check_process(pid: int) -> None:
    """Raise LockBackendError in a child if its parent ``pid`` began the call, because a fork also copies greenlets.

    Requests of the parent stay with the parent. The copy neither sends anything nor reads a reply.
    """
    if fork.pid() != pid:
        raise LockBackendError(
            f"Process {pid} was forked while it asked its nodes. It goes on to ask; in its child, process"
            f" {fork.pid()}, nobody does. Ask anew there."
        )


class NotYetConnected(TimeoutError):
    """The connection is still being opened."""

    def __init__(self) -> None:
        super().__init__("no connection yet")


class Closed(ConnectionError):
    """Closed by this process, which no longer needs it. Messages that were sent on it arrive."""


class Exchange:
    """A message to one node and its replies so far. They may come after the fan-out is over.

    ``was_sent``: the node may have executed it, or may still do so. ``connection``: the one on which it was sent.
    ``is_coming``: that connection is still being opened, perhaps not for the first time. ``is_settled``: it was
    answered, or failed for this fan-out. ``is_lost``: its connection ended before the answer; then ``on_lost`` is
    called. ``undo_message``: makes the message that undoes it, which is sent behind it if nobody can wait for the reply
    any more. ``timeout``: seconds that its fan-out lasts.
    """

    __slots__ = (
        "connection", "expects", "failure", "is_answered", "is_coming", "is_lost", "is_settled", "notify", "on_lost",
        "replies", "sent_at", "timeout", "undo_message", "was_sent",
    )  # fmt: skip

    def __init__(
        self,
        expects: int,
        sent_at: float = 0.0,
        connection: object = None,
        *,
        failure: Exception | None = None,
        is_coming: bool = False,
    ) -> None:
        self.expects, self.sent_at, self.connection = expects, sent_at, connection
        self.failure, self.is_coming = failure, is_coming
        self.was_sent = failure is None and expects > 0
        self.replies: list[Any] = []
        self.is_answered = not expects
        self.is_settled = not self.was_sent
        self.is_lost = False
        self.notify: Callable[[], None] | None = None
        self.on_lost: Callable[[], object] | None = None
        self.undo_message: Callable[[], Message] | None = None
        self.timeout = 0.0

    def take(self, reply: Any) -> bool:
        """Take a reply. Returns whether it was the last one."""
        self.replies.append(without_traceback(reply) if isinstance(reply, Exception) else reply)
        if len(self.replies) < self.expects:
            return False
        self.is_answered = True
        self._settle()
        return True

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or without_traceback(error)
        self._settle()

    def lose(self, error: Exception) -> None:
        """Its connection has ended."""
        self.is_lost = True
        self.fail(error)
        if self.on_lost and not isinstance(error, Closed):
            self.on_lost()

    @property
    def may_reach_later(self) -> bool:
        """Whether the node may have missed it and another try may arrive: the node hangs, or its connection broke or is
        still being opened. A node that refuses connections stays away for a TTL."""
        if self.was_sent:
            return self.is_lost
        if self.is_coming:  # an earlier failure says nothing
            return True
        return self.failure is not None and is_transient(self.failure) and not is_refused(self.failure)

    def _settle(self) -> None:
        self.is_settled = True
        if self.notify:
            self.notify()


NOT_ASKED = Exchange(0)


class Message(NamedTuple):
    """Commands, packed once for all nodes that get them."""

    packed: bytes
    replies: int

    @classmethod
    def of(cls, *commands: Command) -> Message:
        return cls(b"".join([command.packed for command in commands]), len(commands))


class StaleConnections(Exception):
    """No majority answered, perhaps because of idle connections: worth another try on new ones."""


class FanOut(NamedTuple):
    """Messages that are sent to all nodes at the same time.

    ``message``: returns the message for a node, by its number, on a connection; None: none. ``enough``: whether the
    replies so far are enough; called again with each further one, until all are settled.
    """

    message: Callable[[int, object], Message | None]
    enough: Callable[[Sequence[Exchange]], bool]


T = TypeVar("T")
NodeSteps = Generator[FanOut, list[Exchange], T]


class Limits(NamedTuple):
    """The limits of one run.

    ``timeout``: seconds for the replies to each fan-out. ``connect_timeout``: seconds to wait for connections, while
    all are in use or a majority is not connected; ``retry_refused``: also for nodes that refuse. ``queue_deadline``:
    the moment on ``clock()`` until which the caller waits at least if all are in use and the nodes answer. ``urgent``:
    also ask nodes with an overdue reply. ``despite_outage``: also open connections to nodes whose breaker is open.
    """

    timeout: float
    connect_timeout: float
    retry_refused: bool = False
    queue_deadline: float = -inf
    urgent: bool = False
    despite_outage: bool = False


def all_settled(exchanges: Sequence[Exchange]) -> bool:
    return all(exchange.is_settled for exchange in exchanges)


def time_out(exchanges: Sequence[Exchange], timeout: float) -> None:
    for exchange in exchanges:
        if not exchange.is_settled:
            exchange.fail(TimeoutError(f"no answer within {timeout:g} s"))


class NodeState(ABC):
    """Whether one node can be reached, as far as the threads of a process, or an event loop, know.

    ``breaker``: shared by the threads and all event loops.
    """

    failure: Exception | None = None  # why it is not asked now
    connecting_since = 0.0
    _failed_at = -inf
    _ended_at = inf  # when it first ended a connection that was being opened, if none was opened since
    _may_be_accident = False  # the last failure to connect

    def __init__(self, breaker: ServerBreaker, timing: Timing) -> None:
        self.breaker, self._timing = breaker, timing

    @property
    @abstractmethod
    def connecting_count(self) -> int:
        """How many connections are being opened.

        The code that opens them counts, because a signal handler may raise between any two steps of the caller.
        """

    @property
    def is_connecting(self) -> bool:
        return self.connecting_count > 0

    def unasked(self, message: Message, sent_at: float) -> Exchange:
        """The exchange with a node that has no connection."""
        failure = self.breaker.error() if self.breaker.is_open else self.failure or NotYetConnected()
        return Exchange(message.replies, sent_at, failure=failure, is_coming=self.is_connecting)

    @property
    def is_expected(self) -> bool:
        """Whether a connection may be open in a moment."""
        return self.is_connecting and self.failure is None

    def may_connect(self, wanted: int, *, lacks_majority: bool, despite_outage: bool) -> bool:
        """Whether to open another connection if ``wanted`` are missing; only one at a time to a node that fails.

        ``lacks_majority``: fewer nodes than a majority are connected, so it is tried more often.
        """
        if not despite_outage and self.breaker.turns_away():
            return False
        if self.failure is None:
            return self.connecting_count < wanted
        often, timing = lacks_majority and not self.is_refused, self._timing
        pause = timing.reconnect_pause_without_majority if often else timing.reconnect_pause
        return not self.is_connecting and clock() >= self._failed_at + pause

    def should_wait(self, since: float, limits: Limits) -> bool:
        """Whether to wait for a connection to it.

        An attempt to connect that began before then proves nothing, nor does a connection that ended while it was being
        opened, unless the next one ends as well.
        """
        if not limits.despite_outage and self.breaker.turns_away():
            return False
        is_unproven = self._may_be_accident or self.connecting_since < since
        return self.is_connecting or (not self.is_refused and (limits.retry_refused or is_unproven))

    @property
    def is_refused(self) -> bool:
        """Whether somebody has to correct something first, such as a password or a certificate."""
        return self.failure is not None and not is_transient(self.failure)

    def connecting_failed(self, began: float, error: Exception) -> None:
        self.failure, self._failed_at = error, clock()
        self._may_be_accident = is_about_leaving(error) and began <= self._ended_at
        if self._may_be_accident:
            self._ended_at = min(self._ended_at, self._failed_at)
        self.breaker.note(began, error)

    def connected(self) -> None:
        self.failure, self.breaker.answered_at = None, clock()
        self._ended_at, self._may_be_accident = inf, False

    def hangs(self, seconds: float) -> TimeoutError:
        """Note that it has owed an answer for so long that its connection must be given up. Returns the reason."""
        self.failure = failure = TimeoutError(f"no answer for {seconds:.1f} s")
        self.breaker.note(clock() - seconds, failure)
        return failure


class ConnectWait:
    """How long to wait for nodes that are not connected.

    ``timeout``: seconds. With ``retry_refused``, nodes that refuse a connection are tried again and again; otherwise a
    majority that refuses ends the wait. An earlier refusal does not count, because the nodes may be back. If somebody
    has to correct something first, or the breaker of a node is open, this always counts as a refusal.
    """

    def __init__(self, majority: int, timeout: float, timing: Timing, limits: Limits) -> None:
        self._majority, self._timing, self._limits = majority, timing, limits
        self._began = clock()
        self._deadline = self._began + timeout
        self._decided_after: float | None = None

    def seconds(self, ready: int, missing: Sequence[NodeState]) -> float:
        """Seconds to wait now, a part of the whole; 0 or less: continue with the nodes that are ready.

        When a majority is ready, or has refused, it waits as long again as that took, counted for each node from the
        moment at which we began to connect to it.
        """
        now = clock()
        if ready < self._majority:
            coming = sum(node.should_wait(self._began, self._limits) for node in missing)
            if ready + coming >= self._majority:
                return min(self._timing.reconnect_pause_without_majority, self._deadline - now)
        if self._decided_after is None:
            self._decided_after = now - self._began
        grace = 2 * self._decided_after + self._timing.connect_grace
        return max((node.connecting_since + grace - now for node in missing if node.is_expected), default=0.0)
