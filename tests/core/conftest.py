"""What tests of the core share."""

from __future__ import annotations

import pytest

from django_distlock import signals as lock_signals


@pytest.fixture(autouse=True)
def _long_calls(long_calls):
    """Stores are tested elsewhere."""


@pytest.fixture
def heard():
    """Every signal about the lock "heard", with its arguments. Locks of other tests may be lost meanwhile."""
    news = []
    names = ("lock_acquired", "lock_busy", "lock_released", "lock_lost")
    receivers = {
        name: lambda _name=name, **about: about["name"] == "heard" and news.append((_name, about)) for name in names
    }
    for name, receiver in receivers.items():
        getattr(lock_signals, name).connect(receiver)
    yield news
    for name, receiver in receivers.items():
        getattr(lock_signals, name).disconnect(receiver)
