"""Python programs that share a store with the test, and children of forks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.support.forkserver import ROOT, Program, end_all

HANGS = 60  # seconds after which a child is killed

PROLOGUE = """
import os, sys, time
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": sys.argv[1], "TTL": 2}})
from django_distlock import *
def say(*words):
    print(*words, flush=True)
"""


def fork_in_c() -> int:
    """Past Python, which calls none of its hooks in the child: as servers that are written in C do."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a child in which a thread of its parent were waited for to run would hang
    try:
        time.sleep(0.02)  # for which one may have been waiting, and on a busy machine it says so later
        for _ in range(500):
            if _others_sleep():
                break
            time.sleep(0.01)
        return int(ctypes.PyDLL(None).fork())
    finally:
        sys.setswitchinterval(usual)


def _others_sleep() -> bool:
    """Whether the kernel lets no other thread of this process run."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if int(task.name) != threading.get_native_id() and b") R " in (task / "stat").read_bytes():
                return False
    return True


def processes_of(session: int) -> list[int]:
    """The pids of a session, which is named by that of the process that it was made for."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == session:
                found.append(int(folder.name))
    return found


FORKS: dict[str, Callable[[], int]] = {"python": os.fork, "c": fork_in_c}


class Programs:
    """``programs(code)`` starts a program whose locks are at ``url``. ``first``: what begins, before any import."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, code: str, *, first: str = "", stderr: int | None = None) -> subprocess.Popen[str]:
        process = Program(
            ["-W", "error", "-c", first + PROLOGUE + code, self._url],
            like=None if first else "django",
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # to be ended with all that it starts
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        end_all(self._started)


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that the program says."""
    assert process.stdout
    return process.stdout.readline().strip()


def in_a_fork(work: Callable[[], object], fork: Callable[[], int] = os.fork) -> str:
    """Run in a forked child, which leaves without cleaning up; return its text."""
    reader, writer = os.pipe()
    pid = fork()
    if not pid:
        signal.alarm(HANGS)
        try:
            os.write(writer, str(work()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)} and said {text!r}"
    return text
