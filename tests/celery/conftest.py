"""Deliveries in this process, and workers of a test's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.workers.harness import Worker
from tests.support.workers.pools import usable


@pytest.fixture
def beside(shop):
    """In another thread, as in another process of a worker."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit
        shop.go.set()


@pytest.fixture
def start(server, the_locks, tmp_path_factory):
    """Starts workers of this test's own. ``server``, ``the_locks``: of its module."""
    started = []

    def start(pool="prefork", **options):
        started.append(Worker(server, tmp_path_factory.mktemp("w"), usable(pool), **options).start())
        return started[-1]

    yield start
    for worker in started:
        worker.stop()
