"""The contract, on each backend that excludes."""

import asyncio
import sqlite3
import threading

import pytest

from django_distlock import locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.exceptions import LockBackendError
from django_distlock.testing.contract import LockBackendContract
from django_distlock.testing.exchange_contract import ExchangeContract
from django_distlock.testing.runs_contract import RunsContract
from django_distlock.testing.slots_contract import SlotsContract
from django_distlock.testing.waiters_contract import MaxWaitersContract


class TestRedisByUrl(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, valkey_locks):
        return valkey_locks


class TestRedisByCache(LockBackendContract, SlotsContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, valkey, store, settings):
        settings.CACHES = {"shared": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": valkey.url}}
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "cache:shared"}
        }
        yield locks["default"]
        locks.close()


class TestCluster(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, cluster_locks):
        return cluster_locks


class TestRedlock(LockBackendContract):
    @pytest.fixture
    def backend(self, redlock_locks):
        return redlock_locks


class TestZooKeeper(LockBackendContract, RunsContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, zookeeper_locks):
        return zookeeper_locks


class TestLocalMemory(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, locmem_locks):
        return locmem_locks


class TestPostgres(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, postgres_locks):
        return postgres_locks


class TestMariaDB(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, mariadb_locks):
        return mariadb_locks


class TestSQLite(LockBackendContract, SlotsContract, RunsContract, ExchangeContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self, sqlite_locks):
        return sqlite_locks


class TestSQLiteWithoutReturning(LockBackendContract, SlotsContract, ExchangeContract, MaxWaitersContract):
    """The way of databases that do everything by compare-and-swap."""

    @pytest.fixture
    def backend(self, sqlite_locks, monkeypatch):
        monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 0))
        locks.close()
        yield locks["default"]
        locks.close()


class InThreads(LocMemBackend):
    """As of a store whose client knows no asyncio: a thread goes on with an attempt whose task was cancelled."""

    def __init__(self, alias, settings):
        super().__init__(alias, settings)
        self._retired = set()

    async def _in_thread(self, call, waiter=None):
        def called():
            assert threading.current_thread() is not threading.main_thread()
            return call()

        return await asyncio.to_thread(called)

    def acquire(self, request, *, queue):
        if request.token in self._retired:
            raise LockBackendError("The request was given back before it was answered.")
        return super().acquire(request, queue=queue)

    def release(self, request, cooldown=0.0, *, force=False):
        if request.in_doubt:
            self._retired.add(request.token)
        return super().release(request, cooldown, force=force)


class TestThreaded(LockBackendContract, SlotsContract, MaxWaitersContract):
    @pytest.fixture
    def backend(self):
        return InThreads("default", {})
