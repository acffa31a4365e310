"""The locks that are compared, each used as in its documentation, with a TTL of 30 s."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from urllib.parse import urlsplit

import django
import pottery
import redis
import redis_lock
from django.conf import settings
from django.core.cache import cache

from django_distlock import lock, locks

from . import floor

TTL = 30

OURS, FLOOR = "django-distlock", "bare socket"

Pair = Callable[[], None]
AsyncPair = Callable[[], Awaitable[None]]
Enter = Callable[[], AbstractContextManager[object]]


def configure(url: str) -> None:
    settings.configure(
        DISTRIBUTED_LOCKS={
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": url},
            "memory": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"},
        },
        CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}},
    )
    django.setup()


def configure_redlock(url: str, urls: Sequence[str]) -> None:
    settings.configure(
        DISTRIBUTED_LOCKS={
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": url},
            "quorum": {"BACKEND": "django_distlock.backends.redlock.RedlockBackend", "LOCATION": urls},
        },
        LOGGING_CONFIG=None,
    )
    django.setup()


def _path(url: str) -> str:
    return urlsplit(url).path


# One thread; nobody else wants the lock


def pairs(url: str) -> dict[str, Pair]:
    """Returns calls that each acquire and release once."""
    client = redis.Redis.from_url(url)
    handle = lock("pair:handle", ttl=TTL)

    def with_() -> None:
        with lock("pair:with", ttl=TTL):
            pass

    def without_renewal() -> None:
        with lock("pair:plain", ttl=TTL, renew=False):
            pass

    def by_handle() -> None:
        handle.acquire()
        handle.release()

    def in_memory() -> None:
        with lock("pair", ttl=TTL, using="memory"):
            pass

    def redis_py() -> None:
        with client.lock("pair:redis-py", timeout=TTL):
            pass

    def django_redis() -> None:
        with cache.lock("pair:django-redis", timeout=TTL):  # type: ignore[attr-defined]
            pass

    def python_redis_lock() -> None:
        with redis_lock.Lock(client, "pair:python-redis-lock", expire=TTL):
            pass

    def redlock() -> None:
        with pottery.Redlock(key="pair:pottery", masters={client}, auto_release_time=TTL):
            pass

    return {
        FLOOR: floor.Pair(_path(url), b"pair:floor", TTL * 1000),
        f"{OURS}, with": with_,
        f"{OURS}, renew=False": without_renewal,
        f"{OURS}, by a handle": by_handle,
        f"{OURS}, in memory": in_memory,
        "redis.lock.Lock": redis_py,
        "django-redis cache.lock": django_redis,
        "python-redis-lock": python_redis_lock,
        "pottery Redlock, one master": redlock,
    }


ASYNC_OURS, ASYNC_REDIS_PY = f"{OURS}, async with", "redis.asyncio.lock.Lock"


def async_pairs(url: str) -> dict[str, AsyncPair]:
    client = redis.asyncio.Redis.from_url(url)

    async def async_with() -> None:
        async with lock("pair:async", ttl=TTL):
            pass

    async def redis_py() -> None:
        async with client.lock("pair:async-redis-py", timeout=TTL):
            pass

    return {ASYNC_OURS: async_with, ASYNC_REDIS_PY: redis_py}


# Many want the same lock

REDIS_PY, REDIS_PY_FAST = "redis.lock.Lock", "redis.lock.Lock at 10 ms"


def queuers(url: str, slots: int = 1) -> dict[str, Callable[[], Enter]]:
    """Returns, for a process, functions that make what each of its threads enters, with an open connection.

    ``slots``: how many may be inside at once; only the floor and our lock have slots.
    """

    def bare() -> Enter:
        return floor.Baton(_path(url), b"queue:floor").held

    def ours() -> Enter:
        locks["default"].look(["queue:ours"])
        return partial(lock, "queue:ours", ttl=TTL, wait=None, slots=slots)

    client = redis.Redis.from_url(url)

    def redis_py(sleep: float) -> Enter:
        client.ping()
        return partial(client.lock, f"queue:redis-py:{sleep}", timeout=TTL, sleep=sleep)

    def python_redis_lock() -> Enter:
        client.ping()
        return partial(redis_lock.Lock, client, "queue:python-redis-lock", expire=TTL)

    return {
        FLOOR: bare,
        OURS: ours,
        REDIS_PY: partial(redis_py, 0.1),
        REDIS_PY_FAST: partial(redis_py, 0.01),
        "python-redis-lock": python_redis_lock,
    }


def prepare_queues(url: str, slots: int) -> None:
    """Put the batons of the floor, one for each slot, into an empty store."""
    redis.Redis.from_url(url).flushall()
    for _ in range(slots):
        floor.Baton(_path(url), b"queue:floor").lay_down()
