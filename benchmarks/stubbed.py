"""Measures the CPU time of a pair in the client alone, with a socket that answers at once.

Run it by ``python -m benchmarks.stubbed``. Kernel and server are left out, and other work on the machine hardly
matters. A pair's cost is divided by the cost of redis-py's own lock in the same run. ``--check`` fails if this ratio is
more than a fifth above the one in ``stubbed.json`` for this version of Python. ``--opentelemetry`` measures with
instruments as well: with the API alone, which does nothing, and with the SDK. ``--journal`` measures with a journal.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from time import thread_time
from typing import Any

import django
import redis
from django.conf import settings

from example_project.valkey import Valkey

RATIOS = Path(__file__).with_suffix(".json")
ALLOWED = 1.2  # times the ratio in the file
ATTEMPTS = 3  # the best one counts
WARM_UP, BATCH, ROUNDS = 300, 500, 25
ONE_NAME, NEW_NAMES, VIEW, PEER = "one name", "a new name each time", "a decorated view", "redis.lock.Lock"


class AnsweringSocket:
    """Answers each message with the next one of these replies."""

    def __init__(self, *replies: bytes) -> None:
        self._replies, self._reply = cycle(replies), b""
        self._quiet, self._other_end = socket.socketpair()  # never readable, for code that checks whether it has ended

    def sendall(self, data: bytes) -> None:
        self._reply = next(self._replies)

    def recv(self, length: int) -> bytes:
        return self._reply

    def recv_into(self, buffer: Any) -> int:
        buffer[: len(self._reply)] = self._reply
        return len(self._reply)

    def fileno(self) -> int:
        return self._quiet.fileno()

    def settimeout(self, timeout: float | None) -> None: ...

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self._quiet.close()
        self._other_end.close()


def pairs(url: str) -> Mapping[str, Callable[[], None]]:
    """Returns calls that each acquire and release."""
    from django.http import HttpRequest, HttpResponse

    from django_distlock import distributed_lock, lock, locks

    def one_name() -> None:
        with lock("order:1"):
            pass

    numbers = count()

    def new_name() -> None:
        with lock("order:{}", next(numbers)):
            pass

    request, response = HttpRequest(), HttpResponse()
    request.method = "POST"

    @distributed_lock("order:{pk}")
    def pay(request: HttpRequest, pk: int) -> HttpResponse:
        return response

    def view() -> None:
        pay(request, pk=1)

    peer = redis.Redis.from_url(url).lock("order:1", timeout=30)

    def redis_py() -> None:
        peer.acquire()
        peer.release()

    one_name()
    redis_py()
    ours = locks["default"]._client._idle[0][0]
    ours.sock = AnsweringSocket(b":1800000000000000\r\n", b":1\r\n")
    [theirs] = peer.redis.connection_pool._available_connections
    theirs._sock = theirs._parser._sock = AnsweringSocket(b"+OK\r\n", b":1\r\n")
    return {ONE_NAME: one_name, NEW_NAMES: new_name, VIEW: view, PEER: redis_py}


@contextmanager
def answered_at_once() -> Iterator[Mapping[str, Callable[[], None]]]:
    """Sets up the process, and gives the pairs."""
    with Valkey() as server:
        entry = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": server.url}
        settings.configure(DISTRIBUTED_LOCKS={"default": entry}, LOGGING_CONFIG=None)
        django.setup()
        yield pairs(server.url)


def microseconds(calls: Mapping[str, Callable[[], None]], rounds: int = ROUNDS) -> dict[str, float]:
    """Returns the microseconds of each call in its cheapest batch. They take turns, so a slow moment affects all."""
    best: dict[str, float] = {}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = thread_time()
            for _ in range(BATCH):
                call()
            best[name] = min(best.get(name, 1e9), (thread_time() - began) / BATCH * 1e6)
    return best


def with_instruments(calls: Mapping[str, Callable[[], None]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields what the calls take without instruments, with the API and with the SDK of OpenTelemetry."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from django_distlock.contrib import opentelemetry

    yield "none", microseconds(calls)
    opentelemetry.instrument()
    yield "API", microseconds(calls)
    opentelemetry.instrument(TracerProvider(), MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False))
    yield "SDK", microseconds(calls)
    opentelemetry.uninstrument()
    yield "none again", microseconds(calls)


def with_a_journal(calls: Mapping[str, Callable[[], None]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields what the calls take without a journal and with one written nowhere, in turn: they differ by little."""
    from django_distlock import locks
    from django_distlock.backends.redis import RedisBackend
    from django_distlock.core.journal_writer import JournalWriter

    service, journals = locks.service("default"), dict.fromkeys(("without", "with"))
    RedisBackend.write_journal = lambda self, entries: None  # type: ignore[method-assign]
    journals["with"] = JournalWriter(service.backend, 1000)  # type: ignore[arg-type, assignment]
    best: dict[str, dict[str, float]] = {}
    for _ in range(ATTEMPTS * ROUNDS):
        for about, journal in journals.items():
            service.journal = service.renewer.journal = journal
            for name, took in microseconds(calls, rounds=1).items():
                best.setdefault(about, {})[name] = min(best.get(about, {}).get(name, took), took)
    yield from best.items()


def ratios(measured: Mapping[str, float]) -> dict[str, float]:
    return {name: round(took / measured[PEER], 3) for name, took in measured.items() if name != PEER}


def main() -> int:
    parser = argparse.ArgumentParser("benchmarks.stubbed", description=(__doc__ or "").replace("``", ""))
    parser.add_argument("--check", action="store_true", help="exit with 1 where it became dearer")
    parser.add_argument("--write", action="store_true", help=f"note the figures in {RATIOS.name}")
    parser.add_argument("--opentelemetry", action="store_true", help="measure with instruments, too, and nothing else")
    parser.add_argument("--journal", action="store_true", help="measure with a journal, too, and nothing else")
    options = parser.parse_args()
    if options.opentelemetry or options.journal:
        with answered_at_once() as calls:
            for about, measured in (with_instruments if options.opentelemetry else with_a_journal)(calls):
                for name, took in measured.items():
                    print(f"{took:7.1f} µs  {about:10}  {name}")
        return 0
    version = ".".join(platform.python_version_tuple()[:2])
    known = json.loads(RATIOS.read_text())
    if options.check and version not in known:
        print(f"{RATIOS.name} has no figures for Python {version}; note them with --write.", file=sys.stderr)
        return 1
    with answered_at_once() as calls:
        best: dict[str, float] = {}
        for _ in range(ATTEMPTS if options.check or options.write else 1):
            measured = microseconds(calls)
            for name, took in measured.items():
                print(f"{took:7.1f} µs {took / measured[PEER]:6.2f} x {PEER}  {name}")
            best = {name: min(ratio, best.get(name, ratio)) for name, ratio in ratios(measured).items()}
            dearer = {name for name, ratio in best.items() if ratio > ALLOWED * known.get(version, {}).get(name, ratio)}
            if options.check and not dearer:
                break
    if options.write:
        RATIOS.write_text(json.dumps({**known, version: best}, indent=2, sort_keys=True) + "\n")
    if options.check and dearer:
        for name in sorted(dearer):
            print(
                f"{name}: {best[name]:.2f} x {PEER}, where {RATIOS.name} says {known[version][name]:.2f}. Make it"
                " cheaper, or note the price with --write and say in the commit what it buys.",
                file=sys.stderr,
            )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
