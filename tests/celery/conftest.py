"""Deliveries in this process, and workers of a test's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from django_distlock import locks
from tests.support.stores import REDIS
from tests.support.workers.harness import Worker
from tests.support.workers.pools import usable


@pytest.fixture
def beside(shop):
    """In another thread, as in another process of a worker."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit
        shop.go.set()


@pytest.fixture
def the_locks(server, settings):
    """Those that workers share with their test; "brief" has a short TTL."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": server.url},
        "brief": {"BACKEND": REDIS, "LOCATION": server.url, "KEY_PREFIX": "brief", "TTL": 2.0},
    }
    yield locks["default"]
    locks.close()


@pytest.fixture
def start(server, the_locks, tmp_path_factory):
    """Starts workers of this test's own."""
    started = []

    def start(pool="prefork", **options):
        started.append(Worker(server, tmp_path_factory.mktemp("w"), usable(pool), **options).start())
        return started[-1]

    yield start
    for worker in started:
        worker.stop()
