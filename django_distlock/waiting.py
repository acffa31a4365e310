"""How a busy lock is waited for: one algorithm, driven by threads and by tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, cast

from .backends.base import BaseLockBackend
from .exceptions import LockBackendError
from .leases import Keeper
from .tickets import Grant, LockInfo, Ticket, clock, safe_deadline

LOOK_INTERVAL = 1.0  # seconds after which a waiter asks the store again, should nobody have woken it
AFTER_EXPIRY = 0.002  # seconds to let pass after a lease runs out, so that one look finds it gone


class Outcome(NamedTuple):
    """``grant`` if the lock was acquired, else ``busy`` tells who has it. The ticket is the one that counts."""

    ticket: Ticket
    grant: Grant | None
    busy: LockInfo | None


class Ask(NamedTuple):
    """A call for the driver to make: ``backend.method(ticket, …)``, or its ``a`` twin."""

    method: str
    ticket: Ticket
    arguments: dict[str, Any]


Steps = Generator[Ask, Any, Outcome]


def steps(ticket: Ticket, wait: float | None, pointless: Callable[[LockInfo], bool]) -> Steps:
    """Ask until the lock is granted, ``wait`` seconds have passed (None: for ever), or waiting is pointless.

    A grant counts only while its deadline lies ahead: a process that was stopped meanwhile gives it back.
    """
    give_up = None if wait is None else clock() + wait
    while True:
        left = None if give_up is None else give_up - clock()
        ticket.holder = ticket.holder.from_now()
        answer = yield Ask("acquire", ticket, {"queue": left is None or left > 0})
        if isinstance(answer, Grant):
            if clock() < safe_deadline(answer.sent_at, ticket.ttl):
                return Outcome(ticket, answer, None)
            yield Ask("release", ticket, {})
            ticket = ticket.anew()
        elif left is not None and left <= 0:
            return Outcome(ticket, None, answer)
        elif pointless(answer):
            yield Ask("release", ticket, {})
            return Outcome(ticket, None, answer)
        else:
            pause = min(LOOK_INTERVAL, answer.remaining + AFTER_EXPIRY)
            if give_up is not None:
                pause = min(pause, max(0.0, give_up - clock()))
            yield Ask("wait_turn", ticket, {"timeout": pause})


def acquire(backend: BaseLockBackend, keeper: Keeper, todo: Steps) -> Outcome:
    """Take the steps. Raises LockBackendError; whatever it raises, nothing of the ticket stays behind."""
    ask = next(todo)
    try:
        while True:
            ask = todo.send(getattr(backend, ask.method)(ask.ticket, **ask.arguments))
    except StopIteration as end:
        return cast(Outcome, end.value)
    except BaseException as error:
        if _may_have_left_something(backend, ask, error):
            keeper.abandon(ask.ticket)
        raise


async def aacquire(backend: BaseLockBackend, keeper: Keeper, todo: Steps) -> Outcome:
    ask = next(todo)
    try:
        while True:
            ask = todo.send(await getattr(backend, f"a{ask.method}")(ask.ticket, **ask.arguments))
    except StopIteration as end:
        return cast(Outcome, end.value)
    except BaseException as error:
        if _may_have_left_something(backend, ask, error):
            keeper.abandon(ask.ticket)
        raise


def _may_have_left_something(backend: BaseLockBackend, ask: Ask, error: BaseException) -> bool:
    """Not when the store was never reached, or said no."""
    refused = ask.method == "acquire" and isinstance(error, LockBackendError) and not ask.ticket.unanswered
    return backend.supports_queue or not refused
