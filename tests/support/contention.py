"""Threads that want the same locks, and count who else is inside."""

from __future__ import annotations

import threading
import time
from collections import Counter

import redis

from django_distlock import LockError, lock


def contend(url: str, *, threads: int, names: int = 2, seconds: float = 0.5) -> Counter[str]:
    """How often a lock was held, how often by two at once, and the errors by their names.

    The counters of who is inside are in the server at ``url``.
    """
    found: Counter[str] = Counter()
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        name = f"contended {number % names}"
        with redis.Redis.from_url(url, socket_timeout=5) as inside:
            while True:  # each thread at least once, however busy the machine is
                try:
                    with lock(name, wait=20, ttl=5):
                        if inside.incr(f"inside {name}") > 1:
                            found["two"] += 1
                        time.sleep(0.002)
                        inside.decr(f"inside {name}")
                        found["held"] += 1
                except LockError as error:
                    found[type(error).__name__] += 1
                if time.monotonic() > end:
                    return

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(seconds + 60)
    return found
