"""What tests look up inside the package, where nothing public shows it; each thing is accessed once, here.

Programs without Django's apps import it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_distlock import Lease, locks


def forget_what_is_left() -> None:
    """Of leases and attempts of this process."""
    for renewer in locks._renewers:
        renewer.forget()


def listener_of(backend: Any) -> Any:
    return backend._listener


def client_of(backend: Any) -> Any:
    return backend._client


def kazoo_of(backend: Any) -> Any:
    """The client of kazoo that has the session of a backend; None: it has none."""
    return client_of(backend)._opened.get("client")


def nodes_of(owner: Any) -> Any:
    """The nodes of a quorum, of its connections, or of the listener of a Cluster."""
    return owner._nodes


def filling_of(nodes: Any) -> Any:
    """Sets of connections to a quorum that wait for some."""
    return nodes._filling


def order_of(sentinels: Any) -> Any:
    """In which they are asked."""
    return sentinels._order


def lines_of(queue: Any) -> Any:
    """By name, who stands in a local queue."""
    return queue._lines


def clients_of_loops(backend: Any) -> Any:
    """By event loop."""
    return backend._async_clients


def waiters_of(listener: Any) -> Any:
    """Whom it would wake."""
    return listener._waiters


def calls_watched_of(pool: Any) -> Any:
    """Of a database, those that its watchdog would end."""
    return pool._watchdog._calls


def make_silent(client: Any, since: float) -> None:
    """As if no server had answered since then, on ``clock()``."""
    client._breaker.failing_since = since


def permits_of(owner: Any) -> Any:
    return owner._permits


def runs_of(backend: Any) -> Any:
    """The runs of beat in local memory."""
    return backend._runs


def schedule_store_of(scheduler: Any) -> Any:
    return scheduler._schedule_store


def lose_broker(scheduler: Any) -> None:
    """As after a message that the broker did not take."""
    scheduler._broker.failed(OSError("the broker is down"))


def look_at_schedule(scheduler: Any) -> None:
    """At its next tick, as after max_interval."""
    scheduler._tick_at = 0.0


def keep_sessions(monkeypatch: Any, kept: bool) -> None:
    """Whether a new connection takes what it reaches for a server that keeps its session, and not for a pooler."""
    monkeypatch.setattr("django_distlock.backends.database.connections._set_up_session", lambda _: kept)


def before_a_loss_is_told(monkeypatch: Any, call: Callable[[], object]) -> None:
    """The renewer has dropped the next lost lease, and makes that call before it says so."""
    mark = Lease._mark_lost

    def call_and_mark(lease: Lease, reason: str, **how: Any) -> None:
        monkeypatch.setattr(Lease, mark.__name__, mark)
        call()
        mark(lease, reason, **how)

    monkeypatch.setattr(Lease, mark.__name__, call_and_mark)


def waiters_for_the_end_of(lease: Lease) -> int:
    return len(lease._watchers or ())
