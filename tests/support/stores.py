"""The classes of backends, as settings name them."""

from __future__ import annotations

REDIS = "django_distlock.backends.redis.RedisBackend"
REDIS_CLUSTER = "django_distlock.backends.redis.RedisClusterBackend"
REDLOCK = "django_distlock.backends.redlock.RedlockBackend"
DATABASE = "django_distlock.backends.database.DatabaseBackend"
ZOOKEEPER = "django_distlock.backends.zookeeper.ZooKeeperBackend"
LOCMEM = "django_distlock.backends.locmem.LocMemBackend"
