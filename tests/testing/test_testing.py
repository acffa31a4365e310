"""The testing kit: what it does to locks, and what its pytest plugin reports."""

from __future__ import annotations

import asyncio
import os
import re
import tomllib
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import SimpleTestCase, TestCase

import django_distlock
from django_distlock import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockTimeout,
    State,
    assert_locked,
    lock,
    locks,
)
from django_distlock.backends.dummy import DummyBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.signals import lock_lost
from django_distlock.testing import (
    alose,
    assume_locked,
    held_elsewhere,
    held_here,
    lose,
    override_locks,
    plugin,
    separate_locks,
    store_down,
)
from django_distlock.types import Slot
from tests.support import forkserver
from tests.support.programs import ROOT
from tests.support.tools import PATIENCE, eventually, lock_request

pytestmark = pytest.mark.slow

DUMMY = "django_distlock.backends.dummy.DummyBackend"


class TestOverrideLocks:
    def test_locks_are_in_local_memory_and_new(self, valkey_locks):
        with lock("name"), override_locks():
            assert isinstance(locks["default"], LocMemBackend)
            assert not lock("name").locked()
        assert locks["default"].alias == "default"
        assert not isinstance(locks["default"], LocMemBackend)

    def test_aliases_and_their_terms_stay(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "shop.Backend", "LOCATION": "redis://nowhere", "TTL": 7, "OPTIONS": {"a": 1}},
            "slow": {"BACKEND": "shop.Backend", "WAIT": 0, "KEY_PREFIX": "x"},
        }
        with override_locks():
            assert [(backend.alias, backend.terms.ttl, backend.terms.wait) for backend in locks.all()] == [
                ("default", 7, 10), ("slow", 30, 0),
            ]  # fmt: skip
        with override_locks(WAIT=3, TTL=5):
            assert [(backend.terms.ttl, backend.terms.wait) for backend in locks.all()] == [(5, 3), (5, 3)]

    def test_without_the_setting(self, settings):
        del settings.DISTRIBUTED_LOCKS
        with override_locks(WAIT=0):
            assert locks["default"].terms.wait == 0

    def test_another_backend(self):
        with override_locks(DUMMY), lock("name"), lock("name"):
            assert isinstance(locks["default"], DummyBackend)

    def test_an_unknown_keyword_is_told(self):
        with pytest.raises(TypeError, match=r"knows no 'wait'; it changes TTL, WAIT, "):
            override_locks(wait=0)

    def test_as_a_decorator_of_functions(self):
        @override_locks(TTL=3)
        def plain():
            return locks["default"].terms.ttl

        @override_locks(TTL=4)
        async def task():
            return locks["default"].terms.ttl

        assert (plain(), asyncio.run(task())) == (3, 4)

    def test_as_a_decorator_of_test_cases_each_test_begins_empty(self):
        held = []

        @override_locks(TTL=3)
        class Case(SimpleTestCase):
            def test_one(self):
                held.append(lock("name"))
                assert held[-1].acquire(blocking=False)
                assert locks["default"].terms.ttl == 3

            test_two = test_one

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        assert (result.testsRun, result.failures, result.errors) == (2, [], [])
        for mutex in held:
            mutex.release()

    def test_it_ends_with_an_error_too(self, settings):
        before = settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DUMMY}}
        with pytest.raises(KeyError), override_locks():
            raise KeyError
        assert locks.settings == before


@pytest.mark.usefixtures("backend")
class TestHeldElsewhere:
    def test_the_lock_is_busy_and_tells_of_somebody_else(self):
        with held_elsewhere("order:{}", 42, ttl=20, label="POST /orders/42") as info:
            assert info.name == "order:42"
            with pytest.raises(LockNotAcquired) as busy, lock("order:42", wait=0):
                pass
            assert busy.value.holder == info.holder
            assert (info.holder.host, info.holder.label) == ("elsewhere", "POST /orders/42")
            assert 18 < busy.value.retry_after <= 20
            with pytest.raises(LockTimeout), lock("order:42", wait=0.05, reentrant=True):
                pass
        with lock("order:42", wait=0):
            pass

    def test_waiters_get_it_at_the_end(self):
        mutex = lock("name")
        with ThreadPoolExecutor() as pool:
            with held_elsewhere("name"):
                waiter = pool.submit(mutex.acquire, timeout=PATIENCE)
            assert waiter.result()
        mutex.release()

    def test_in_tasks(self):
        async def main():
            async with held_elsewhere("name"):
                assert not await lock("name").aacquire(blocking=False)
            assert not await lock("name").alocked()

        asyncio.run(main())

    def test_it_is_not_renewed(self):
        with held_elsewhere("name", ttl=0.2), lock("name", wait=PATIENCE) as lease:
            lease.ensure_held()

    def test_a_lock_that_is_held_is_told(self):
        told = pytest.raises(LockNotAcquired, match="'name' is held already, by ")
        with lock("name"), told, held_elsewhere("name"):
            pass

    def test_with_the_dummy_nobody_can_hold_anything(self):
        told = pytest.raises(ImproperlyConfigured, match="DummyBackend.*override_locks")
        with override_locks(DUMMY), told, held_elsewhere("name"):
            pass


