"""Measures ten thousand leases that one process holds and renews."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from sys import getsizeof
from time import monotonic, thread_time
from urllib.parse import urlsplit

from django_distlock import lock, locks

from . import floor
from .contenders import TTL, configure
from .measure import in_child, sleep_until
from .report import Column, Table

LEASES = 10_000
TICK = TTL / 3  # seconds from one renewal of a lease to the next

COLUMNS = (
    Column("leases", "leases", ",d"),
    Column("beyond_lease", "bytes beyond the lease object", ",.0f"),
    Column("bytes", "in all", ",.0f"),
    Column("threads", "threads", "d"),
    Column("round_trips", "trips/tick", ".1f"),
    Column("tick_ms", "tick ms", ".0f"),
    Column("tick_cpu_ms", "its CPU", ".1f"),
    Column("bare_ms", "bare socket's CPU", ".1f"),
    Column("idle_ms", "CPU, nothing due", ".3f"),
    Column("lost", "lost", "d"),
)


def run(url: str, *, ticks: int, progress: Callable[[str], None]) -> list[Table]:
    progress(f"{LEASES:,} leases, {ticks} tick(s) of {TICK:.0f} s")
    row = in_child(_hold, url, ticks, within=120 + ticks * TICK)
    return [Table("held", "Held leases with renewal, one process", COLUMNS, [row])]


class Renewals:
    """Wraps the backend's ``renew`` and records its calls. Each call is one round trip."""

    def __init__(self, renew: Callable[..., list[bool]]) -> None:
        self._renew = renew
        self.took: list[float] = []

    def __call__(self, *arguments: object, **options: object) -> list[bool]:
        began = monotonic()
        renewed = self._renew(*arguments, **options)
        self.took.append(monotonic() - began)
        return renewed


def _worked(thread: threading.Thread) -> float:
    """Returns the seconds of CPU time of the thread."""
    assert thread.ident
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _least(call: Callable[[], object]) -> float:
    """Returns the seconds of CPU time of the fastest of some calls."""
    took = []
    for _ in range(5):
        began = thread_time()
        call()
        took.append(thread_time() - began)
    return min(took)


def _hold(url: str, ticks: int) -> dict[str, float]:
    configure(url)
    backend = locks["default"]
    with lock("held:first", ttl=TTL) as first:
        first.renew()  # after this the server knows the script
        threads_before = threading.active_count() - 1  # the renewing thread runs already
    renewals = backend.renew = Renewals(backend.renew)  # type: ignore[method-assign, assignment]

    # Acquired as if by as many requests or tasks, each in its own context.
    names = [f"held:{number}" for number in range(LEASES)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    began = monotonic()
    handles = [lock(name, ttl=TTL) for name in names]
    for handle in handles:
        copy_context().run(handle.acquire)
    per_lease = (tracemalloc.get_traced_memory()[0] - before) / LEASES
    tracemalloc.stop()

    threads = threading.active_count() - threads_before
    [renews] = [one for one in threading.enumerate() if one.name == f"distlock-renewal-{backend.alias}"]
    worked = _worked(renews)
    sleep_until(began + ticks * TICK + TICK / 2)
    worked = _worked(renews) - worked
    renewer = locks.service(backend.alias).renewer
    leases = renewer.leases()
    row = {
        "leases": LEASES,
        "beyond_lease": per_lease - getsizeof(leases[0]),
        "bytes": per_lease,
        "threads": threads,
        "round_trips": len(renewals.took) / ticks,
        "tick_ms": sum(renewals.took) / ticks * 1000,
        "tick_cpu_ms": worked / ticks * 1000,
        "bare_ms": _least(partial(floor.renew, urlsplit(url).path, names)) * 1000,
        "idle_ms": _least(renewer.renew) * 1000,
        "lost": LEASES - sum(lease.remaining > 0 for lease in leases),
    }
    for handle in handles:
        handle.release()
    return row
