"""When a task that did not get its lock goes back to its queue, so that neither the broker nor a worker is flooded.

A run first stands by in its worker for a moment, in the queue of the lock: a slot is used as soon as it is free. Then
it is sent again at a pace: of those that wait for one lock, all workers together send few a second. A countdown would
keep the message in the worker that receives it, unacknowledged, so each process has few of those under way at a time.
Others go to the end of their queue without one.
"""

from __future__ import annotations

import logging
import math
import random
from contextlib import suppress
from typing import Any

from celery.app.task import extract_exec_options  # type: ignore[import-untyped]
from celery.utils.quorum_queues import detect_quorum_queues  # type: ignore[import-untyped]

from .. import names
from ..core.lock import Lock
from ..exceptions import LockBackendError, LockNotAcquired
from ..options import settled
from ..utils.clock import sleep, wall_clock
from ..utils.events import about_event
from .countdowns import LONGEST_PAUSE, countdowns

STANDS_BY = 0.5  # seconds for which a run waits in its worker for a lock that is busy
PACE = 16.0  # requeues a second of the tasks that wait for one lock
LONGEST_WAIT = 5.0  # seconds for which a run waits to be sent again, also where more than PACE times as many do
PACE_TTL = 1.0  # seconds for which a process that is killed as it sends keeps others from it

FIRST_PAUSE = 0.5  # seconds
SHORTEST_PAUSE = 0.1
VISIBILITY_TIMEOUT = 3600.0  # seconds, where the broker's options name none; kombu's for Redis

logger = logging.getLogger("django_distlock")


def keep_pace(problem: LockNotAcquired | LockBackendError, label: str, message: str, timeout: float) -> None:
    """Wait until a task that wants this lock may be sent again, but no longer than ``timeout`` seconds.

    Where the store fails, nobody knows of the others: the process makes a pause of its own.
    """
    if isinstance(problem, LockNotAcquired):
        options = settled(
            ttl=PACE_TTL, renew=False, wait=min(timeout, LONGEST_WAIT), max_waiters=None, min_hold=1 / PACE,
            max_hold=None, on_lost="log", in_atomic="ignore", on_unavailable="raise",
        )  # fmt: skip
        name, template = names.own_name("requeue:{}", problem.name), names.OWN + "requeue:{}"
        pace = Lock(name, problem.using, options, label, message, template=template)
        try:
            with suppress(LockNotAcquired), pace:  # by then it has waited for long enough
                pass
            return
        except LockBackendError as error:
            logger.info("%s is sent again without a pace: %s", label, error, extra=about_event("no-pace", task=label))
    sleep(min(timeout, random.uniform(FIRST_PAUSE, 2 * FIRST_PAUSE)))


def countdown_for(
    signature: Any, problem: LockNotAcquired | LockBackendError, requeues: int, timeout: float, *, always: bool
) -> float | None:
    """The seconds of the countdown with which a task is sent again; None: it is sent without one.

    ``timeout``: at most so many, but where RabbitMQ delays the message itself, by whole seconds. ``always``: also if
    the process has others under way, among which it does not count.
    """
    longest = min(visibility_timeout(signature.app) / 2, timeout)  # after it the message would be delivered twice
    if isinstance(problem, LockNotAcquired):
        held_for = wall_clock() - problem.holder.since if problem.holder else LONGEST_PAUSE
        longest = min(longest, longest_pause(held_for, problem.retry_after))
    pause = pause_before(requeues, longest)
    if delays_in_broker(signature):
        return float(max(1, math.ceil(pause)))
    return pause if always or countdowns.take(pause) else None


def longest_pause(held_for: float, remaining: float | None) -> float:
    """Before the next attempt at a lock that was held for so many seconds, by a lease that has so many left.

    It is expected to be held for as long again.
    """
    return min(max(FIRST_PAUSE, held_for), math.inf if remaining is None else max(remaining, SHORTEST_PAUSE))


def pause_before(requeues: int, longest: float) -> float:
    """Seconds until a task that did not get its lock is tried again, after so many requeues.

    Shorter at first, and random, so that tasks that were busy together do not come back together.
    """
    longest = min(FIRST_PAUSE * 2 ** min(requeues, 10), LONGEST_PAUSE, longest)
    return random.uniform(longest / 2, longest)


def visibility_timeout(app: Any) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout") or VISIBILITY_TIMEOUT)


def delays_in_broker(signature: Any) -> bool:
    """Whether the message waits in RabbitMQ itself, which counts whole seconds, and not in a worker.

    Celery lets it do so if the app has a quorum queue, and the exchange of this message is not direct.
    """
    task, app = signature.type, signature.app
    if not detect_quorum_queues(app, app.connection_for_write().get_transport_cls().driver_type)[0]:
        return False
    options = {**extract_exec_options(task), **signature.options}
    route = app.amqp.router.route(options, task.name, signature.args, signature.kwargs, task)
    queue = route.get("queue")
    return bool((queue.exchange.type if queue else route["exchange_type"]) != "direct")
