"""The Celery app for the workers of ``benchmarks.limits``. Its plan comes as JSON in LIMITS."""

from __future__ import annotations

import json
import os
import threading
import time

import redis
from celery import Celery, shared_task, signals
from django.conf import settings
from kombu import Exchange, Queue

PLAN = json.loads(os.environ["LIMITS"])
LIMITED, OTHERS = PLAN["limited"], PLAN["others"]  # queues

if not settings.configured:
    settings.configure(
        SECRET_KEY="for benchmarks only",
        USE_TZ=True,
        INSTALLED_APPS=["django_distlock"],
        DISTRIBUTED_LOCKS={
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": PLAN["locks"]}
        },
    )

from django_distlock import distributed_lock  # noqa: E402 - the settings come first


def queue(name: str) -> Queue:
    exchange = Exchange(f"{name}-exchange", type=PLAN["exchange_type"])
    return Queue(name, exchange, routing_key=name, queue_arguments=PLAN["queue_arguments"])


app = Celery("limits", broker=PLAN["broker"], backend="disabled://")
app.conf.update(
    task_queues=[queue(name) for name in dict.fromkeys((LIMITED, OTHERS))],
    task_default_queue=OTHERS,
    task_default_exchange=f"{OTHERS}-exchange",
    task_default_exchange_type=PLAN["exchange_type"],
    task_default_routing_key=OTHERS,
    task_routes={"limited": {"queue": LIMITED}},
    worker_prefetch_multiplier=PLAN["prefetch_multiplier"],
    broker_connection_retry_on_startup=True,
)


def note(**about: object) -> None:
    book = redis.Redis.from_url(PLAN["journal"])
    book.rpush("journal", json.dumps({"at": time.time(), **about}))
    book.close()


@shared_task(name="limited")
@distributed_lock("partner", slots=PLAN["slots"], on_busy="retry")
def limited(number: int) -> None:
    begin = time.time()
    time.sleep(PLAN["seconds"])
    note(what="run", number=number, begin=begin)


@shared_task(name="other")
def other(sent_at: float) -> None:
    note(what="other", waited=time.time() - sent_at)


@signals.after_task_publish.connect
def tell_requeue(headers: dict[str, object], **_: object) -> None:
    if "distlock_requeues" in headers:
        note(what="requeue")


received: list[object] = []


@signals.task_received.connect
def count(request: object, **_: object) -> None:
    received.append(request)


@signals.worker_ready.connect
def begin(sender: object, **_: object) -> None:
    note(what="ready")
    threading.Thread(target=sample, daemon=True).start()


def sample() -> None:
    """Note the largest number of messages that this worker has received and not acknowledged."""
    most = 0
    while True:
        time.sleep(0.1)
        received[:] = [request for request in list(received) if not request.acknowledged]  # type: ignore[attr-defined]
        if len(received) > most:
            most = len(received)
            note(what="unacknowledged", most=most, pid=os.getpid())
