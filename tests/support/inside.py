"""What tests look up inside the package, where nothing public shows it; each thing is accessed once, here.

Programs without Django's apps import it, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_distlock import Lease
from django_distlock.backends.redis import connection as redis_connection


def listener_of(backend: Any) -> Any:
    return backend._listener


def client_of(backend: Any) -> Any:
    return backend._client


def idle_in(pool: Any) -> Any:
    """The connections that a pool or a client keeps."""
    return pool._idle


def nodes_of(owner: Any) -> Any:
    """The nodes of a quorum, of its connections, or of the listener of a Cluster."""
    return owner._nodes


def make_silent(client: Any, since: float) -> None:
    """As if no server had answered since then, on ``clock()``."""
    client._silent_since = since


def permits_of(owner: Any) -> Any:
    return owner._permits


def clients_of_loops(backend: Any) -> Any:
    """By event loop."""
    return backend._async_clients


def run_in(backend: Any, *arguments: Any) -> Any:
    """Work on a connection of a backend in a database."""
    return backend._run(*arguments)


def run_or_repeat_in(backend: Any, *arguments: Any) -> Any:
    return backend._run_or_repeat(*arguments)


def sql_of(backend: Any) -> Any:
    return backend._sql


def row_key(backend: Any, name: str) -> Any:
    return backend._key(name)


def operations_of(backend: Any) -> Any:
    return backend._operations


def fast_path_of(backend: Any) -> Any:
    return operations_of(backend)._fast_path


def runs_of(backend: Any) -> Any:
    """The runs of beat in local memory."""
    return backend._runs


def schedule_store_of(scheduler: Any) -> Any:
    return scheduler._schedule_store


def lines_of(queue: Any) -> Any:
    return queue._lines


def watchdog_of(pool: Any) -> Any:
    return pool._watchdog


def failed_addresses() -> dict[Any, Any]:
    """When connecting to them failed."""
    return redis_connection._failed_at


def lookups_of_names() -> Any:
    """Those that are on their way."""
    return redis_connection._lookups


def look_at_schedule(scheduler: Any) -> None:
    """At its next tick, as after max_interval."""
    scheduler._tick_at = 0.0


def position_in(backend: Any) -> Any:
    """What looks up the position of a waiter."""
    return backend._position


def replace_position(monkeypatch: Any, backend: Any, instead: Any) -> None:
    monkeypatch.setattr(backend, "_position", instead)


def bound_calls(monkeypatch: Any, backend: Any, timeout: float) -> None:
    """Seconds that calls of a backend in a database may take."""
    monkeypatch.setattr(backend.calls, "_timeout", timeout)


def keep_sessions(monkeypatch: Any, kept: bool) -> None:
    """Whether a new connection takes what it reaches for a server that keeps its session, and not for a pooler."""
    monkeypatch.setattr("django_distlock.backends.database.connections._set_up_session", lambda _: kept)


def explained(backend: Any, error: Exception) -> Any:
    """What the backend makes of an error of its client."""
    return backend._explain(error)


def before_a_loss_is_told(monkeypatch: Any, call: Callable[[], object]) -> None:
    """The renewer has dropped the next lost lease, and makes that call before it says so."""
    mark = Lease._mark_lost

    def call_and_mark(lease: Lease, reason: str, **how: Any) -> None:
        monkeypatch.setattr(Lease, mark.__name__, mark)
        call()
        mark(lease, reason, **how)

    monkeypatch.setattr(Lease, mark.__name__, call_and_mark)