@pytest.mark.usefixtures("backend")
class TestStoreDown:
    def test_all_that_is_asked_of_it_says_so(self, calls):
        backend = calls(locks["default"])
        request = lock_request()
        with store_down():
            for ask in (
                lambda: backend.acquire(request, queue=True),
                lambda: backend.release(request),
                lambda: backend.renew([(request, 5.0)]),
                lambda: backend.slots(),
                lambda: backend.list_slots(),
                lambda: backend.look(["name"]),
                lambda: backend.held(),
                lambda: backend.holders([Slot("name")]),
                lambda: backend.remaining([Slot("name")]),
                lambda: backend.count_waiters(["name"]),
                lambda: calls(lock("name")).acquire(),
                lambda: calls(lock("name")).locked(),
            ):
                with pytest.raises(LockBackendError, match="'default' does not answer: a test let its store be down"):
                    ask()
        assert backend.look(["name"]) == [[]]

    @pytest.mark.parametrize(
        "ask",
        [
            lambda backend: backend.exchange(lock_request(), lock_request()),
            lambda backend: backend.find_runs(["entry"]),
            lambda backend: backend.forget_run("entry"),
            lambda backend: backend.write_journal([]),
            lambda backend: backend.read_journal(),
        ],
    )
    def test_what_only_some_stores_have_says_so_too(self, locmem_locks, ask):
        ask(locks["default"])
        with store_down(), pytest.raises(LockBackendError, match="a test let its store be down"):
            ask(locks["default"])

    def test_the_self_test_too(self, locmem_locks):
        with store_down():
            assert [result.is_error for result in locks["default"].check()] == [True]

    def test_of_one_alias(self, settings):
        entry = {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}
        settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry}
        with store_down("other"), lock("name"), pytest.raises(LockBackendError):
            lock("name", using="other").acquire()

    def test_what_is_held_is_unknown_and_then_lost(self):
        with pytest.raises(LockLost), lock("name", ttl=1.0) as lease, store_down():
            eventually(lambda: lease.state is State.UNKNOWN)
            eventually(lambda: lease.state is State.LOST)

    def test_what_is_released_meanwhile_is_free_afterwards(self):
        mutex, down = lock("name"), store_down()
        assert mutex.acquire()
        with down, pytest.raises(LockBackendError):
            mutex.release()
        eventually(lambda: not lock("name").locked())

    def test_as_a_decorator(self):
        @store_down()
        def plain():
            return lock("name").acquire()

        @store_down()
        async def in_a_task():
            return await lock("name").aacquire()

        @store_down()
        class Case(SimpleTestCase):
            def test(self):
                with pytest.raises(LockBackendError):
                    lock("name").acquire()

        for call in (plain, lambda: asyncio.run(in_a_task())):
            with pytest.raises(LockBackendError):
                call()
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        assert (result.testsRun, result.failures, result.errors) == (1, [], [])
        with lock("name"):
            pass

    def test_twice_it_is_down_until_both_have_ended(self):
        with store_down():
            with store_down():
                pass
            with pytest.raises(LockBackendError):
                lock("name").acquire()
        with lock("name"):
            pass


@pytest.mark.usefixtures("backend")
class TestLose:
    def test_the_holder_is_told_and_the_lock_is_free(self, caplog):
        heard = []

        def hear(sender, **news):
            heard.append(news)

        lock_lost.connect(hear)
        try:
            with pytest.raises(LockLost), lock("name") as lease:
                lose(lease)
                assert lease.state is State.LOST
                assert lease.remaining == 0.0
                with pytest.raises(LockLost):
                    lease.ensure_held()
                with lock("name", wait=0) as other:
                    assert other.fence > lease.fence
            eventually(lambda: heard)
        finally:
            lock_lost.disconnect(hear)
        assert heard[0]["lease"] is lease
        assert "a test let it be lost" in caplog.text

    def test_in_tasks(self):
        async def main():
            async with lock("name", on_lost="log") as lease:
                await alose(lease)
                assert lease.state is State.LOST
                assert not await lock("name").alocked()

        asyncio.run(main())

    def test_a_released_lease_stays_released(self):
        with lock("name") as lease:
            pass
        lose(lease)
        assert lease.state is State.RELEASED


