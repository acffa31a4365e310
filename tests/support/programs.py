"""Python programs that share a store with the test, and children of forks."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from django_distlock.testing.tools import eventually
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
    """Past Python, which calls none of its hooks in the child: as servers that are written in C do.

    All other threads sleep meanwhile, and not for the lock of the interpreter: a child in which one is said to wait for
    that lock hangs, or crashes. Nor is a thread that has ended left to the collector, which would detach it there.
    """
    gc.collect()
    [pid] = eventually(_fork_while_others_sleep)
    return int(pid)


def _fork_while_others_sleep() -> list[int]:
    """Nothing, and no child, if another thread ran."""
    before = _switches_of_others()
    time.sleep(0.001)  # those that wait for the lock of the interpreter get it
    if before is None or before != _switches_of_others():
        return []
    reader, writer = os.pipe()
    pid = int(ctypes.PyDLL(None).fork())
    if not pid:
        os.close(writer)
        if not os.read(reader, 1):
            os._exit(0)
        os.close(reader)
        return [pid]
    os.close(reader)
    slept = before == _switches_of_others()
    if slept:
        os.write(writer, b"!")
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(writer)
    return [pid] if slept else []


def _switches_of_others() -> dict[str, list[str]] | None:
    """How often each other thread of this process was given a processor; None: one of them does not sleep."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if int(task.name) == threading.get_native_id():
                continue
            about = (task / "status").read_text()
            if "State:\tS" not in about:
                return None
            found[task.name] = [line for line in about.splitlines() if "ctxt_switches" in line]
    return found


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
    """``programs(code)`` starts a program whose locks are at ``url``.

    ``first``: what begins, before any import. ``like``: what it has imported, as for ``Program``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._started: list[subprocess.Popen[str]] = []

    def __call__(
        self, code: str, *, first: str = "", like: str | None = "django", stderr: int | None = None
    ) -> subprocess.Popen[str]:
        process = Program(
            ["-W", "error", "-c", first + PROLOGUE + code, self._url],
            like=None if first else like,
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
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # says where it hangs
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
