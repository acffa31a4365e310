"""Unique tasks in classic and quorum queues of a real RabbitMQ."""

from __future__ import annotations

import uuid

import pytest
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from django_distlock import locks
from tests.support.deliveries import UniqueShop
from tests.support.tools import eventually

pytestmark = pytest.mark.usefixtures("locmem_locks")


@pytest.fixture(params=["classic", "quorum"])
def shop(rabbitmq, request):
    name = uuid.uuid4().hex
    conf = {
        "task_default_queue": name,
        "task_default_queue_type": request.param,
        "task_default_exchange": f"exchange-{name}",
        "task_default_exchange_type": "topic",
        "task_default_routing_key": name,
    }
    with UniqueShop(rabbitmq.url, **conf) as shop:
        shop.queue.declare()
        if request.param == "quorum":  # as a worker does when it starts
            declare_native_delayed_delivery_exchanges_and_queues(shop.connection, "classic")
            bind_queue_to_native_delayed_delivery_exchange(shop.connection, shop.app.amqp.queues[name])
        yield shop


def remaining():
    [[info]] = locks["default"].look(["unique:work:7"])
    return info.remaining


def test_it_is_queued_and_run_once(shop):
    task = shop.unique(ttl=1000)
    sent = task.delay(7)
    assert task.delay(7).id == sent.id
    assert 900 < remaining() <= 1000
    shop.deliver(eventually(shop.next, 60))
    assert shop.next() is None
    assert shop.runs == [(7, 0)]
    assert task.unique_find(7) is None


def test_what_a_lost_connection_delivers_again_is_run_once(shop):
    task = shop.unique()
    sent = task.delay(7)
    first = eventually(lambda: shop.next(no_ack=False), 60)
    shop.connection.close()
    shop.connection = shop.app.connection_for_write()
    copy = eventually(lambda: shop.next(no_ack=False), 60)
    assert (first.delivery_info["redelivered"], copy.delivery_info["redelivered"]) == (False, True)
    shop.deliver(copy)
    shop.deliver(first)
    assert shop.runs == [(7, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


def test_a_retry_keeps_the_name_while_it_waits(shop):
    task = shop.unique(ttl=1000)
    sent = task.delay(7, "retry soon")
    shop.deliver(eventually(shop.next, 60))
    found = task.unique_find(7)
    assert (found.task_id, found.state) == (sent.id, "queued")
    assert 900 < remaining() <= 1001
    shop.deliver(eventually(shop.next, 60))
    assert shop.runs == [(7, 0), (7, 1)]
    assert shop.result(sent.id) == ("SUCCESS", "retry soon")
    assert task.unique_find(7) is None
