"""How a lock is asked for and waited for: one algorithm, driven by threads and by tasks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

from .exceptions import LockBackendError
from .handlers import Service
from .types import Grant, LockInfo, Ticket
from .utils.clock import clock, safe_deadline

logger = logging.getLogger("django_distlock")

LOOK_INTERVAL = 1.0  # seconds after which a waiter asks the store again, should nobody have woken it
MOST_LATE_GRANTS = 3  # after so many grants that came too late to be of use, it is no accident any more
SHORTEST_RETRY = 0.2  # seconds after which a waiter asks again a store that failed; then twice as many, up to a look
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone


class Outcome(NamedTuple):
    """``grant`` if the lock was acquired, else ``busy`` tells who has it."""

    grant: Grant | None
    busy: LockInfo | None


class Ask(NamedTuple):
    """A call for the driver to make: ``backend.method(ticket, …)``, or its ``a`` twin."""

    method: str
    ticket: Ticket
    arguments: dict[str, Any]


Steps = Generator[Ask, Any, Outcome]
Pointless = Callable[[LockInfo], bool]


class Wait:
    """One request for a lock, from the first attempt to the grant or the end of the wait.

    Whatever ends it, nothing of it stays in the store but what was granted. What cannot be taken back at
    once is left to the keeper, because whoever was interrupted must not wait for the store.
    """

    def __init__(
        self,
        service: Service,
        ticket: Ticket,
        seconds: float | None,
        pointless: Pointless,
        may_be_own: Callable[[], bool],
    ) -> None:
        self.backend = service.backend
        self.ticket = ticket
        self.grant: Grant | None = None
        self._queue = service.queue
        self._keeper = service.renewer
        self._pointless = pointless  # told who has the lock: whether waiting for it makes no sense
        self._may_be_own = may_be_own  # whether that seems to be so, without asking the store
        self._give_up = ticket.give_up = None if seconds is None else clock() + seconds
        self._asked = False  # whether the store was told of the ticket
        self._queued = False
        self._is_in_line = False
        self._is_busy = False  # the lock, as the store said
        self._waits = False  # has a place in the store, or stood behind others: its deadline alone fails it

    def steps(self) -> Steps:
        for _ in range(MOST_LATE_GRANTS):
            outcome = yield from self._outcome()
            if outcome.grant is None:
                if self._is_left_behind:
                    yield Ask("release", self.ticket, {})
                return outcome
            if clock() < safe_deadline(outcome.grant.sent_at, self.ticket.ttl):
                self.grant = outcome.grant
                return outcome
            # This process was stopped in between: others may have the lock by now. The ticket is finished before it
            # is given back, because that may be executed at any time, and nobody may go on with its token then.
            late, self.ticket = self.ticket, self.ticket.afresh()
            self._asked = self._queued = False
            yield Ask("release", late, {})
            if self._time_left() <= 0:
                break
        raise LockBackendError(
            f"The store grants the lock {self.ticket.name!r} so slowly that its TTL of {self.ticket.ttl:g} s"
            " has passed when the answer comes. Give it a longer ttl."
        )

    def _outcome(self) -> Steps:
        return (yield from self._attempt(queue=False) if self._time_left() <= 0 else self._waited())

    @property
    def _is_left_behind(self) -> bool:
        """Whether the store may keep something of a request that was not granted."""
        left = self._queued or bool(self.ticket.inbox) or self.ticket.unanswered
        return left and not self.ticket.is_bequeathed

    def _is_final(self, outcome: Outcome) -> bool:
        return self._time_left() <= 0 or outcome.grant is not None or self._pointless(cast("LockInfo", outcome.busy))

    def _waited(self) -> Steps:
        granted = False
        self._is_in_line = True
        try:
            self._queue.join(self.ticket)
            outcome = yield from self._in_line()
            granted = outcome.grant is not None
            return outcome
        finally:
            self._leave_line(bequeath=not granted)
            self._is_in_line = False

    def _leave_line(self, *, bequeath: bool, again: bool = False) -> None:
        self._queue.leave(self.ticket, bequeath=bequeath, succeed=self.backend.succeed, again=again)

    def _in_line(self) -> Steps:
        retry = 0.0
        while self._time_left() > 0:
            outcome = None
            try:
                outcome = yield from self._turn()
                retry = 0.0
            except LockBackendError as error:
                self._check_process()
                if error.is_final or not self._waits:
                    raise
                if not retry:
                    logger.warning("Lock %r is waited for on, though its store failed: %s", self.ticket.name, error)
                retry = min(max(SHORTEST_RETRY, 2 * retry), LOOK_INTERVAL)
            if outcome:
                return outcome
            if retry:
                yield self._rest("pause", retry)
        # Whoever stands behind goes on with the place in the store; without an heir it is given up.
        self._queue.asks(self.ticket)
        return (yield from self._attempt(queue=bool(self.ticket.inbox) and self._queue.has_heir(self.ticket)))

    def _turn(self) -> Generator[Ask, Any, Outcome | None]:
        """Ask the store when it is this one's turn to speak, and wait for the next. None: go on."""
        pause = LOOK_INTERVAL
        speaks, has_place, is_own = self._queue.speaks(self.ticket), bool(self.ticket.inbox), self._may_be_own()
        if speaks or has_place or is_own:
            # Most locks are free, so the first attempt takes no place where that would cost a subscription.
            is_ready = self._is_busy or (not is_own and self.backend.is_listening(self.ticket.name))
            queue = has_place or (speaks and is_ready)
            outcome = yield from self._attempt(queue=queue)
            if self._is_final(outcome):
                return outcome
            self._is_busy = True
            if speaks and not queue:
                return None
            pause = min(pause, cast("LockInfo", outcome.busy).remaining + AFTER_EXPIRY)
        self._waits = True
        yield self._rest("wait_turn", pause)
        self._check_process()
        self.ticket.holder = self.ticket.holder.from_now()
        return None

    def _rest(self, how: str, seconds: float) -> Ask:
        self.ticket.asking = False
        return Ask(how, self.ticket, {"timeout": max(0.0, min(seconds, self._time_left()))})

    def _attempt(self, *, queue: bool) -> Steps:
        self._queue.asks(self.ticket)
        self._queued, self._asked = queue, True
        answer = yield Ask("acquire", self.ticket, {"queue": queue})
        self._check_process()
        return Outcome(answer, None) if isinstance(answer, Grant) else Outcome(None, answer)

    def _check_process(self) -> None:
        """A fork copies greenlets, too. What the parent asked for is the parent's, also if the copy hears of it."""
        if self.ticket.holder.pid != os.getpid():
            raise LockBackendError(
                f"Process {self.ticket.holder.pid} was forked while it asked for the lock {self.ticket.name!r}. It goes"
                f" on to ask; in its child, process {os.getpid()}, nobody does. Ask anew there if it needs the lock."
            )

    def _time_left(self) -> float:
        return LOOK_INTERVAL if self._give_up is None else self._give_up - clock()

    def interrupted(self, steps: Steps, asked: Ask | None, error: BaseException) -> None:
        """``asked``: what was not answered, unless it was between two calls."""
        failed = asked is not None and asked.method == "acquire" and isinstance(error, LockBackendError)
        steps.close()
        if self._is_in_line:
            self._leave_line(bequeath=True, again=True)
        if asked and asked.ticket is not self.ticket:
            self._keeper.abandon(asked.ticket)  # a grant that came too late
        if self._is_left_behind or (self._asked and not failed and not self.ticket.is_bequeathed):
            self._keeper.abandon(self.ticket)


def acquire(wait: Wait, steps: Steps) -> Outcome:
    """Take the steps. Raises LockBackendError."""
    ask = None
    try:
        ask = next(steps)
        while True:
            try:
                answer = getattr(wait.backend, ask.method)(ask.ticket, **ask.arguments)
            except LockBackendError as error:
                ask = steps.throw(error)
            else:
                ask = None
                ask = steps.send(answer)
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise


async def aacquire(wait: Wait, steps: Steps) -> Outcome:
    ask = None
    try:
        ask = next(steps)
        while True:
            try:
                answer = await getattr(wait.backend, f"a{ask.method}")(ask.ticket, **ask.arguments)
            except LockBackendError as error:
                ask = steps.throw(error)
            else:
                ask = None
                ask = steps.send(answer)
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise
