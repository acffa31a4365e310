"""The pytest plugin, installed with django-distlock. It gives each test process separate locks, and has fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings

from ..backends.base import BaseLockBackend
from ..core.registry import locks
from ..exceptions import LockError
from . import held_here, override_locks, separate_locks

pytest.register_assert_rewrite("django_distlock.testing.contract", "django_distlock.testing.runs_contract")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "distlock_separate",
        "whether the locks of each test process have names of their own in the store (default: true)",
        type="bool",
        default=True,
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if settings.configured and session.config.getini("distlock_separate"):
        separate_locks()


@pytest.fixture
def local_locks() -> Iterator[BaseLockBackend]:
    """Replaces the project's locks by new, empty ones in local memory for this test. Gives ``locks["default"]``."""
    with override_locks():
        yield locks["default"]


@pytest.fixture
def no_lock_left() -> Iterator[None]:
    """Fails a test that leaves a lock of this process held, and releases that lock for the following tests."""
    before = held_here()
    yield
    left = [lease for lease in held_here() if lease not in before]
    if not left:
        return
    report = [f"  {lease.name!r} ({lease.using}), acquired by {lease.holder}" for lease in left]
    for lease in left:
        try:
            lease.release()
        except LockError as error:
            report.append(f"  and {lease.name!r} could not be released now: {error}")
    pytest.fail(
        "This test has left locks held. Release them in it, or use 'with'.\n" + "\n".join(report), pytrace=False
    )
