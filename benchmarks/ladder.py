"""Shows what each step of ``with lock("x")`` costs, in microseconds: ``python -m benchmarks.ladder``.

The socket answers at once (see ``benchmarks.stubbed``). In turn, each step is replaced by one that does nothing. The
price of a step is how much faster the pair is without it. That is more than in a loop with the step alone, where the
CPU's caches know it. Steps share these caches, so the figures may add up to more than the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

from .stubbed import ONE_NAME, answered_at_once

WARM_UP, BATCH, ROUNDS = 1000, 500, 25


class Cut(NamedTuple):
    """A step to cut out: meanwhile ``owner.name`` is ``nothing``."""

    owner: Any
    name: str
    nothing: Any


def steps() -> Mapping[str, Sequence[Cut]]:
    from django_distlock.backends.redis.client import Client, Reply
    from django_distlock.backends.redis.operations import Operations
    from django_distlock.core import acquire, lock, transactions
    from django_distlock.core.known_leases import KnownLeases
    from django_distlock.core.local_queue import LocalQueue
    from django_distlock.core.registry import locks
    from django_distlock.core.renewal import Renewer
    from django_distlock.types import Holder, LockRequest
    from django_distlock.utils.clock import clock

    holder = Holder.here()
    request = LockRequest("order:1", 30.0, holder)
    operations = Operations("default", locks["default"].keys, "", "", locks["default"].timing, lambda error: error)
    asked, given_up = operations.acquire(request, False), operations.release(request, 0.0, False)
    thread, text, answers = threading.current_thread(), holder.to_text(), cycle([1_800_000_000_000_000, 1])

    def join(queue: LocalQueue, request: LockRequest, now: float) -> bool:
        request.asking = True
        return True

    return {
        "the name is checked": [Cut(lock, "fixed_name", lambda name: name)],
        "whose it is": [Cut(lock, "sync_owner", lambda: thread)],
        "the holder": [Cut(lock, "holder_here", lambda *_: holder)],
        "the holder's text": [Cut(Holder, "to_text", lambda _: text)],
        "the waiters of the process": [
            Cut(LocalQueue, "join", join),
            Cut(LocalQueue, "leave", lambda *_: None),
        ],
        "the command that acquires": [Cut(Operations, "acquire", lambda *_, **__: asked)],
        "the command that releases": [Cut(Operations, "release", lambda *_: given_up)],
        "both sent and answered": [Cut(Client, "send", lambda *_, **__: Reply([next(answers)], clock()))],
        "renewal": [
            Cut(Renewer, "register", lambda *_: None),
            Cut(KnownLeases, "unregister", lambda *_: True),
        ],
        "what the context holds": [Cut(acquire, "remember", lambda _: None)],
        "open transactions": [Cut(transactions, "retain_until_commit", lambda _: None)],
    }


@contextmanager
def without(cuts: Sequence[Cut]) -> Iterator[None]:
    kept = [Cut(cut.owner, cut.name, vars(cut.owner)[cut.name]) for cut in cuts]
    try:
        for owner, name, nothing in cuts:
            setattr(owner, name, nothing)
        yield
    finally:
        for owner, name, whole in kept:
            setattr(owner, name, whole)


def microseconds(pair: Callable[[], None]) -> float:
    began = thread_time()
    for _ in range(BATCH):
        pair()
    return (thread_time() - began) / BATCH * 1e6


def main() -> None:
    with answered_at_once() as pairs:
        pair, found = pairs[ONE_NAME], steps()
        for _ in range(WARM_UP):
            pair()
        whole: list[float] = []
        left: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(ROUNDS):
            whole.append(microseconds(pair))
            for name, cuts in found.items():
                with without(cuts):
                    pair()
                    left[name].append(microseconds(pair))
    print(f"{min(whole):7.1f} µs  a pair; median {median(whole):.1f} µs")
    for name, taken in left.items():
        print(f"{min(whole) - min(taken):7.1f} µs  {name}; median {median(whole) - median(taken):.1f} µs")


if __name__ == "__main__":
    main()