@pytest.mark.usefixtures("backend")
def test_what_is_held_here():
    assert held_here() == []
    with lock("name") as lease, held_elsewhere("other"):
        assert held_here() == [lease]
    assert held_here() == []


@assume_locked()
class TestAssumed(TestCase):
    databases = frozenset()

    def test_in_a_test_case(self):
        assert_locked("anything")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        with pytest.raises(LockNotHeld):
            assert_locked("anything")


SETTINGS = """
SECRET_KEY = "for tests only"
DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}}
"""
RESULTS = """
import pytest
from django_distlock import lock, locks
from django_distlock.backends.locmem import LocMemBackend

kept = []

@pytest.fixture
def helper():
    mutex = lock("by a fixture")
    mutex.acquire()
    yield
    mutex.release()

@pytest.mark.usefixtures("no_lock_left")
class TestLocks:
    def test_clean(self):
        with lock("a"):
            pass

    def test_leaves_one(self):
        kept.append(lock("order:{}", 42, label="the forgetful"))
        kept[-1].acquire()

    def test_the_next_is_clean(self):
        assert not lock("order:42").locked()

    def test_of_a_fixture(self, helper):
        pass

    def test_in_local_memory(self, local_locks):
        kept.append(lock("b"))
        kept[-1].acquire()

    @pytest.mark.parametrize("again", [1, 2])
    def test_local_memory_is_new(self, local_locks, again):
        assert local_locks is locks["default"]
        assert list(local_locks.held()) == []
        assert local_locks.acquire

def test_who_does_not_ask_is_not_checked():
    kept.append(lock("c"))
    kept[-1].acquire()
"""
CONTRACT = """
import pytest
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.testing.contract import LockBackendContract

class Forgetful(LocMemBackend):
    def renew(self, wanted, *, timeout=None):
        return [True for _ in wanted]

class TestGood(LockBackendContract):
    @pytest.fixture
    def backend(self):
        return LocMemBackend("default", {})

class TestForgetful(LockBackendContract):
    @pytest.fixture
    def backend(self):
        return Forgetful("default", {})

class TestUnfinished(LockBackendContract):
    pass
"""


@pytest.fixture
def run_pytest(tmp_path):
    """Runs the tests of a project that has the plugin, in a process of its own."""

    def run(tests, *plugins, options=(), settings="shop_settings", settings_end=""):
        (tmp_path / "shop_settings.py").write_text(SETTINGS + settings_end)
        (tmp_path / "test_shop.py").write_text(tests)
        folder = Path(django_distlock.__file__).parent.parent
        environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")} | {
            "PYTHONPATH": f"{folder}{os.pathsep}{tmp_path}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # also where the plugin is installed, its entry point would be read
            "DJANGO_SETTINGS_MODULE": settings,
            "PYTEST_ADDOPTS": "",
        }
        loaded = [part for plugin in ("django_distlock.testing.plugin", *plugins) for part in ("-p", plugin)]
        usual = ["-rA", "--tb=short", "-p", "no:cacheprovider", *loaded]
        command = ["-m", "pytest", *usual, *options, "test_shop.py"]
        return forkserver.run(command, cwd=tmp_path, env=environment, timeout=2 * PATIENCE, check=False).stdout

    return run


WITHOUT_A_SERVER = """
from django.http import HttpResponse
from django.test import RequestFactory
from django_distlock import distributed_lock, lock

@distributed_lock("order:{order_id}")
def pay(request, order_id):
    return HttpResponse("paid")

def test_a_view():
    assert pay(RequestFactory().post("/"), order_id=42).status_code == 200

def test_a_lock():
    with lock("name"):
        pass
"""
PREFIX = """
from django.conf import settings

def test_prefix():
    assert "KEY_PREFIX" not in settings.DISTRIBUTED_LOCKS["default"]
"""


