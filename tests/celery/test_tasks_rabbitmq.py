"""Tasks and their copies on a real RabbitMQ."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from django_distlock import lock
from django_distlock.celery.messages import HEADER
from django_distlock.celery.tasks import REQUEUES
from tests.support.deliveries import Shop
from tests.support.tools import eventually

pytestmark = pytest.mark.usefixtures("locmem_locks")


@pytest.fixture
def shop(rabbitmq):
    """Its queue is a quorum queue behind a topic exchange, so that messages for later wait in RabbitMQ."""
    name = uuid.uuid4().hex
    conf = {
        "task_default_queue": name,
        "task_default_queue_type": "quorum",
        "task_default_exchange": f"exchange-{name}",
        "task_default_exchange_type": "topic",
        "task_default_routing_key": name,
    }
    with Shop(rabbitmq.url, **conf) as shop:
        # As a worker does when it starts; queues of the classic kind are made sooner.
        declare_native_delayed_delivery_exchanges_and_queues(shop.connection, "classic")
        shop.queue.declare()
        bind_queue_to_native_delayed_delivery_exchange(shop.connection, shop.app.amqp.queues[name])
        yield shop


def test_a_retry_waits_in_a_quorum_queue_for_whole_seconds(shop):
    sent = shop.task(on_busy="retry").delay()
    message = eventually(shop.next, 60)
    with ThreadPoolExecutor(1) as pool:
        other = lock("work")
        pool.submit(other.acquire).result()
        sent_at = time.monotonic()
        shop.deliver(message)
        assert shop.result(sent.id)[0] == "RETRY"
        pool.submit(other.release).result()
    assert shop.next() is None
    again = eventually(shop.next, 60)
    assert time.monotonic() - sent_at > 0.9
    assert again.headers[REQUEUES] == 1
    assert again.headers[HEADER] == message.headers[HEADER]
    shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


def test_a_first_delivery_that_runs_after_its_copy_does_not_run_again(shop):
    """As when the connection of a worker breaks that has the message in its buffer."""
    sent = shop.task().delay()
    first = eventually(lambda: shop.next(no_ack=False), 60)
    shop.connection.close()
    shop.connection = shop.app.connection_for_write()
    copy = eventually(lambda: shop.next(no_ack=False), 60)
    assert (first.delivery_info["redelivered"], copy.delivery_info["redelivered"]) == (False, True)
    shop.deliver(copy)
    shop.deliver(first)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")
