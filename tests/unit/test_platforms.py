"""What other systems lack is not needed: Windows, macOS."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from functools import partial

import pytest

from django_distlock.utils import clock as clock_module
from tests.support.programs import ROOT

pytestmark = pytest.mark.seconds(2)

WINDOWS = """
import os, select, signal, socket, sys, time
sys.modules["psutil"] = None  # it has a part for each system, and OpenTelemetry asks it where it is there
for module, names in (
    (os, "fork forkpty register_at_fork killpg getpgrp tcgetpgrp O_NOCTTY O_NOFOLLOW geteuid fchown fchmod"),
    (signal, "SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGKILL SIGALRM SIGCHLD SIGPIPE"),
    (select, "poll epoll"), (socket, "AF_UNIX"), (time, "CLOCK_BOOTTIME clock_gettime"),
):
    for name in names.split():
        delattr(module, name)
"""
USE = """
import importlib, pkgutil, django
from django.conf import settings
from django.core.management import call_command
LOCMEM = "django_distlock.backends.locmem.LocMemBackend"
settings.configure(
    SECRET_KEY="for tests only",
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_distlock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    DISTRIBUTED_LOCKS={
        "default": {"BACKEND": LOCMEM},
        "redis": {"BACKEND": "django_distlock.backends.redis.RedisBackend"},
        "redlock": {
            "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
            "LOCATION": [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)],
        },
    },
)
django.setup()
import django_distlock
from django_distlock import lock, locks
locks.all()
left_out = ["admin", "celery", "testing.plugin", "testing.contract", "testing.runs_contract"]
left_out += ["django_tasks"] if django.VERSION < (6, 0) else []
for module in pkgutil.walk_packages(django_distlock.__path__, "django_distlock."):
    if not module.name.removeprefix("django_distlock.").startswith(tuple(left_out)):
        importlib.import_module(module.name)
with lock("name", ttl=1.5) as lease:
    time.sleep(2)
    print(lease.state, flush=True)
call_command("runlocked", "name", "--", sys.executable, "-c", "print('ran')")
"""


def test_on_windows():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, subprocess\n" + WINDOWS + USE],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["held", "ran"], done.stderr


@pytest.mark.parametrize(
    ("platform", "clock"), [("darwin", "CLOCK_MONOTONIC"), ("linux", "CLOCK_BOOTTIME"), ("win32", None)]
)
def test_the_clock_goes_on_while_the_machine_sleeps(monkeypatch, platform, clock):
    monkeypatch.setattr(sys, "platform", platform)
    if platform != "linux":
        monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    found = runpy.run_path(clock_module.__file__)["clock"]
    if clock is None:
        assert found is time.monotonic
    else:
        assert isinstance(found, partial)
        assert found.args == (getattr(time, clock),)
