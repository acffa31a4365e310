"""Measures lists of very many locks: pages of the admin, and for how long the server cannot serve others meanwhile."""

from __future__ import annotations

import io
import resource
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter, process_time, time
from typing import Any

import django
import redis
from django.conf import settings

from .measure import in_child
from .report import Column, Table

PAGE = 100  # locks on a page
LOCKS = 100_000
FOREIGN_KEYS = 1_000_000  # keys of others, with a few locks among them
FEW = 10
TTL = 3600.0
PREPARED = 5_000  # keys at a time

FIRST = "the first page"
PAGES: Mapping[str, Mapping[str, str]] = {
    FIRST: {},
    "the page in the middle": {"p": "500"},
    "search by name": {"q": "order:012345"},
    "search by holder": {"q": "web-7"},
    "filter by prefix": {"prefix": "order:"},
    "sorted by time left": {"o": "2"},
    "sorted by time held": {"o": "3"},
}

TIMES = (
    Column("keys", "in the server"),
    Column("page", "page"),
    Column("seconds", "s", ".2f"),
    Column("work", "s of CPU", ".2f"),
    Column("by_page", "x page of few", ".1f"),
)
STALLS = (
    Column("keys", "in the server"),
    Column("command", "command"),
    Column("calls", "calls", ",d"),
    Column("median", "median µs", ".0f"),
    Column("p99", "99 % µs", ".0f"),
    Column("beyond", "over 1 ms", "d"),
)


EXPORTS = (
    Column("locks", "locks", ",d"),
    Column("seconds", "s", ".1f"),
    Column("work", "s of CPU", ".1f"),
    Column("written", "MB written", ".0f"),
    Column("memory", "MB more memory", ".0f"),
    Column("page", "s of a page", ".2f"),
)


