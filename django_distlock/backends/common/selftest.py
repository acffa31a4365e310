"""A self-test of a store: acquire a lock, wait for it, renew it and release it."""

from __future__ import annotations

import secrets

from ...exceptions import LockBackendError
from ...types import CheckResult, Grant, Holder, Level, LockRequest, Slot
from ...utils.clock import clock
from ...utils.drive import Call, Steps

ROUND_TRIPS = 5  # the fastest counts, because the first one opens a connection
SLOW = 0.05  # seconds; with longer round trips, locks slow down the code that they guard


def failed(error: LockBackendError) -> CheckResult:
    return CheckResult(Level.ERROR, "reachable", str(error), "Correct this first: no lock can be acquired here.")


def new_request(prefix: str, ttl: float, name: str = "") -> LockRequest:
    """A request for a lock of that name, or of a name that nobody knows. ``prefix``: if KEY_PREFIX is a callable."""
    name = name or f"distlock-check-{secrets.token_hex(4)}"
    return LockRequest(name, ttl, Holder.here("locks check"), prefix=prefix)


def steps(prefix: str, ttl: float) -> Steps[list[CheckResult]]:
    """Yields calls to a backend, and returns the results of the check. Raises LockBackendError.

    ``ttl``: seconds for which the store shall keep the lock of the test, as those of the alias.
    """
    held, began_at = new_request(prefix, ttl), clock()
    name, waiter = held.name, new_request(prefix, ttl, held.name)
    if not isinstance((yield Call("acquire", (held,), {"queue": False})), Grant):
        raise LockBackendError(f"A lock that nobody can know, {name!r}, was busy.")
    times = []
    for _ in range(ROUND_TRIPS):
        began = clock()
        [seen] = yield Call("look", ([name],))
        times.append(clock() - began)
    excludes = not isinstance((yield Call("acquire", (waiter,), {"queue": True})), Grant)
    if excludes:  # looks once from the queue
        yield Call("acquire", (waiter,), {"queue": True})
    yield Call("release", (waiter,))
    slot = Slot(name)
    for question, about in (("holders", slot), ("remaining", slot), ("count_waiters", name)):
        yield Call(question, ([about],))
    listed = yield Call("list_slots", (name,))
    [renewed] = yield Call("renew", ([(held, ttl)],))
    released = yield Call("release", (held,))
    seconds = clock() - began_at
    if excludes and seen and slot in listed and renewed and released:
        results = [CheckResult(Level.OK, "reachable", "A lock was taken, waited for, renewed, listed and released.")]
    elif seconds > ttl:
        message = f"This test took {seconds:.1f} s, for which a lock with the TTL of {ttl:g} s is not kept."
        hint = "Give locks a longer TTL, or find out why the store or this machine is so slow."
        results = [CheckResult(Level.ERROR, "reachable", message, hint)]
    elif not excludes:
        results = [CheckResult(Level.WARNING, "reachable", "Locks of this backend exclude nobody.")]
    else:
        message = "The store did not keep a lock for the milliseconds of this test."
        results = [CheckResult(Level.ERROR, "reachable", message, "Does it evict keys, or does somebody empty it?")]
    took = f"A round trip takes {min(times) * 1000:.1f} ms."
    if min(times) > SLOW:
        return [
            *results,
            CheckResult(Level.WARNING, "latency", took, "Every acquisition and release takes one or more."),
        ]
    return [*results, CheckResult(Level.OK, "latency", took)]
