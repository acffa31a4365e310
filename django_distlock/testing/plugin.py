"""Fixtures for pytest. The plugin is there wherever django-distlock is installed; it does nothing unasked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..backends.base import BaseLockBackend
from ..exceptions import LockError
from ..handlers import locks
from ..testing import held_here, override_locks

pytest.register_assert_rewrite("django_distlock.testing.contract")


@pytest.fixture
def local_locks() -> Iterator[BaseLockBackend]:
    """Locks in local memory, new and empty for this test, instead of the project's. Gives ``locks["default"]``."""
    with override_locks():
        yield locks["default"]


@pytest.fixture
def no_lock_left() -> Iterator[None]:
    """Fails a test that leaves a lock held which this process acquired, and releases it for the tests that follow."""
    before = held_here()
    yield
    left = [lease for lease in held_here() if lease not in before]
    if not left:
        return
    told = [f"  {lease.name!r} ({lease.using}), acquired by {lease.holder}" for lease in left]
    for lease in left:
        try:
            lease.release()
        except LockError as error:
            told.append(f"  and {lease.name!r} could not be released now: {error}")
    pytest.fail("This test has left locks held. Release them in it, or use 'with'.\n" + "\n".join(told), pytrace=False)
