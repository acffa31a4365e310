"""Tasks and their copies on a real RabbitMQ."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_distlock import lock
from django_distlock.celery.messages import HEADER
from django_distlock.celery.tasks import REQUEUES
from tests.support.deliveries import DELIVERED_WITHIN, Shop, shop_in_rabbitmq
from tests.support.tools import eventually

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("locmem_locks")]


@pytest.fixture
def shop(rabbitmq):
    with shop_in_rabbitmq(Shop, rabbitmq.url, "quorum") as shop:
        yield shop


@pytest.mark.seconds(11)
def test_a_retry_waits_in_a_quorum_queue_for_whole_seconds(shop):
    sent = shop.task(on_busy="retry").delay()
    message = eventually(shop.next, DELIVERED_WITHIN)
    with ThreadPoolExecutor(1) as pool:
        other = lock("work")
        pool.submit(other.acquire).result()
        sent_at = time.monotonic()
        shop.deliver(message)
        assert shop.result(sent.id)[0] == "RETRY"
        pool.submit(other.release).result()
    assert shop.next() is None
    again = eventually(shop.next, DELIVERED_WITHIN)
    assert time.monotonic() - sent_at > 0.9
    assert again.headers[REQUEUES] == 1
    assert again.headers[HEADER] == message.headers[HEADER]
    shop.deliver(again)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")


def test_a_first_delivery_that_runs_after_its_copy_does_not_run_again(shop):
    """As when the connection of a worker breaks that has the message in its buffer."""
    sent = shop.task().delay()
    first, copy = shop.lose_connection()
    shop.deliver(copy)
    shop.deliver(first)
    assert shop.runs == [(sent.id, 0)]
    assert shop.result(sent.id) == ("SUCCESS", "return")
