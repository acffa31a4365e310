"""CPython's own tests of threading.Lock and threading.RLock, run against ours."""

from __future__ import annotations

import _thread
import itertools
import sys
import threading
import unittest
from functools import partial

import pytest

from django_distlock import Lock, lock, locks
from django_distlock.backends.redis import RedisBackend
from tests.support.inside import listener_of
from tests.support.requirements import missing
from tests.support.tools import PATIENCE, eventually, lock_request, on_stores, renewer_of

pytestmark = [pytest.mark.slow, pytest.mark.once]

try:
    from test import lock_tests
except ImportError:
    lock_tests = None

# threading re-initialises its own locks in a forked child by a private method, which makes them free there.
# A lock in a store stays its holder's: a child that freed it would break S8.
DOES_NOT_APPLY = {"test_at_fork_reinit"}
if lock_tests and not hasattr(lock_tests.Bunch, "__enter__"):
    # It counted threading.enumerate() then, where foreign threads that ask for current_thread() stay for ever.
    DOES_NOT_APPLY.add("test_thread_leak")


def cases(suite: type[unittest.TestCase]) -> list[str]:
    return [test for test in unittest.TestLoader().getTestCaseNames(suite) if test not in DOES_NOT_APPLY]


class Patient(unittest.TestCase):
    """CPython's give threads a second to end, and take all children of the process for their own."""

    def tearDown(self) -> None:
        threads_before, _ = self._threads
        eventually(lambda: _thread._count() <= threads_before)


def run(suite: type[unittest.TestCase], test: str, make: object) -> None:
    kind = type(suite.__name__, (Patient, suite, unittest.TestCase), {"locktype": staticmethod(make)})
    result = unittest.TestResult()
    kind(test).run(result)
    problems = [text for _, text in result.errors + result.failures]
    assert not problems, problems[0]
    if result.skipped:
        pytest.skip(result.skipped[0][1])


numbers = itertools.count()


class PatientLock(Lock):
    """``locked()`` first waits until nothing is given up in the background.

    A request whose answer came too late is, and until then it may be handed the lock.
    """

    def locked(self) -> bool:
        renewer = renewer_of(locks["default"])
        eventually(lambda: not renewer.is_cleaning)
        return super().locked()


def new_lock(**options: bool) -> Lock:
    made = lock("cpython:{}", next(numbers), wait=None, **options)
    made.__class__ = PatientLock  # lock() makes no other
    return made


@pytest.mark.filterwarnings("ignore:A handle of lock .* was dropped:ResourceWarning")
class TestCPython:
    @pytest.fixture(autouse=True)
    def _threads_run_already(self, backend):
        """CPython's tests wait for the end of threads that they leave behind."""
        if lock_tests is None:
            missing("lock_tests", "this Python comes without its package test")
        if isinstance(backend, RedisBackend):
            listener_of(backend).start("held all the time", PATIENCE)
        renewer = renewer_of(backend)
        renewer.release_in_background(lock_request("nobody's"))  # starts the thread that does so
        with lock("held all the time"):
            yield
        renewer.release_all()
        for lease in renewer.leases():
            # Before Python 3.13 a thread that is not of `threading` is never known to have ended.
            if sys.version_info < (3, 13) and lease.holder.thread.startswith("Dummy-"):
                renewer.unregister(lease)
        eventually(lambda: renewer.release_all() or not renewer.leases())  # also those of threads that end late

    @on_stores("redis", "locmem")
    @pytest.mark.parametrize("test", cases(lock_tests.LockTests) if lock_tests else [None])
    def test_lock(self, backend, test):
        run(lock_tests.LockTests, test, new_lock)

    @pytest.mark.parametrize("test", cases(lock_tests.RLockTests) if lock_tests else [None])
    def test_rlock(self, backend, test):
        run(lock_tests.RLockTests, test, partial(new_lock, reentrant=True))

    @pytest.mark.parametrize("test", cases(lock_tests.ConditionTests) if lock_tests else [None])
    def test_condition(self, backend, test):
        made = staticmethod(lambda held=None: threading.Condition(held or new_lock(reentrant=True)))
        run(type("ConditionTests", (lock_tests.ConditionTests,), {"condtype": made}), test, new_lock)
