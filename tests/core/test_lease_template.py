"""The template of a lease: locks whose names are made in one way are one series, whatever made them."""

from __future__ import annotations

import asyncio

import pytest

from django_distlock import adopt, current_lease, distributed_lock, lock
from django_distlock.names import parse
from django_distlock.testing import store_down
from tests.support.tools import backend_on, on_stores

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "sqlite")


@distributed_lock("order:{order_id}:{item.pk}")
def pack(order_id, item):
    return current_lease().template


@distributed_lock("order:{order_id}")
async def apack(order_id):
    return current_lease().template


@distributed_lock
def tidy():
    return current_lease().template


@distributed_lock(name=lambda pk: f"order:{pk}")
def ship(pk):
    return current_lease().template


class Item:
    pk = 5


@on_each_store
def test_fields_are_one_whatever_they_are_called(backend):
    with lock("order:{}", 1) as first, lock("order:{0}", 2) as second:
        assert (first.template, second.template) == ("order:{}", "order:{}")
        assert (first.name, second.name) == ("order:1", "order:2")
    assert asyncio.run(apack(3)) == "order:{}"
    assert pack(1, Item()) == "order:{}:{}"


def test_a_text_without_fields_is_its_own(backend):
    with lock("nightly") as lease:
        assert lease.template == "nightly"
    with lock("n" * 300) as lease:
        assert lease.template == lease.name
    assert tidy() == f"{__name__}.tidy"
    assert ship(7) == "order:7"


@pytest.mark.parametrize("template", ["{{a}}:{}", "{{}}:{}", "{{{}}}"])
def test_braces_that_are_text_stay_text(template):
    assert parse(template).normalized == template


@pytest.mark.parametrize("prefix", [None, lambda: "tenant"], ids=["text", "callable"])
def test_whoever_adopts_it_has_it_too(valkey_locks, settings, prefix):
    if prefix:
        settings.DISTRIBUTED_LOCKS = {"default": {**settings.DISTRIBUTED_LOCKS["default"], "KEY_PREFIX": prefix}}
    with lock("order:{}", 1) as lease:
        text = lease.detach()
    with adopt(text) as adopted:
        assert adopted.template == "order:{}"
        text = adopted.detach()
    with adopt(text) as adopted:
        assert adopted.template == "order:{}"
    with lock("nightly") as lease:
        text = lease.detach()
    with adopt(text) as adopted:
        assert adopted.template == "nightly"


def test_a_lease_that_was_not_granted_has_it(locmem_locks):
    with store_down(), lock("order:{}", 1, on_unavailable="run") as lease:
        assert lease.template == "order:{}"
