"""What a process loads for its locks: a short list, because each process of a project pays for it when it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

PACKAGE = {
    "": [
        "core", "decorators", "exceptions", "formats", "journal", "names", "options", "runs", "signals", "types",
        "utils", "version", "backends",
    ],
    "backends": ["base", "common", "optional"],
    "backends.common": ["key_prefix", "selftest", "timing"],
    "core": [
        "acquire", "assertions", "belief", "busy", "cleaning", "dropped", "events", "forced", "group",
        "holds", "journal_writer", "labels", "leader", "lease", "local_queue", "lock", "own_leases", "registry",
        "renewal", "transactions", "ungranted",
    ],
    "decorators": ["answers", "http", "key", "task_context", "wrapper"],
    "utils": ["clock", "drive", "events", "fork", "other_words", "text", "threads", "wakeup"],
}  # fmt: skip
SERVER = {
    "": ["grants"],
    "backends": ["redis", "twins"],
    "backends.common": ["attempts", "backoff", "breaker", "per_loop", "permits", "readers", "wakeup_listener"],
    "backends.redis": [
        "attempts", "backend", "breaker", "by_message", "client", "codec", "config", "connection", "credentials",
        "diagnostics", "errors", "exchange", "keys", "operations", "pubsub", "replies", "runs", "scripts", "timers",
        "topology",
    ],
}  # fmt: skip
SENTINEL = {"backends.redis": ["sentinel"], "backends.redis.sentinel": ["config", "connection", "discovery"]}
CLUSTER = {
    "backends.redis": ["cluster"],
    "backends.redis.cluster": ["backend", "client", "config", "diagnostics", "pubsub", "routing"],
}
FOREIGN = {"multiprocessing", "redis", "psycopg", "celery", "opentelemetry", "health_check"}

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


def test_what_adopts_is_loaded_by_who_adopts():
    own, _ = loaded(entry(), "from django_distlock import adopt, aadopt, AdoptedLease")
    assert own == names(PACKAGE, {"core": ["adoption"]})


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
