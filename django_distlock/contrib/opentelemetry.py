"""Traces and metrics of the locks of this process, with the API of OpenTelemetry alone.

Each lock has two spans, ``distlock.wait`` and ``distlock.hold``. They are made when they are over, with the times at
which they began and ended, because one thread may acquire a lock and another one release it. So neither is ever the
current span, and spans of code under a lock have the same parent as the lock.

Metrics: the histograms ``distlock.wait`` and ``distlock.hold`` (seconds), the counters ``distlock.acquired``,
``distlock.busy``, ``distlock.lost`` and ``distlock.renewals``, and the gauge ``distlock.held``, the number of leases
that this process holds. Their attributes are ``template`` and ``alias``.

The package's own locks have neither spans nor metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from django.dispatch import Signal
from opentelemetry import context, metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Status, StatusCode, TracerProvider

from .. import signals
from ..core.lease import Lease
from ..core.registry import locks
from ..exceptions import LockBackendError
from ..monitoring.series import series_of
from ..names import OWN
from ..utils import fork
from ..utils.clock import wall_clock
from ..version import VERSION

SCOPE = "django_distlock"
BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600]  # seconds

Attributes = Mapping[str, str | int]


def instrument(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Begin to trace and measure, with these providers or with the global ones. A further call replaces them."""
    global _instruments
    uninstrument()
    _instruments = Instruments(tracer_provider, meter_provider)
    for signal, receiver in _instruments.receivers():
        signals.connect_prompt(signal, receiver)


def uninstrument() -> None:
    """Stop tracing and measuring."""
    global _instruments
    if _instruments:
        for signal, receiver in _instruments.receivers():
            signals.disconnect_prompt(signal, receiver)
    _instruments = None


def _of_others(receiver: Callable[..., None]) -> Callable[..., None]:
    """Returns the receiver without signals of the package's own locks."""

    @wraps(receiver)
    def receive(self: Instruments, name: str, **about: Any) -> None:
        if not name.startswith(OWN):
            receiver(self, name=name, **about)

    return receive


class Instruments:
    """Receives the signals of locks."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer = trace.get_tracer(SCOPE, VERSION, tracer_provider)
        meter = metrics.get_meter(SCOPE, VERSION, meter_provider)
        self._wait, self._hold = (
            meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=BUCKETS)
            for name, text in [
                ("distlock.wait", "How long locks were waited for."),
                ("distlock.hold", "How long locks were held."),
            ]
        )
        self._acquired = meter.create_counter("distlock.acquired", "{lock}", "Locks that were acquired.")
        self._busy = meter.create_counter("distlock.busy", "{lock}", "Locks that stayed busy for the whole wait.")
        self._lost = meter.create_counter("distlock.lost", "{lock}", "Leases that ended before they were released.")
        self._renewals = meter.create_counter("distlock.renewals", "{lease}", "Leases that were renewed.")
        meter.create_observable_gauge("distlock.held", [self._held], "{lease}", "Leases that this process holds.")
        self._contexts: WeakKeyDictionary[Lease, Context] = WeakKeyDictionary()  # in which each was acquired
        fork.in_child(self._forget)

    def receivers(self) -> list[tuple[Signal, Any]]:
        return [
            (signals.lock_acquired, self.on_acquired),
            (signals.lock_busy, self.on_busy),
            (signals.lock_unavailable, self.on_unavailable),
            (signals.lock_renewed, self.on_renewed),
            (signals.lock_released, self.on_released),
            (signals.lock_lost, self.on_lost),
        ]

    @_of_others
    def on_acquired(self, name: str, template: str, using: str, lease: Lease, waited: float, **_: object) -> None:
        series = _series(template, name, using)
        self._contexts[lease] = here = context.get_current()
        self._acquired.add(1, series)
        self._wait.record(waited, series)
        self._span("distlock.wait", waited, here, {**series, "name": name, "outcome": "acquired"})

    @_of_others
    def on_busy(self, name: str, template: str, using: str, reason: str, waited: float, **_: object) -> None:
        series = _series(template, name, using)
        self._busy.add(1, series)
        self._wait.record(waited, series)
        self._span("distlock.wait", waited, context.get_current(), {**series, "name": name, "outcome": reason})

    @_of_others
    def on_unavailable(
        self, name: str, template: str, using: str, waited: float, error: LockBackendError, **_: object
    ) -> None:
        about = {**_series(template, name, using), "name": name, "outcome": "unavailable"}
        self._span("distlock.wait", waited, context.get_current(), about, problem=type(error).__name__)

    @_of_others
    def on_renewed(self, name: str, template: str, using: str, **_: object) -> None:
        self._renewals.add(1, _series(template, name, using))

    @_of_others
    def on_released(self, name: str, template: str, using: str, lease: Lease, held: float, **_: object) -> None:
        self._end(_series(template, name, using), lease, held, "released")

    @_of_others
    def on_lost(
        self, name: str, template: str, using: str, lease: Lease, held: float, reason: str, **_: object
    ) -> None:
        series = _series(template, name, using)
        self._lost.add(1, series)
        self._end(series, lease, held, "lost", problem=reason)

    def _end(self, series: Attributes, lease: Lease, held: float, outcome: str, problem: str = "") -> None:
        self._hold.record(held, series)
        about = {**series, "name": lease.name, "fence": lease.fence, "outcome": outcome}
        self._span("distlock.hold", held, self._contexts.pop(lease, None), about, problem=problem)

    def _span(self, kind: str, seconds: float, parent: Context | None, about: Attributes, *, problem: str = "") -> None:
        """Make a span that ends now. ``seconds``: its length. ``parent``: None means the context that runs here.
        ``problem``: what went wrong."""
        now = wall_clock()
        span = self._tracer.start_span(kind, parent, attributes=about, start_time=_moment(now - seconds))
        if problem:
            span.set_status(Status(StatusCode.ERROR, problem))
        span.end(_moment(now))

    def _held(self, options: CallbackOptions) -> Iterable[Observation]:
        if _instruments is not self:  # a meter keeps its instruments
            return
        held = [lease for lease in locks.leases() if lease.is_held and not lease.name.startswith(OWN)]
        counted = Counter((series_of(lease.template, lease.name), lease.using) for lease in held)
        for (template, alias), count in counted.items():
            yield Observation(count, {"template": template, "alias": alias})

    def _forget(self) -> None:
        """In a forked child: the leases belong to the parent process."""
        self._contexts.clear()


def _series(template: str, name: str, using: str) -> dict[str, str]:
    return {"template": series_of(template, name), "alias": using}


def _moment(seconds: float) -> int:
    return int(seconds * 1e9)


_instruments: Instruments | None = None