def run(url: str, *, rounds: int, most: int, progress: Callable[[str], None]) -> list[Table]:
    """Empties the server before and after. ``most``: the number of locks in the longest list."""
    progress(f"pages of {LOCKS:,} locks, and of {FEW} among {FOREIGN_KEYS:,} other keys")
    times, stalls = in_child(_measure, url, rounds, within=300 + 60 * rounds)
    exports = []
    for count in (most // 10, most):
        progress(f"a list of {count:,} locks")
        page = in_child(_page_of, url, count, within=600)
        exports.append({"locks": count, **in_child(_export, url, within=600), "page": page})
    redis.Redis.from_url(url).flushall()
    return [
        Table(
            "listing",
            "The admin's page of held locks, fastest of the rounds; CPU time of its process alone",
            TIMES,
            times,
        ),
        Table("stalls", "How long the server was busy with one command of these pages", STALLS, stalls),
        Table("export", "locks list --json, and the admin's first page", EXPORTS, exports),
    ]


def _measure(url: str, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    _configure(url)
    get, server = _browser(), redis.Redis.from_url(url)
    server.config_set("slowlog-log-slower-than", 1000)
    times: list[dict[str, Any]] = []
    stalls: list[dict[str, Any]] = []
    for keys, fill, pages in (
        (f"{PAGE} locks", lambda: _hold(PAGE), [FIRST]),
        (f"{LOCKS:,} locks", lambda: _hold(LOCKS), list(PAGES)),
        (f"{FEW} locks, {FOREIGN_KEYS:,} other keys", lambda: _crowd(server), [FIRST]),
    ):
        server.flushall()
        fill()
        get(PAGES[FIRST])
        server.config_resetstat()
        server.slowlog_reset()
        for page in pages:
            seconds, work = _fastest(get, PAGES[page], rounds)
            by_page = seconds / times[0]["seconds"] if times else 1.0
            times.append({"keys": keys, "page": page, "seconds": seconds, "work": work, "by_page": by_page})
        if keys != times[0]["keys"]:
            stalls += [{"keys": keys, **row} for row in _stalls(server)]
    server.flushall()
    return times, stalls


def _configure(url: str) -> None:
    settings.configure(
        SECRET_KEY="for benchmarks only",
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF="benchmarks.admin_urls",
        USE_TZ=True,
        STATIC_URL="/static/",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=[
            "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
            "django.contrib.sessions", "django_distlock",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        DISTRIBUTED_LOCKS={"default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": url}},
    )  # fmt: skip
    django.setup()


def _browser() -> Callable[[Mapping[str, str]], None]:
    """Returns a function that requests the list as a user who may see it."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client

    call_command("migrate", verbosity=0)
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))

    def get(query: Mapping[str, str]) -> None:
        response = client.get("/admin/distlock/heldlock/", query)
        if response.status_code != 200:
            raise RuntimeError(f"the page of held locks answered {response.status_code}")

    return get


def _fastest(get: Callable[[Mapping[str, str]], None], query: Mapping[str, str], rounds: int) -> tuple[float, float]:
    """Returns the seconds, and the process' own CPU seconds of these, in the round with the least disturbance."""
    taken = []
    for _ in range(rounds):
        began, worked = perf_counter(), process_time()
        get(query)
        taken.append((perf_counter() - began, process_time() - worked))
    return min(taken)


def _hold(count: int) -> None:
    """Acquire so many locks, each as a request on one of twenty hosts would."""
    from django_distlock import locks
    from django_distlock.types import Holder, LockRequest

    backend: Any = locks["default"]
    for numbers in _portions(count):
        lock_requests = [
            LockRequest(
                f"order:{number:06}",
                TTL + number % 600,
                Holder(f"web-{number % 20}", number % 30_000, "MainThread", f"POST /orders/{number}/pay", _ago(number)),
            )
            for number in numbers
        ]
        commands = [backend._operations.acquire(lock_request, False) for lock_request in lock_requests]
        backend._client.send(commands)


def _page_of(url: str, count: int) -> float:
    """Returns the seconds of the second page for so many locks. Leaves the locks in the server."""
    _configure(url)
    get = _browser()
    redis.Redis.from_url(url).flushall()
    _hold(count)
    get(PAGES[FIRST])
    return _fastest(get, PAGES[FIRST], 1)[0]


class Sink(io.TextIOBase):
    """Counts the written characters."""

    written = 0

    def write(self, text: str) -> int:
        self.written += len(text)
        return len(text)


def _export(url: str) -> dict[str, float]:
    from django.core.management import call_command

    _configure(url)
    sink, kilobytes = Sink(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, worked = perf_counter(), process_time()
    call_command("locks", "list", "--json", stdout=sink)
    return {
        "seconds": perf_counter() - began,
        "work": process_time() - worked,
        "written": sink.written / 1e6,
        "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kilobytes) / 1024,
    }


def _portions(count: int) -> Iterator[range]:
    return (range(count)[start : start + PREPARED] for start in range(0, count, PREPARED))


def _ago(number: int) -> float:
    return round(time() - number % 600, 3)


def _crowd(server: redis.Redis) -> None:
    _hold(FEW)
    for numbers in _portions(FOREIGN_KEYS):
        server.mset({f"session:{number}": "x" * 20 for number in numbers})


def _stalls(server: redis.Redis) -> Iterator[dict[str, Any]]:
    """Gives the stalls from the server's own statistics. Its slow log counts commands of more than a millisecond."""
    calls, spread = server.info("commandstats"), server.info("latencystats")
    slow = [str(entry["command"].split()[0].decode()).lower() for entry in server.slowlog_get(1000)]
    for command in ("scan", "mget", "pttl"):
        if (stats := calls.get(f"cmdstat_{command}")) and (times := spread[f"latency_percentiles_usec_{command}"]):
            yield {
                "command": command.upper(),
                "calls": stats["calls"],
                "median": times["p50"],
                "p99": times["p99"],
                "beyond": slow.count(command),
            }