class TestPlugin:
    def test_who_tests_without_a_server_is_told_of_local_locks(self, run_pytest):
        nowhere = 'DISTRIBUTED_LOCKS["default"] = {"BACKEND": "django_distlock.backends.redis.RedisBackend"}\n'
        nowhere += 'DISTRIBUTED_LOCKS["default"]["LOCATION"] = "unix:///nowhere"\n'
        told = run_pytest(WITHOUT_A_SERVER, "pytest_django.plugin", settings_end=nowhere)
        assert "2 failed" in told
        hint = "Tests need no server: django_distlock.testing.override_locks(), and the fixture local_locks"
        assert told.count(hint) == 2, told

    def test_tests_that_leave_locks_held_fail_and_do_not_disturb_the_next(self, run_pytest):
        told = run_pytest(RESULTS, "pytest_django")
        assert "8 passed, 2 errors" in told
        assert "ERROR test_shop.py::TestLocks::test_leaves_one" in told
        assert "ERROR test_shop.py::TestLocks::test_in_local_memory" in told
        assert "This test has left locks held. Release them in it, or use 'with'." in told
        assert "'order:42' (default), acquired by the forgetful (pid " in told

    def test_projects_without_django_settings_are_left_alone(self, run_pytest):
        assert "1 passed" in run_pytest("def test_nothing():\n    pass\n", settings="")

    def test_a_project_may_keep_its_prefixes(self, run_pytest):
        assert "1 passed" in run_pytest(PREFIX, "pytest_django", options=["-o", "distlock_separate=false"])

    def test_it_is_found_by_its_entry_point(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        assert project["project"]["entry-points"]["pytest11"] == {"distlock": plugin.__name__}

    def test_backends_of_others_can_be_put_to_the_contract(self, run_pytest):
        told = run_pytest(CONTRACT, "pytest_django", options=["-k", "TestGood or test_only_the_owner_renews"])
        assert "FAILED test_shop.py::TestGood" not in told
        assert "ERROR test_shop.py::TestGood" not in told
        assert "PASSED test_shop.py::TestGood::test_only_the_owner_renews[async]" in told
        assert "FAILED test_shop.py::TestForgetful::test_only_the_owner_renews[sync]" in told
        assert "assert [True] == [False]" in told, "asserts of the contract tell values"
        assert "Give the test class a fixture 'backend'" in told


class TestSeparateLocks:
    """Test processes that run at the same time, and runs after one that was killed."""

    def test_prefixes_get_an_end(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "shop.Backend", "TTL": 7},
            "slow": {"BACKEND": "shop.Backend", "KEY_PREFIX": "x"},
        }
        separate_locks()
        entries = settings.DISTRIBUTED_LOCKS
        first, second = (entries[alias]["KEY_PREFIX"] for alias in ("default", "slow"))
        assert re.fullmatch(r"lock-[0-9a-f]{8}", first)
        assert second == "x" + first.removeprefix("lock")
        assert entries["default"] == {"BACKEND": "shop.Backend", "TTL": 7, "KEY_PREFIX": first}

    def test_without_the_setting(self, settings):
        del settings.DISTRIBUTED_LOCKS
        separate_locks()
        assert not hasattr(settings, "DISTRIBUTED_LOCKS")

    @pytest.mark.parametrize(
        "runner",
        [
            ["pytest", "-n", "2", "-p", "xdist", "-p", "django", "-p", "distlock"],
            ["django", "test", "--parallel", "2", "--testrunner", "shop_runner.Runner"],
        ],
        ids=["pytest", "django"],
    )
    def test_two_processes(self, valkey, valkey_locks, tmp_path, runner):
        """Each holds the same lock until the other one has come."""
        (tmp_path / "shop_settings.py").write_text(
            f"SECRET_KEY = 'x'\nDISTRIBUTED_LOCKS = {settings_of(valkey_locks)!r}\n"
        )
        (tmp_path / "shop_runner.py").write_text(RUNNER)
        for number in (1, 2):
            (tmp_path / f"test_shop_{number}.py").write_text(TESTS)
        done = forkserver.run(
            ["-m", *runner], cwd=tmp_path, check=False, timeout=4 * PATIENCE,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": f"{tmp_path}:{ROOT}",
                 "STORE": valkey.url, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def settings_of(backend):
    return {backend.alias: dict(backend.settings)}


TESTS = """
import os, time, redis
from django.test import SimpleTestCase
from django_distlock import lock

class Tests(SimpleTestCase):
    def test_alone(self):
        store = redis.Redis.from_url(os.environ["STORE"])
        try:
            with lock("name", wait=0):
                store.incr("came")
                until = time.monotonic() + 60
                while int(store.get("came")) < 2 and time.monotonic() < until:
                    time.sleep(0.02)
        except BaseException:
            store.incr("came")
            raise
"""
RUNNER = """
from django.test.runner import DiscoverRunner, ParallelTestSuite
from django_distlock.testing import separate_locks

def init_worker(*args, **kwargs):
    ParallelTestSuite.init_worker(*args, **kwargs)
    separate_locks()

class Suite(ParallelTestSuite):
    init_worker = init_worker

class Runner(DiscoverRunner):
    parallel_test_suite = Suite

    def setup_test_environment(self, **kwargs):
        super().setup_test_environment(**kwargs)
        separate_locks()
"""
