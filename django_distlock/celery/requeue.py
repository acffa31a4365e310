"""Decides when a task that did not get its lock goes back to its queue, so that it floods neither broker nor workers.

A run first waits in its worker for a moment, in the queue of the lock, so that a free slot is used at once. Then it is
sent again at a limited pace: all workers together send only a few tasks a second that wait for one lock. A message with
a countdown stays in the worker that receives it, unacknowledged. So each process has only a few of these at a time, and
sends the other messages to the end of their queue without a countdown.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import Any

from celery.app.task import extract_exec_options  # type: ignore[import-untyped]
from celery.utils.quorum_queues import detect_quorum_queues  # type: ignore[import-untyped]

from .. import names
from ..core.lock import Lock
from ..exceptions import LockBackendError, LockNotAcquired
from ..options import settled
from ..utils.chance import chance
from ..utils.clock import sleep, wall_clock
from ..utils.events import about_event
from .countdowns import LONGEST_PAUSE, countdowns

STANDS_BY = 0.5  # seconds for which a run waits in its worker for a lock that is busy
PACE = 16.0  # requeues a second of the tasks that wait for one lock
LONGEST_WAIT = 5.0  # seconds for which a run waits to be sent again, also if more than PACE times as many runs wait
PACE_TTL = 1.0  # seconds for which a process that is killed while it sends keeps others from sending

FIRST_PAUSE = 0.5  # seconds
SHORTEST_PAUSE = 0.1
VISIBILITY_TIMEOUT = 3600.0  # seconds, if the broker's options have none; kombu's default for Redis

logger = logging.getLogger("django_distlock")


def keep_pace(problem: LockNotAcquired | LockBackendError, label: str, message: str, timeout: float) -> None:
    """Wait until a task that wants this lock may be sent again, but no longer than ``timeout`` seconds.

    If the store fails, the process does not know about the other tasks, and pauses by itself.
    """
    if isinstance(problem, LockNotAcquired):
        options = settled(
            ttl=PACE_TTL, renew=False, wait=min(timeout, LONGEST_WAIT), max_waiters=None, min_hold=1 / PACE,
            max_hold=None, on_lost="log", in_atomic="ignore", on_unavailable="raise",
        )  # fmt: skip
        name, template = names.own_name("requeue:{}", problem.name), names.OWN + "requeue:{}"
        pace = Lock(name, problem.using, options, label, message, template=template)
        try:
            with suppress(LockNotAcquired), pace:  # after this wait it has waited long enough
                pass
            return
        except LockBackendError as error:
            logger.info("%s is sent again without a pace: %s", label, error, extra=about_event("no-pace", task=label))
    sleep(min(timeout, chance.uniform(FIRST_PAUSE, 2 * FIRST_PAUSE)))


def countdown_for(
    signature: Any, problem: LockNotAcquired | LockBackendError, requeues: int, timeout: float, *, always: bool
) -> float | None:
    """Returns the countdown, in seconds, with which a task is sent again; None: it is sent without one.

    ``timeout``: the most seconds, except if RabbitMQ delays the message itself, by whole seconds. ``always``: with a
    countdown even if the process has others under way; this one is then not counted.
    """
    longest = min(visibility_timeout(signature.app) / 2, timeout)  # with more, the message would be delivered twice
    if isinstance(problem, LockNotAcquired):
        held_for = wall_clock() - problem.holder.since if problem.holder else LONGEST_PAUSE
        longest = min(longest, longest_pause(held_for, problem.retry_after))
    pause = pause_before(requeues, longest)
    if delays_in_broker(signature):
        return float(max(1, math.ceil(pause)))
    return pause if always or countdowns.take(pause) else None


def longest_pause(held_for: float, remaining: float | None) -> float:
    """Returns the longest pause, in seconds, before the next attempt.

    ``held_for``: seconds for which the lock has been held; it is expected to be held for as long again. ``remaining``:
    seconds that the lease has left.
    """
    return min(max(FIRST_PAUSE, held_for), math.inf if remaining is None else max(remaining, SHORTEST_PAUSE))


def pause_before(requeues: int, longest: float) -> float:
    """Returns the seconds until a task that did not get its lock tries again, after ``requeues`` requeues.

    The pauses are shorter at first, and random, so that tasks that were refused together do not come back together.
    """
    longest = min(FIRST_PAUSE * 2 ** min(requeues, 10), LONGEST_PAUSE, longest)
    return chance.uniform(longest / 2, longest)


def visibility_timeout(app: Any) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout") or VISIBILITY_TIMEOUT)


def delays_in_broker(signature: Any) -> bool:
    """Returns whether the message waits in RabbitMQ itself, which counts whole seconds, and not in a worker.

    Celery uses this if the app has a quorum queue and the exchange of this message is not direct.
    """
    task, app = signature.type, signature.app
    if not detect_quorum_queues(app, app.connection_for_write().get_transport_cls().driver_type)[0]:
        return False
    options = {**extract_exec_options(task), **signature.options}
    route = app.amqp.router.route(options, task.name, signature.args, signature.kwargs, task)
    queue = route.get("queue")
    return bool((queue.exchange.type if queue else route["exchange_type"]) != "direct")
