"""What a process loads for its locks: a short list, because each process of a project pays for it when it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.seconds(2)

PACKAGE = {
    "": [
        "core", "exceptions", "formats", "journal", "names", "options", "signals", "types", "utils", "version",
    ],
    "core": [
        "acquire", "belief", "busy", "dropped", "events", "holds", "labels", "lease", "lock", "own_leases", "registry",
        "transactions", "ungranted",
    ],
    "utils": [
        "chance", "clock", "drive", "events", "fork", "guards", "other_words", "text", "threads", "wakeup", "weak",
    ],
}  # fmt: skip
GROUP = {"core": ["group"]}
DECORATORS = {"": ["decorators"], "decorators": ["answers", "http", "key", "task_context", "wrapper"], **GROUP}
SERVER = {
    "": ["backends", "grants", "runs"],
    "utils": ["shared_answer"],
    "core": ["cleaning", "known_leases", "local_queue", "renewal", "service"],
    "backends": ["base", "common", "optional", "redis", "twins"],
    "backends.common": [
        "attempts", "backoff", "breaker", "by_message", "key_prefix", "per_loop", "permits", "readers", "selftest",
        "timing", "wakeup_listener",
    ],
    "backends.redis": [
        "attempts", "backend", "breaker", "client", "codec", "config", "connection", "credentials", "diagnostics",
        "errors", "exchange", "keys", "operations", "pubsub", "replies", "runs", "scripts", "timers", "topology",
    ],
}  # fmt: skip
SENTINEL = {"backends.redis": ["sentinel"], "backends.redis.sentinel": ["config", "connection", "discovery"]}
CLUSTER = {
    "backends.redis": ["cluster"],
    "backends.redis.cluster": ["backend", "client", "config", "diagnostics", "pubsub", "routing"],
}
FOREIGN = {"dataclasses", "multiprocessing", "redis", "psycopg", "celery", "opentelemetry", "health_check"}

PROGRAM = """
import sys, django
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={{"default": {entry}}}, LOGGING_CONFIG=None)
django.setup()
before = set(sys.modules)
import django_distlock
{then}
print(*sorted(set(sys.modules) - before))
"""


def names(*lists):
    found = {f"{parent}.{name}" for one in lists for parent, children in one.items() for name in children}
    return {f"django_distlock.{name}".replace("..", ".") for name in found}


def loaded(entry, then=""):
    program = PROGRAM.format(entry=entry, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    modules = set(done.stdout.split())
    return {name for name in modules if name.startswith("django_distlock.")}, modules


def entry(**options):
    return {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "redis://localhost", **options}


def test_the_package_loads_no_store_and_nothing_to_start_processes():
    own, all_modules = loaded(entry())
    assert own == names(PACKAGE)
    assert not {name.partition(".")[0] for name in all_modules} & FOREIGN
    assert "django.views" not in all_modules


@pytest.mark.parametrize(
    ("used", "more"),
    [
        ("adopt, aadopt, AdoptedLease", {"core": ["adoption"]}),
        ("assert_locked, current_lease", {"core": ["assertions"]}),
        ("lock_all, LockGroup, Leases", GROUP),
        ("leader, Leadership", {"core": ["leader"]}),
        ("distributed_lock, skip, respond", DECORATORS),
    ],
)
def test_what_few_processes_use_is_loaded_by_who_uses_it(used, more):
    own, _ = loaded(entry(), f"from django_distlock import {used}")
    assert own - names(PACKAGE) == names(more)


def test_all_that_the_package_offers_is_there():
    loaded(
        entry(), "from django_distlock import *\nfor name in django_distlock.__all__: getattr(django_distlock, name)"
    )


@pytest.mark.parametrize(
    ("given", "more"),
    [
        (entry(), {}),
        (entry(LOCATION="redis://m", OPTIONS={"sentinels": [("localhost", 1)]}), SENTINEL),
        (entry(BACKEND="django_distlock.backends.redis.RedisClusterBackend"), CLUSTER),
    ],
    ids=["server", "sentinels", "cluster"],
)
def test_a_backend_loads_what_its_server_needs(given, more):
    own, all_modules = loaded(given, "django_distlock.locks['default']")
    assert own == names(PACKAGE, SERVER, more)
    assert "multiprocessing" not in all_modules
