"""How a lock is asked for and waited for: one algorithm, driven by threads and by tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

from .backends.base import BaseLockBackend
from .exceptions import LockBackendError
from .leases import Keeper
from .tickets import Grant, LockInfo, Ticket, clock, safe_deadline

LOOK_INTERVAL = 1.0  # seconds after which a waiter asks the store again, should nobody have woken it
MOST_LATE_GRANTS = 3  # after so many grants that came too late to be of use, it is no accident any more
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone


class Outcome(NamedTuple):
    """``grant`` if the lock was acquired, else ``busy`` tells who has it."""

    grant: Grant | None
    busy: LockInfo | None


class Ask(NamedTuple):
    """A call for the driver to make: ``backend.method(ticket, …)``, or its ``a`` twin."""

    method: str
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
        backend: BaseLockBackend,
        keeper: Keeper,
        ticket: Ticket,
        seconds: float | None,
        pointless: Pointless,
        may_be_own: Callable[[], bool],
    ) -> None:
        self.backend = backend
        self.ticket = ticket
        self.grant: Grant | None = None
        self._keeper = keeper
        self._pointless = pointless  # told who has the lock: whether waiting for it makes no sense
        self._may_be_own = may_be_own  # whether that seems to be so, without asking the store
        self._give_up = ticket.give_up = None if seconds is None else clock() + seconds
        self._asked = False  # whether the store was told of the ticket
        self._queued = False
        self._bequeathed = False
        self._late_grants = 0

    def steps(self) -> Steps:
        outcome = None
        if self._may_be_own() or self._time_left() <= 0:
            outcome = yield from self._attempt(queue=False)
        elif not self.backend.is_listening(self.ticket.name) and self.backend.lines.goes_ahead(self.ticket):
            try:
                outcome = yield from self._attempt(queue=False)
            finally:
                self.backend.lines.tried(self.ticket)
        if outcome is None or not self._is_final(outcome):
            outcome = yield from self._waited()
        if not outcome.grant and not self._bequeathed and (self._queued or self.ticket.unanswered):
            yield Ask("release", {})
        return outcome

    def _is_final(self, outcome: Outcome) -> bool:
        return self._time_left() <= 0 or outcome.grant is not None or self._pointless(cast("LockInfo", outcome.busy))

    def _waited(self) -> Steps:
        granted = False
        try:
            self.backend.lines.join(self.ticket)
            outcome = yield from self._in_line()
            granted = outcome.grant is not None
            return outcome
        finally:
            heir, self._bequeathed = self.backend.lines.leave(self.ticket, bequeath=not granted)
            if heir:
                if self._bequeathed:
                    self.backend.succeed(heir)
                heir.bell.ring()

    def _in_line(self) -> Steps:
        while (left := self._time_left()) > 0:
            if failure := self.ticket.failure:
                raise LockBackendError(*failure.args) from failure
            pause = LOOK_INTERVAL
            speaks = self.backend.lines.speaks(self.ticket) or bool(self.ticket.inbox)
            if speaks or self._may_be_own():
                outcome = yield from self._attempt(queue=speaks)
                if self._is_final(outcome):
                    return outcome
                pause = min(pause, cast("LockInfo", outcome.busy).remaining + AFTER_EXPIRY)
                left = self._time_left()
            yield Ask("wait_turn", {"timeout": max(0.0, min(pause, left))})
            self.ticket.holder = self.ticket.holder.from_now()
        # Whoever stands behind goes on with the place in the store; without an heir it is given up.
        return (yield from self._attempt(queue=bool(self.ticket.inbox) and self.backend.lines.has_heir(self.ticket)))

    def _attempt(self, *, queue: bool) -> Steps:
        while True:
            self._queued = queue
            self._asked = self.ticket.asking = True
            answer = yield Ask("acquire", {"queue": queue})
            self.ticket.asking = False
            if not isinstance(answer, Grant):
                return Outcome(None, answer)
            if clock() < safe_deadline(answer.sent_at, self.ticket.ttl):
                self.grant = answer
                return Outcome(answer, None)
            # This process was stopped in between: others may have the lock by now.
            yield Ask("release", {})
            self.ticket.anew()
            self._queued = False
            self._late_grants += 1
            if self._time_left() <= 0 or self._late_grants == MOST_LATE_GRANTS:
                raise LockBackendError(
                    f"The store grants the lock {self.ticket.name!r} so slowly that its TTL of {self.ticket.ttl:g} s"
                    " has passed when the answer comes. Give it a longer ttl."
                )

    def _time_left(self) -> float:
        return LOOK_INTERVAL if self._give_up is None else self._give_up - clock()

    def interrupted(self, steps: Steps, asked: Ask, error: BaseException) -> None:
        failed = isinstance(error, LockBackendError) and asked.method == "acquire"
        if failed and self._time_left() > 0:  # a caller with no time left did not give the store much of it
            self.backend.lines.fail(self.ticket, cast("LockBackendError", error))
        steps.close()
        nothing_left = failed and not self._queued and not self.ticket.unanswered
        is_known = self._asked or bool(self.ticket.inbox)  # to the store, by itself or as an heir
        if is_known and not self._bequeathed and not nothing_left:
            self._keeper.abandon(self.ticket)


def acquire(wait: Wait, steps: Steps) -> Outcome:
    """Take the steps. Raises LockBackendError."""
    ask = next(steps)
    try:
        while True:
            ask = steps.send(getattr(wait.backend, ask.method)(wait.ticket, **ask.arguments))
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise


async def aacquire(wait: Wait, steps: Steps) -> Outcome:
    ask = next(steps)
    try:
        while True:
            ask = steps.send(await getattr(wait.backend, f"a{ask.method}")(wait.ticket, **ask.arguments))
    except StopIteration as end:
        return cast("Outcome", end.value)
    except BaseException as error:
        wait.interrupted(steps, ask, error)
        raise
