"""Runs of Celery tasks that hold a lock: what they are called, and how they meet busy locks and their own copies.

A message may be delivered more than once: when a worker dies, when the visibility timeout of the broker passes,
and, with the same task id, when a task is retried. Such a copy must neither run beside the first delivery nor be
skipped because of it: what a lock held by the copy's own task id stands for may be dead.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

from celery.exceptions import Ignore, Retry  # type: ignore[import-untyped]
from celery.signals import worker_process_shutdown  # type: ignore[import-untyped]

from .. import names, renewal
from ..exceptions import LockBackendError, LockNotAcquired
from ..handlers import locks
from ..leases import Lease
from ..tickets import Holder, Ticket, shown

FIRST_PAUSE = 0.5  # seconds
LONGEST_PAUSE = 5.0
SHORTEST_PAUSE = 0.1
VISIBILITY_TIMEOUT = 3600.0  # seconds, where the broker's options name none; kombu's for Redis
MARK_TTL = 10.0  # seconds that a mark is being written at most

REQUEUES = "distlock_requeues"  # header of a message: how often it was sent again because of a busy lock
TELL_REDELIVERIES = ("amqp", "redis")  # transports that mark what they deliver again

logger = logging.getLogger("django_distlock")


class Run:
    """One run of a Celery task, as seen from a guarded function that it calls."""

    def __init__(self, task: Any, function: Callable[..., Any]) -> None:
        self._task = task
        self._request = task.request
        self._is_body = _is_body(task, function)

    @property
    def label(self) -> str:
        """Name and id, as Celery's own log writes them. A task that is called like a function has no id."""
        return shown(f"{self._task.name}[{self._request.id}]" if self._request.id else self._task.name)

    def retry(self, busy: LockNotAcquired) -> NoReturn:
        """Send the task again for later, without counting it as one of its ``max_retries``.

        Raises Retry. A task that no worker runs (eager, or called like a function) raises the error itself.
        """
        if not self._is_in_worker:
            raise busy
        signature, pause = self._send_again(busy)
        raise Retry(exc=busy, when=pause, sig=signature)

    def meet(self, lock: Any, busy: LockNotAcquired) -> None:
        """Raises Ignore if the task is done already, or, after having sent it again, if it is itself in the way.

        Nothing is recorded then and nothing that follows is started: all this is up to the run that holds the
        lock; or, if that one is dead, to the next copy.
        """
        if not self._may_have_come_before:
            return
        self._stop_if_done(lock.name, lock.using)
        if busy.holder and busy.holder.label.endswith(f"[{self._request.id}]"):
            _, pause = self._send_again(busy)
            logger.info("%s meets itself and is sent again for in %.1f s. %s", self.label, pause, busy)
            raise Ignore(f"{self.label} is sent again.")

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[None]:
        """While the body of the task runs, ``self.request.lease`` is its lease.

        Raises Ignore if the task is done already. At its end a task that is acknowledged late leaves a mark, by
        which its copies see that.
        """
        if not self._is_body:
            yield
            return
        self._stop_if_done(lease.name, lease.using)
        outer, self._request.lease = getattr(self._request, "lease", None), lease
        try:
            yield
        finally:
            self._request.lease = outer
        is_success = lease.is_live or lease.terms.on_lost == "log"  # else LockLost is about to be raised
        if is_success and self._task.acks_late and self._is_in_worker:
            self._leave_mark(lease)

    @property
    def _is_in_worker(self) -> bool:
        return not (self._request.called_directly or self._request.is_eager)

    @property
    def _may_have_come_before(self) -> bool:
        """Whether a message with this task id may have been delivered before. An id that is reused does not count."""
        if not (self._is_body and self._is_in_worker):
            return False
        is_redelivered = (self._request.delivery_info or {}).get("redelivered")
        is_sent_again = self._request.retries or REQUEUES in self._headers
        return bool(is_redelivered or is_sent_again) or not _tells_redeliveries(self._task.app)

    @property
    def _headers(self) -> dict[str, Any]:
        return self._request.headers or {}

    def _send_again(self, busy: LockNotAcquired) -> tuple[Any, float]:
        requeues = int(self._headers.get(REQUEUES, 0))
        pause = pause_before(requeues, busy.retry_after, _visibility_timeout(self._task.app))
        signature = self._task.signature_from_request(
            self._request,
            countdown=pause,
            retries=self._request.retries,
            headers={**self._headers, REQUEUES: requeues + 1},
        )
        signature.apply_async()
        return signature, pause

    # Marks are leases that rest: every store of locks keeps them, and drops them in time.

    def _mark(self, lock_name: str) -> str:
        return names.render(names.OWN + "done:{}:{}", (self._request.id, lock_name))

    def _stop_if_done(self, lock_name: str, using: str) -> None:
        if not (self._task.acks_late and self._may_have_come_before):
            return
        if locks[using].look([self._mark(lock_name)]) != [None]:
            logger.info("%s was delivered again, but is done already and does not run.", self.label)
            raise Ignore(f"{self.label} is done already.")

    def _leave_mark(self, lease: Lease) -> None:
        mark = Ticket(self._mark(lease.name), MARK_TTL, Holder.here(f"done: {self.label}"))
        try:
            lease.backend.acquire(mark, queue=False)
            lease.backend.release(mark, rest=_visibility_timeout(self._task.app))
        except LockBackendError as error:
            logger.warning("%s is done, but may run again if it is delivered again: %s", self.label, error)


def pause_before(requeues: int, holder_has: float | None, visibility_timeout: float) -> float:
    """Seconds until a task that found its lock busy is tried again, after so many requeues.

    At most what the holder's lease has left, and 5 s; shorter at first, and scattered, so that those that were
    busy together do not come back together. A pause as long as the visibility timeout would be delivered twice.
    """
    longest = min(FIRST_PAUSE * 2 ** min(requeues, 10), LONGEST_PAUSE, visibility_timeout / 2)
    if holder_has is not None:
        longest = min(longest, max(holder_has, SHORTEST_PAUSE))
    return random.uniform(longest / 2, longest)


def _visibility_timeout(app: Any) -> float:
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout") or VISIBILITY_TIMEOUT)


@lru_cache(maxsize=8)
def _tells_redeliveries(app: Any) -> bool:
    return app.connection_for_read().get_transport_cls().driver_type in TELL_REDELIVERIES


def _is_body(task: Any, function: Callable[..., Any]) -> bool:
    """Whether it is the function of the task itself, and not a helper that it calls."""
    for layer in (task.run, getattr(task, "_orig_run", None)):  # autoretry_for wraps it
        layer = inspect.unwrap(layer, stop=lambda each: _plain(each) is function) if layer else None
        if _plain(layer) is function:
            return True
    return False


def _plain(method: Any) -> Any:
    return getattr(method, "__func__", method)


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def _release_all(**_: Any) -> None:
    """Children of a pool leave by os._exit, which calls nothing that is registered for the exit."""
    renewal.release_all()
