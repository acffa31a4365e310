"""The contract, on each backend that excludes."""

import pytest

from django_distlock import locks
from django_distlock.testing.contract import LockBackendContract, RunsContract


class TestRedisByUrl(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, valkey_locks):
        return valkey_locks


class TestRedisByCache(LockBackendContract):
    @pytest.fixture
    def backend(self, valkey, store, settings):
        settings.CACHES = {"shared": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": valkey.url}}
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "cache:shared"}
        }
        yield locks["default"]
        locks.close()


class TestCluster(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, cluster_locks):
        return cluster_locks


class TestRedlock(LockBackendContract):
    @pytest.fixture
    def backend(self, redlock_locks):
        return redlock_locks


class TestLocalMemory(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, locmem_locks):
        return locmem_locks


class TestPostgres(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, postgres_locks):
        return postgres_locks


class TestMariaDB(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, mariadb_locks):
        return mariadb_locks


class TestSQLite(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, sqlite_locks):
        return sqlite_locks


class TestSQLiteWithoutReturning(LockBackendContract):
    """The way of databases that do everything by compare-and-swap."""

    @pytest.fixture
    def backend(self, sqlite_locks, monkeypatch):
        monkeypatch.setattr(sqlite_locks._steps, "_quick", None)
        return sqlite_locks
