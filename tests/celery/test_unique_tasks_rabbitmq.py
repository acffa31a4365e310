"""Unique tasks in classic and quorum queues of a real RabbitMQ."""

from __future__ import annotations

import pytest

from django_distlock import locks
from tests.support.deliveries import DELIVERED_WITHIN, UniqueShop, shop_in_rabbitmq
from tests.support.tools import eventually

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("locmem_locks")]


@pytest.fixture(params=["classic", "quorum"])
def shop(rabbitmq, request):
    with shop_in_rabbitmq(UniqueShop, rabbitmq.url, request.param) as shop:
        yield shop


def remaining():
    [[info]] = locks["default"].look(["unique:work:7"])
    return info.remaining


def test_it_is_queued_and_run_once(shop):
    task = shop.unique(ttl=1000)
    sent = task.delay(7)
    assert task.delay(7).id == sent.id
    assert 900 < remaining() <= 1000
    shop.deliver(eventually(shop.next, DELIVERED_WITHIN))
    assert shop.next() is None
    assert shop.runs == [(7, 0)]
    assert task.unique_find(7) is None


def test_what_a_lost_connection_delivers_again_is_run_once(shop):
    task = shop.unique()
    sent = task.delay(7)
    first, copy = shop.lose_connection()
    shop.deliver(copy)
    shop.deliver(first)
    assert shop.runs == [(7, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


def test_a_retry_keeps_the_name_while_it_waits(shop):
    task = shop.unique(ttl=1000)
    sent = task.delay(7, "retry soon")
    shop.deliver(eventually(shop.next, DELIVERED_WITHIN))
    found = task.unique_find(7)
    assert (found.task_id, found.state) == (sent.id, "queued")
    assert 900 < remaining() <= 1001
    shop.deliver(eventually(shop.next, DELIVERED_WITHIN))
    assert shop.runs == [(7, 0), (7, 1)]
    assert shop.result(sent.id) == ("SUCCESS", "retry soon")
    assert task.unique_find(7) is None
