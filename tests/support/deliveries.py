"""Tasks whose messages are published and run as by a worker, in this process: the test says which one has its turn."""

from __future__ import annotations

import threading
import uuid
from contextlib import contextmanager

from celery import Celery, current_app
from celery.exceptions import Reject
from celery.worker.request import Request
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from django_distlock import distributed_lock
from django_distlock.celery import UniqueTask, unique
from tests.support.tools import PATIENCE, eventually

DELIVERED_WITHIN = 4 * PATIENCE  # seconds


class Shop:
    """An app with one queue. ``runs`` has what the bodies of its tasks noted; a context manager."""

    def __init__(self, broker="memory://", **conf):
        self.app = Celery("shop", broker=broker, backend="cache+memory://", set_as_current=False)
        self.app.conf.task_publish_retry = False
        self.app.conf.update({"task_default_queue": f"queue {uuid.uuid4()}", **conf})
        self.connection = self.app.connection_for_write()
        self.runs = []
        self.rejected = []
        self.go, self.is_working = threading.Event(), threading.Event()

    def __enter__(self):
        self._previous = current_app._get_current_object()
        return self

    def __exit__(self, *_):
        self.go.set()
        self.connection.close()
        self.app.close()
        self._previous.set_current()

    def task(self, **options):
        """Decorates what its first argument asks for."""
        on_busy, slots = options.pop("on_busy", "skip"), options.pop("slots", 1)

        def work(task, what="return"):
            self.runs.append((task.request.id, task.request.retries))
            if what == "wait":
                self.is_working.set()
                assert self.go.wait(DELIVERED_WITHIN)
            elif what == "retry" and not task.request.retries:
                raise task.retry(countdown=0)
            elif what == "retry without raising" and task.request.retries < 2:
                task.retry(countdown=0, throw=False)
            elif what == "replace":
                raise task.replace(task.si("replaced"))
            return what

        guarded = distributed_lock("work", on_busy=on_busy, slots=slots)(work)
        return self.app.task(bind=True, name="work", shared=False, **{"acks_late": True, **options})(guarded)

    @property
    def queue(self):
        return self.app.amqp.queues[self.app.conf.task_default_queue].bind(self.connection.default_channel)

    def next(self, no_ack=True):
        """The message that is next in the queue, or None."""
        return self.queue.get(no_ack=no_ack)

    def deliver(self, message, redelivered=None):
        """``redelivered``: what the broker says of it, if that is not what it said."""
        delivered = Request(
            message, app=self.app, task=self.app.tasks[message.headers["task"]],
            on_reject=lambda *_: self.rejected.append(message),
        )  # fmt: skip
        if redelivered is not None:
            delivered.delivery_info["redelivered"] = redelivered
        delivered.execute()

    def lose_connection(self):
        """With the message that is next, unacknowledged. Returns it, and the copy that the broker delivers."""
        first = eventually(lambda: self.next(no_ack=False), DELIVERED_WITHIN)
        self.connection.close()
        self.connection = self.app.connection_for_write()
        copy = eventually(lambda: self.next(no_ack=False), DELIVERED_WITHIN)
        assert (first.delivery_info["redelivered"], copy.delivery_info["redelivered"]) == (False, True)
        return first, copy

    def drain(self):
        while message := self.next():
            self.deliver(message)

    def result(self, task_id):
        result = self.app.AsyncResult(task_id)
        return result.state, result.result


class UniqueShop(Shop):
    """``unique()`` makes its task ``work``, which does what its second argument asks for, for a number."""

    def unique(self, name="work:{number}", *, guarded=None, options=None, **given):
        def work(task, number=7, what="return"):
            self.runs.append((number, task.request.retries))
            if what == "wait":
                self.is_working.set()
                assert self.go.wait(DELIVERED_WITHIN)
            elif what == "raise":
                raise ValueError(what)
            elif what == "retry" and not task.request.retries:
                raise task.retry(countdown=60)
            elif what == "retry soon" and not task.request.retries:
                raise task.retry(countdown=1)
            elif what == "retry without raising" and not task.request.retries:
                task.retry(countdown=60, throw=False)
            elif what == "reject":
                raise Reject(what)
            elif what == "look":
                return [(each.task_id, each.state) for each in filter(None, [task.unique_find(number)])]
            return what

        body = distributed_lock("run:{number}", **guarded)(work) if guarded else work
        settings = {"bind": True, "name": "work", "shared": False, **(options or {})}
        return self.app.task(base=UniqueTask, unique=unique(name, **given), **settings)(body)

    def other(self):
        def other(value=None):
            return value

        return self.app.task(name="other", shared=False)(other)


@contextmanager
def shop_in_rabbitmq(kind, url, queue_type):
    """A shop whose queue is behind a topic exchange. Messages for later wait in RabbitMQ, if it is a quorum queue."""
    name = uuid.uuid4().hex
    conf = {
        "task_default_queue": name,
        "task_default_queue_type": queue_type,
        "task_default_exchange": f"exchange-{name}",
        "task_default_exchange_type": "topic",
        "task_default_routing_key": name,
    }
    with kind(url, **conf) as shop:
        # As a worker does when it starts, with the kind that CONF says.
        declare_native_delayed_delivery_exchanges_and_queues(shop.connection, "classic")
        shop.queue.declare()
        bind_queue_to_native_delayed_delivery_exchange(shop.connection, shop.app.amqp.queues[name])
        yield shop
