"""Where KEY_PREFIX is a callable, pages and commands show the locks of the tenant for whom they are asked."""

from __future__ import annotations

import json

import pytest

from django_distlock import locks
from django_distlock.monitoring.inventory import Inventory
from django_distlock.runs import LastRun
from django_distlock.utils.clock import wall_clock
from tests.support.admin_pages import LIST, hold, key_of, login, names_in, release, use_admin
from tests.support.admin_pages import said as messages_in
from tests.support.commands import said
from tests.support.stores import LOCMEM
from tests.support.tenants import NoTenant, asked, of_tenants, tenant
from tests.support.tools import on_stores

on_each_store = on_stores("redis", "locmem")


@pytest.fixture
def tenants(backend, settings):
    """And another alias, so that stores are asked in threads, which know no tenant."""
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "other": {"BACKEND": LOCMEM}}
    found = of_tenants(settings)
    for prefix in ("acme", "globex"):
        hold(found, "order:1", prefix=prefix, label=f"of {prefix}")
    hold(locks["other"], "mail:1")
    return found


def test_a_snapshot_asks_once_and_in_the_thread_of_its_caller(tenants):
    with tenant("acme"):
        inventory = Inventory()
        keys = inventory.keys()
        assert [key.name for key in keys] == ["mail:1", "order:1"]
        found = inventory.look(keys)
        assert {key.name: seen.info.holder.label for key, seen in found.items()} == {
            "order:1": "of acme", "mail:1": "shop.tasks.report",
        }  # fmt: skip
        assert set(inventory.count_waiters(key.lock for key in found).values()) == {0}
        assert len(inventory.free_at(found)) == 2
        assert inventory.map_holders(found, lambda key, holder: bool(holder)) == dict.fromkeys(found, True)
    assert asked == ["acme"]


@on_each_store
def test_the_commands(tenants):
    with tenant("acme"):
        [mail, order] = json.loads(said("--json", "list"))
        assert (mail["name"], order["name"], order["holder"]["label"]) == ("mail:1", "order:1", "of acme")
        assert "of acme" in said("show", "order:1")
        said("release", "order:1", "--no-input")
        assert said("list", "order:").splitlines() == ["0 held whose names begin with 'order:'"]
    with tenant("globex"):
        assert "of globex" in said("show", "order:1")
    asked.clear()
    said("check")
    assert asked == []
    with pytest.raises(NoTenant):
        said("list")


@pytest.mark.django_db
def test_the_admin(tenants, settings):
    use_admin(settings)
    browser = login("view_heldlock", "release_heldlock")
    with tenant("acme"):
        page = browser.get(LIST)
        assert sorted(names_in(page)) == ["mail:1", "order:1"]
        assert "of globex" not in page.content.decode()
        key = key_of(tenants, "order:1")
    with tenant("globex"):  # whose lock that is not
        page = release(browser, key)
        assert [text for text in messages_in(page) if text.startswith("success")] == []
        assert "of globex" in browser.get(LIST).content.decode()
    with tenant("acme"):
        release(browser, key)
        assert names_in(browser.get(LIST)) == ["mail:1"]


@pytest.mark.django_db
def test_the_admin_of_beat_asks_nobody(tenants, settings):
    use_admin(settings)
    seen = LastRun(round(wall_clock() - 60, 6), "web-1")
    tenants.claim_run("shop:nightly", seen, seen, 3600.0)
    assert b"shop:nightly" in login("view_beatrun").get("/admin/distlock/beatrun/").content
    assert asked == []
