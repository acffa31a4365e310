"""What tests of decorators share."""

from __future__ import annotations

import threading

import pytest

from django_distlock import lock


@pytest.fixture
def busy(backend):
    """Somebody else holds "name" and "order:1"."""
    leave, there = threading.Event(), threading.Event()

    def hold():
        with lock("name", label="somebody else"), lock("order:1", label="somebody else"):
            there.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert there.wait(10)
    yield leave
    leave.set()
    thread.join()
