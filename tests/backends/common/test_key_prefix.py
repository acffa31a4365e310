"""KEY_PREFIX as a callable or its dotted path: what is taken, what is refused, and what tests make of it."""

from __future__ import annotations

import re

import pytest
from django.core.checks import run_checks

from django_distlock import InvalidLockBackend, lock, locks
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.checks import TAG
from django_distlock.testing import override_locks, separate_locks
from tests.support.stores import DATABASE, LOCMEM, REDIS, REDIS_CLUSTER, REDLOCK
from tests.support.tenants import PATH, asked, current_tenant, tenant

NODES = ["redis://a", "redis://b", "redis://c"]
ENTRIES = {
    "redis": {"BACKEND": REDIS, "LOCATION": "redis://nowhere.invalid"},
    "cluster": {"BACKEND": REDIS_CLUSTER, "LOCATION": "redis://nowhere.invalid"},
    "redlock": {"BACKEND": REDLOCK, "LOCATION": NODES},
    "database": {"BACKEND": DATABASE, "LOCATION": "default"},
    "locmem": {"BACKEND": LOCMEM},
}


def checked():
    """What the checks say of the settings; modules of other tests may name templates that are missing."""
    return [message for message in run_checks(tags=[TAG]) if message.id != "distlock.W007"]


class OwnBackend(LocMemBackend):
    """Tells locks apart by their names."""

    takes_callable_prefix = False


@pytest.fixture(autouse=True)
def _fresh():
    asked.clear()
    yield
    locks.close()


@pytest.mark.parametrize("store", ENTRIES)
@pytest.mark.parametrize("prefix", [PATH, current_tenant])
def test_a_callable_and_its_path(settings, store, prefix):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES[store], "KEY_PREFIX": prefix}}
    with tenant("acme"):
        assert locks["default"].prefix_now() == "acme"
    assert asked == ["acme"]


@pytest.mark.parametrize("store", ENTRIES)
@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("shop.nowhere.prefix", r"is 'shop.nowhere.prefix'. A text with dots between words is the path of a callable"),
        ("tests.support.tenants.nobody", r"cannot be imported: Module .* does not define"),
        ("tests.support.tenants.PATH", r"is 'tests.support.tenants.PATH', which is no callable but str"),
    ],
)
def test_a_path_that_leads_to_no_callable_is_found_by_the_checks(settings, store, prefix, says):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES[store], "KEY_PREFIX": prefix}}
    with pytest.raises(InvalidLockBackend, match=rf"\['KEY_PREFIX'\] .*{says}"):
        lock("name").acquire()
    [message] = checked()
    assert message.id == "distlock.E001"
    assert re.search(says, message.msg)


@pytest.mark.parametrize("prefix", ["shop", "shop-1.2", "1.2", ".shop", "shop:eu.1-", "shop."])
def test_other_texts_stand_for_themselves(settings, prefix):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES["redis"], "KEY_PREFIX": prefix}}
    assert locks["default"].prefix_now() == ""
    assert locks["default"].keys.prefix == prefix


@pytest.mark.parametrize("store", ENTRIES)
def test_checks_and_settings_ask_nobody(settings, store):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES[store], "KEY_PREFIX": PATH}}
    assert [message for message in checked() if message.id.startswith("distlock.E")] == []
    assert asked == []


def test_two_aliases_that_ask_the_same_keep_the_same_locks(settings):
    entry = {**ENTRIES["redis"], "KEY_PREFIX": PATH}
    settings.DISTRIBUTED_LOCKS = {"default": entry, "other": {**entry, "KEY_PREFIX": current_tenant}}
    assert [message.id for message in checked()] == ["distlock.W002"]
    settings.DISTRIBUTED_LOCKS = {
        "default": entry,
        "other": {**entry, "KEY_PREFIX": lambda: "x"},
        "text": ENTRIES["redis"],
    }
    assert checked() == []


def test_a_backend_that_knows_locks_by_their_names_takes_none(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": f"{__name__}.OwnBackend", "KEY_PREFIX": current_tenant}}
    with pytest.raises(InvalidLockBackend, match=r"\['KEY_PREFIX'\] is a callable, which OwnBackend does not support"):
        lock("name").acquire()
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": f"{__name__}.OwnBackend", "KEY_PREFIX": PATH}}
    assert locks["default"].prefix_now() == ""  # it is its own affair what a text means


@pytest.mark.parametrize("backend", [LOCMEM, "django_distlock.backends.dummy.DummyBackend"])
def test_tests_in_local_memory_tell_tenants_apart_as_well(settings, backend):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES["redis"], "KEY_PREFIX": PATH}}
    with (
        override_locks(backend),
        tenant("acme"),
        lock("name") as lease,
        tenant("globex"),
        lock("name", wait=0) as other,
    ):
        assert (lease.prefix, other.prefix) == ("acme", "globex")


@pytest.mark.parametrize("prefix", [PATH, current_tenant])
def test_processes_that_test_at_the_same_time(settings, prefix):
    settings.DISTRIBUTED_LOCKS = {"default": {**ENTRIES["redis"], "KEY_PREFIX": prefix}}
    separate_locks()
    separate_locks()  # in a forked child
    with tenant("acme"):
        assert re.fullmatch(r"acme-[0-9a-f]{8}-[0-9a-f]{8}", locks["default"].prefix_now())
    assert re.fullmatch(r"lock-[0-9a-f]{8}-[0-9a-f]{8}", locks["default"].keys.prefix)
