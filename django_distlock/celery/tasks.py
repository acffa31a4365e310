"""Runs of Celery tasks that hold a lock: their labels, busy locks, and deliveries of the same message.

A message may be delivered more than once: if a worker dies, and when the visibility timeout of the broker passes. Any
delivery may run first, and only the later ones may be flagged. No delivery may run at the same time as another one, and
none may be skipped because of another one: the delivery that has the lock may be dead.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NoReturn

from celery.app import trace  # type: ignore[import-untyped]
from celery.exceptions import Ignore, Reject, Retry  # type: ignore[import-untyped]
from celery.signals import worker_process_shutdown  # type: ignore[import-untyped]
from kombu.exceptions import OperationalError

from .. import names
from ..backends.base import BaseLockBackend
from ..core import labels
from ..core.group import Leases, leases_of
from ..core.holds import acquired_here, raises_when_lost
from ..core.lease import Lease
from ..core.lock import Lock
from ..core.registry import locks
from ..exceptions import LockBackendError, LockNotAcquired, LockTimeout
from ..message_ids import is_known, task_of
from ..options import Options, settled
from ..types import Holder, LockInfo, LockRequest, State, shown
from ..utils.clock import wall_clock
from ..utils.events import about_event
from .config import remember_tasks_for
from .messages import message_of
from .requeue import SHORTEST_PAUSE, STANDS_BY, countdown_for, keep_pace, visibility_timeout

MARK_TTL = 10.0  # seconds; the TTL of the lease that becomes a mark

UNIQUE_RUN = "distlock_unique_run"  # attribute of the request of a unique task: its UniqueRun

REQUEUES = "distlock_requeues"  # header of a message: how often it was sent again because it did not get its lock
WAITS = "distlock_waits"  # header of a message: the attempt, and since when it waits for each lock that it did not get
# Whether Celery records results of this request of the task. None: it asks the task alone, as before 5.7.
ignores_result = getattr(trace, "get_actual_ignore_result", None)
FLAGGING_TRANSPORTS = ("amqp", "redis")  # they flag messages that they deliver again

logger = logging.getLogger("django_distlock")


class Run:
    """One run of a Celery task that calls a decorated function."""

    def __init__(self, task: Any, function: Callable[..., Any]) -> None:
        self._task = task
        self._request = task.request
        self._is_body = _is_body(task, function)
        self._began_at = wall_clock()
        self._wanted = ""  # the names of its locks
        self._stands_by = False
        self.message = message_of(self._request) if self._is_in_worker else ""

    @property
    def label(self) -> str:
        return shown(labels.of_task(self._task))

    def waiting(
        self, lock_names: Iterable[str], options: Options, retry_for: float | None, *, stands_by: bool = False
    ) -> Options:
        """Returns the options for the locks with these names that this run now asks for.

        ``stands_by``: the run waits in its worker for a moment. No wait is longer than the rest of ``retry_for``.
        Without a worker, the options are returned as they were given.
        """
        self._wanted = ", ".join(sorted(lock_names))
        self._stands_by = stands_by and self._is_in_worker
        if not self._is_in_worker:
            return options
        wait = STANDS_BY if stands_by else options.own.wait
        remaining = max(0.0, self._deadline(retry_for) - wall_clock())
        if wait is None or wait > remaining:
            return Options({**options.given, "wait": None if math.isinf(remaining) else remaining})
        return settled(**{**options.given, "wait": wait}) if stands_by else options

    def had_little_time(self, failure: LockBackendError) -> bool:
        """Returns whether the store may only be slow, and the call failed because this run waits only for a moment.

        If so, the run asks once more, with the time that a call without a wait has.
        """
        return self._stands_by and failure.was_asked and not failure.is_final

    def retry(self, problem: LockNotAcquired | LockBackendError, retry_for: float | None) -> NoReturn:
        """Send the task again, to run later. This does not count as one of its ``max_retries``.

        Raises Retry. If the task has waited for ``retry_for`` seconds, raises LockTimeout, or the error of a store that
        does not answer. If no worker runs the task (eager, or called like a function), raises the problem itself.
        """
        if not self._is_in_worker:
            raise problem
        since, deadline = self._waits_since, self._deadline(retry_for)
        # A run that holds a lock would keep it from others while it waits for the pace.
        at_pace = not any(lease.is_held for lease in acquired_here())
        if at_pace and deadline > wall_clock():
            keep_pace(problem, self.label, self.message, deadline - wall_clock())
        # A run that is sent with no time left fails at once. Before Celery 5.7 RETRY could be recorded after that.
        if deadline - wall_clock() < SHORTEST_PAUSE:
            self._end_wait()
            if isinstance(problem, LockNotAcquired):
                raise self._timeout(problem, wall_clock() - since)
            raise problem
        waits = {WAITS: [self._request.retries, {**self._waits, self._wanted: since}]}
        is_recorded = self._record_retry(problem)
        signature, pause = self._send_again(problem, deadline, waits, always=not at_pace)
        if is_recorded:
            self._request.ignore_result = True
        raise Retry(exc=problem, when=pause or 0.0, sig=signature)

    def _record_retry(self, problem: LockNotAcquired | LockBackendError) -> bool:
        """Record the state RETRY before the message is sent. Returns whether that was done.

        Celery does so when the task has raised Retry. By then another process may have run what was sent, and RETRY
        would replace its result for ever.
        """
        if ignores_result is None or ignores_result(self._task, self._request):
            return False
        text = "".join(traceback.format_exception(problem))
        try:
            self._task.backend.mark_as_retry(self._request.id, problem, text, request=self._request)
        except Exception:
            logger.exception(
                "%s is sent again, but its state RETRY could not be recorded before.", self.label,
                extra=about_event("retry-not-recorded", task=self.label),
            )  # fmt: skip
            return False
        return True

    def handle_busy(self, busy: LockNotAcquired, *, retries: bool) -> None:
        """Raises Ignore if the task is done already, or if another delivery of it has the lock. In the second case this
        delivery is sent again.

        Ignore records no result and starts no following tasks. The run that holds the lock does that or, if it is dead,
        the next copy. Ignore is also raised if the lock is held for other work under the same task id, unless the task
        ``retries``.
        """
        if not (self._is_body and self._is_in_worker):
            return
        self._stop_if_late_copy(busy.name, locks[busy.using])
        holder = self._holder(busy)
        if holder and holder.slots > 1 and self._is_in_another_slot(busy):
            self.ignore_copy(busy)
        message = holder.message if holder else ""
        if task_of(message) != str(self._request.id):
            return
        if self._is_work_of(message):
            self.ignore_copy(busy)
        if not retries:
            logger.warning(
                "%s is dropped: another message with this task id is at work. %s", self.label, busy,
                extra=about_event("copy-dropped", task=self.label),
            )  # fmt: skip
            raise Ignore(f"{self.label} is at work.")

    @staticmethod
    def _holder(busy: LockNotAcquired) -> Holder | None:
        holder = busy.holder
        if holder is None and busy.reason == "crowded":  # by waiters of this process, so the store was not asked
            [leases] = locks[busy.using].look([busy.name])
            holder = next((info.holder for info in leases), None)
        return holder

    def _is_in_another_slot(self, busy: LockNotAcquired) -> bool:
        """Returns whether a delivery of the same message is at work. ``busy`` names only one of the slots' holders."""
        [leases] = locks[busy.using].look([self._running(busy.name)])
        return bool(leases)

    @contextmanager
    def holding(self, lease: Lease | Leases) -> Iterator[None]:
        """While the body of the task runs, ``self.request.lease`` is its lease, or the tuple of its leases.

        Raises Ignore if the task is done already. A task with late acknowledgement leaves a mark at its end, so that
        its copies see that it is done.
        """
        if not self._is_body:
            self._end_wait()
            yield
            return
        if self._task.acks_late and self._is_in_worker:
            remember_tasks_for()  # a wrong setting raises before the work; after it, done work would become a failure
        leases = leases_of(lease)
        for each in leases:
            if each.state is not State.UNAVAILABLE:  # else the store does not answer
                self._stop_if_late_copy(each.name, locks[each.using].pinned(each.prefix))
        outer, self._request.lease = getattr(self._request, "lease", None), lease
        try:
            with ExitStack() as stack:
                for each in leases:
                    stack.enter_context(self._alone(each))
                self._end_wait()
                if unique := getattr(self._request, UNIQUE_RUN, None):
                    unique.body_begins()
                yield
        finally:
            self._request.lease = outer
        # If a lease was lost, LockLost may be raised next.
        is_success = not any(each.state is State.LOST and raises_when_lost(each) for each in leases)
        if is_success and self._task.acks_late and self._is_in_worker:
            for each in leases:
                self.leave_mark(each.name, each.using, each.prefix)

    @contextmanager
    def _alone(self, lease: Lease) -> Iterator[None]:
        """Exclude the other deliveries of the message, because the lock may have a free slot for them, too.

        Raises Ignore if one of them is at work. Then this delivery is sent again.
        """
        if lease.holder.slots == 1 or not self._is_in_worker:
            yield
            return
        options = settled(wait=0, min_hold=0, max_hold=None, on_lost="log", in_atomic="ignore")
        name, template = self._running(lease.name), names.OWN + "running:{}:{}"
        alone = Lock(name, lease.using, options, self.label, self.message, prefix=lease.prefix, template=template)
        with ExitStack() as stack:
            try:
                stack.enter_context(alone)
            except LockNotAcquired as busy:
                self.ignore_copy(busy)
            yield

    def _running(self, lock_name: str) -> str:
        return names.own_name("running:{}:{}", self.message, lock_name)

    @property
    def _is_in_worker(self) -> bool:
        return not (self._request.called_directly or self._request.is_eager)

    def ignore_copy(self, busy: LockNotAcquired) -> NoReturn:
        """Send this delivery again, for later. Raises Ignore.

        This delivery is needed if the one that is at work dies.
        """
        _, pause = self._send_again(busy, math.inf, {}, always=True)
        logger.info(
            "%s is at work already, so this delivery is sent again in %.1f s. %s", self.label, pause or 0.0, busy,
            extra=about_event("copy-sent-again", task=self.label),
        )  # fmt: skip
        raise Ignore(f"{self.label} is sent again.")

    @property
    def _may_have_come_before(self) -> bool:
        """Whether this may be a copy. If the message has no id: if it is flagged, or the transport does not flag."""
        if is_known(self.message):
            return True
        is_redelivered = (self._request.delivery_info or {}).get("redelivered")
        is_sent_again = self._request.retries or REQUEUES in self._headers
        return bool(is_redelivered or is_sent_again) or not _flags_redeliveries(self._task.app)

    def _is_work_of(self, holder: str) -> bool:
        """Returns whether a message with this task id is the same work: a copy, a retry, or a task replaced by this."""
        are_known = is_known(self.message) and is_known(holder)
        return holder == self.message or not are_known or bool(self._request.replaced_task_nesting)

    @property
    def _headers(self) -> dict[str, Any]:
        return self._request.headers or {}

    # The message carries since when it waits: for each decorator, by the names of its locks, and for one attempt.

    @property
    def _waits(self) -> dict[str, float]:
        """Since when this attempt waits for the locks that it did not get, in seconds of Unix time, by their names."""
        attempt, waits = self._headers.get(WAITS) or (None, {})
        return waits if attempt == self._request.retries else {}

    @property
    def _waits_since(self) -> float:
        return float(self._waits.get(self._wanted, self._began_at))

    def _deadline(self, retry_for: float | None) -> float:
        """Returns seconds of Unix time."""
        return math.inf if retry_for is None else self._waits_since + retry_for

    def _end_wait(self) -> None:
        if self._wanted in self._waits:
            others = {lock_names: since for lock_names, since in self._waits.items() if lock_names != self._wanted}
            self._request.headers = {**self._headers, WAITS: [self._request.retries, others]}

    def _timeout(self, busy: LockNotAcquired, waited: float) -> LockTimeout:
        about = {key: value for key, value in vars(busy).items() if not key.startswith("_")}
        why = f"The task did not get its lock for {waited:.1f} s, and was sent again {self._requeues} times in all."
        return LockTimeout(f"{why} {busy}", **about)

    @property
    def _requeues(self) -> int:
        return int(self._headers.get(REQUEUES, 0))

    def _send_again(
        self,
        problem: LockNotAcquired | LockBackendError,
        deadline: float,
        more: Mapping[str, Any],
        *,
        always: bool,
    ) -> tuple[Any, float | None]:
        """Send the message again. Returns it, and the seconds of its countdown (None: it has none).

        ``deadline``: until when it may wait, in seconds of Unix time. ``more``: headers. ``always``: with a countdown,
        also if the process may have no more of them.

        Raises Reject, with which Celery records no result, if the broker does not accept the message.
        """
        signature = self._task.signature_from_request(
            self._request,
            retries=self._request.retries,
            headers={**self._headers, **more, REQUEUES: self._requeues + 1},
        )
        timeout = max(0.0, deadline - wall_clock())
        countdown = countdown_for(signature, problem, self._requeues, timeout, always=always)
        try:
            signature.set(countdown=countdown).apply_async()
        except OperationalError as error:
            raise Reject(error, requeue=self._task.acks_late) from error
        return signature, countdown

    # Marks are leases in their cooldown. Every store keeps them, and drops them in time.

    def _mark(self, lock_name: str) -> str:
        return names.own_name("done:{}:{}", self.message, lock_name)

    def _stop_if_late_copy(self, lock_name: str, backend: BaseLockBackend) -> None:
        if self._task.acks_late and self._is_in_worker and self._may_have_come_before:
            self.stop_if_done(lock_name, backend)

    def stop_if_done(self, lock_name: str, backend: BaseLockBackend) -> None:
        """Raises Ignore if the store has a mark of the message. Raises LockBackendError."""
        [marks] = backend.look([self._mark(lock_name)])
        if any(_retries_of(mark) >= self._request.retries for mark in marks):
            logger.info(
                "%s was delivered again, but is done already and does not run.", self.label,
                extra=about_event("copy-done-already", task=self.label),
            )  # fmt: skip
            raise Ignore(f"{self.label} is done already.")

    def leave_mark(self, lock_name: str, using: str, prefix: str) -> None:
        """Leave a mark, so that copies of the message see that the work is done. A failure is logged.

        A task may succeed and also retry, with ``self.retry(throw=False)``. So the mark says which attempt succeeded.
        """
        holder = Holder.here(f"done: {self.label}", message=str(self._request.retries))
        mark = LockRequest(self._mark(lock_name), MARK_TTL, holder, prefix=prefix)
        try:
            backend = locks[using]
            existing = backend.acquire(mark, queue=False)
            if isinstance(existing, LockInfo):
                backend.release(mark.copy(token=existing.token), force=True)
                backend.acquire(mark, queue=False)
            backend.release(mark, cooldown=max(visibility_timeout(self._task.app), remember_tasks_for()))
        except LockBackendError as error:
            logger.warning(
                "%s is done, but may run again if it is delivered again: %s", self.label, error,
                extra=about_event("task-not-marked", alias=using, name=lock_name, task=self.label),
            )  # fmt: skip


def _retries_of(mark: LockInfo) -> float:
    return int(mark.holder.message) if mark.holder and mark.holder.message.isdecimal() else math.inf


@lru_cache(maxsize=8)
def _flags_redeliveries(app: Any) -> bool:
    return app.connection_for_read().get_transport_cls().driver_type in FLAGGING_TRANSPORTS


def _is_body(task: Any, function: Callable[..., Any]) -> bool:
    """Returns whether the function is the body of the task, and not a helper that the body calls."""
    for layer in (task.run, getattr(task, "_orig_run", None)):  # autoretry_for wraps it
        layer = inspect.unwrap(layer, stop=lambda each: _plain(each) is function) if layer else None
        if _plain(layer) is function:
            return True
    return False


def _plain(method: Any) -> Any:
    return getattr(method, "__func__", method)


@worker_process_shutdown.connect  # type: ignore[untyped-decorator]
def _release_all(**_: Any) -> None:
    """Children of a pool end by ``os._exit()``, which does not call functions that are registered with atexit."""
    locks.release_all()
