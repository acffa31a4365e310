"""Releases by somebody who does not hold the lock."""

from __future__ import annotations

import pytest

from django_distlock import lock
from django_distlock.signals import lock_forced
from django_distlock.testing import held_elsewhere
from tests.support.tools import on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


class TestForce:
    @on_each_store
    def test_frees_it_whoever_holds_it(self, calls, caplog):
        told = []
        receiver = lambda **about: told.append((about["name"], about["by"]))  # noqa: E731 - kept by this name
        lock_forced.connect(receiver)
        with held_elsewhere("name"):
            assert calls(lock("name")).force_release(by="the operator") is True
            assert not calls(lock("name")).locked()
        lock_forced.disconnect(receiver)
        assert told == [("name", "the operator")]
        assert "Lock 'name' (default) was freed by the operator. It was held by somebody else" in caplog.text

    def test_of_a_free_lock_frees_nothing(self, calls):
        assert calls(lock("name")).force_release() is False

    def test_names_who_did_it(self, calls, caplog):
        with held_elsewhere("name"):
            calls(lock("name")).force_release()
        assert f"was freed by {__name__}.TestForce.test_names_who_did_it." in caplog.text
