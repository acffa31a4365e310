"""``@distributed_lock`` with a list of names: each call has all of them, or does not run."""

from __future__ import annotations

import asyncio
from io import BytesIO

import pytest
from django.http import StreamingHttpResponse
from django.test import RequestFactory

from django_distlock import (
    InvalidLockName,
    LockNotAcquired,
    assert_locked,
    current_lease,
    distributed_lock,
    lock,
)
from tests.support.tools import held_names, on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


@distributed_lock(["account:{source}", "account:{target}"])
def transfer(source, target):
    assert_locked("account:{}", source)
    assert_locked("account:{}", target)
    return held_names()


@distributed_lock(name=("account:{source}", "account:{target}"), on_busy="skip", label="transfer")
async def atransfer(source, target):
    assert current_lease("account:{}", source).holder.label == "transfer"
    return held_names()


@on_each_store
def test_a_call_holds_all():
    assert transfer(2, 1) == ["account:1", "account:2"]
    assert asyncio.run(atransfer(2, 1)) == ["account:1", "account:2"]
    assert held_names() == []


def test_one_name_twice_is_one_lock():
    assert transfer(1, 1) == ["account:1"]


@on_each_store
def test_where_one_is_busy_it_does_not_run():
    with lock("account:{}", 2):
        assert asyncio.run(atransfer(1, 2)) is None
        with pytest.raises(LockNotAcquired) as caught:
            asyncio.run(asyncio.to_thread(transfer, 3, 2))
        assert held_names() == ["account:2"]
    assert caught.value.name == "account:2"


def test_generators_hold_all_while_they_are_iterated():
    @distributed_lock(["a", "b"])
    def items():
        yield held_names()

    assert list(items()) == [["a", "b"]]
    assert held_names() == []


def test_a_response_holds_all_until_it_is_done():
    @distributed_lock(["a", "b"])
    def view(request):
        return StreamingHttpResponse(BytesIO(b"content"))

    response = view(RequestFactory().get("/"))
    assert held_names() == ["a", "b"]
    assert b"".join(response.streaming_content) == b"content"
    assert held_names() == []


@pytest.mark.parametrize("names", [[], [None], [""], ["account:{wrong}"], [1]])
def test_bad_names_are_refused_where_the_function_is_decorated(names):
    with pytest.raises(InvalidLockName):
        distributed_lock(names)(lambda source: None)
