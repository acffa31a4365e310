"""Runs of unique tasks: the lease of their message becomes one that ends soon if the worker is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from celery.exceptions import Ignore  # type: ignore[import-untyped]
from celery.signals import task_rejected, task_revoked, task_unknown  # type: ignore[import-untyped]

from ..core.busy import described, not_acquired
from ..core.succession import SucceedingLease
from ..decorators import key
from ..exceptions import LockBackendError, LockError, LockLost, LockNotHeld
from ..types import NOT_WAITING, Grant, Holder, LockInfo, LockRequest, place_of
from ..utils.clock import wall_clock
from ..utils.events import about_event
from .messages import task_of
from .queued import DUPLICATE, HEADER, QueuedLease
from .tasks import UNIQUE_RUN, Run
from .unique_options import Unique

Send = Callable[[Mapping[str, Any]], Any]  # publishes a message with these headers

logger = logging.getLogger("django_distlock")


class Dropped(Ignore):  # type: ignore[misc]
    """This delivery does nothing: the work is another message's."""


def publish(queued: QueuedLease, send: Send, headers: Mapping[str, Any], seconds: float) -> Any:
    """Send a message that holds its name, which lasts for ``seconds`` once the broker took the message.

    Until then the lease lasts for the TTL of the alias alone, so that a process which is killed before it has
    published leaves nothing behind for long. If that takes longer than the TTL, nothing is left to be lengthened.
    """
    succession, request = queued.succession, queued.request
    try:
        sent = send({**headers, HEADER: queued.to_text()})
    except Exception:
        try:
            succession.backend.release(request)
        except LockBackendError:
            succession.release_in_background(request)
        raise
    except BaseException:
        succession.release_in_background(request)
        raise
    _lengthen(queued, seconds)
    return sent


def _lengthen(queued: QueuedLease, seconds: float) -> None:
    """The message is in the queue already: what fails is logged."""
    try:
        queued.succession.backend.renew([(queued.request, seconds)])
    except LockBackendError as error:
        logger.warning(
            "%s is published, but holds its name for %.0f s only, if it waits for longer in the queue: %s",
            queued.request.holder.label, queued.request.ttl, error, extra=_about("unique-not-lengthened", queued),
        )  # fmt: skip


def is_guarded(task: Any) -> bool:
    """Whether ``@distributed_lock`` is below: then that says when the body begins."""
    return hasattr(task.run, key.MARK)


class UniqueRun:
    """One delivery of a message that holds its name, in the worker that runs its task."""

    def __init__(self, task: Any, unique: Unique, queued: QueuedLease) -> None:
        self._task, self._unique, self._queued = task, unique, queued
        self._run = Run(task, task.run)
        self._lease: SucceedingLease | None = None
        self._is_over = False  # whether its message has given up its name, or the next one has it
        self._is_unavailable = False

    @property
    def name(self) -> str:
        return self._queued.request.name

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The body, or None in its place."""
        request, is_done = self._task.request, False
        setattr(request, UNIQUE_RUN, self)
        try:
            if self._unique.until != "start":
                self._begin()
            elif not is_guarded(self._task):
                self.body_begins()
            result = self._task.run(*args, **kwargs)
            is_done = True
            return result
        except Dropped:
            if request.chord or request.group or request.chain:
                return None
            raise
        finally:
            delattr(request, UNIQUE_RUN)
            self._end(is_done=is_done)

    def _begin(self) -> None:
        """Exchange the lease of the message for one that is renewed."""
        queued = self._queued
        holder = Holder.here(self._run.label, message=self._queued.message)
        request = LockRequest(
            queued.request.name, queued.succession.ttl, holder,
            prefix=queued.request.prefix, template=queued.request.template, deadline=NOT_WAITING,
        )  # fmt: skip
        try:
            answer = queued.succession.begin(queued.request, request)
            if isinstance(answer, LockInfo):
                self._stop_if_late(answer)
            self._lease = answer
            # Also where it was granted the name: another delivery may have held it, and be done.
            self._stop_if_done()
        except LockBackendError as error:
            self._go_on_without(error)

    def body_begins(self) -> None:
        """With until="start", the name is free from now on."""
        if self._is_over or self._unique.until != "start":
            return
        queued, backend = self._queued, self._queued.succession.backend
        try:
            if backend.release(queued.request):
                self._is_over = True
                return
            self._stop_if_done()
            [leases] = backend.pinned(queued.request.prefix).look([queued.request.name])
        except LockBackendError as error:
            self._go_on_without(error)
            return
        if leases:
            self._stop_if_late(leases[0])
        self._is_over = True

    def _stop_if_late(self, busy: LockInfo) -> NoReturn:
        """The name is not this delivery's any more."""
        self._stop_if_done()
        place = place_of(busy.using, busy.prefix)
        if busy.holder and busy.holder.message == self._queued.message:
            self._run.ignore_copy(not_acquired(f"{busy.name!r} ({place})", busy, 1, None))
        logger.warning(
            "%s is dropped: the lease of its message on %r (%s) has ended, and another message does the work. %s",
            self._run.label, busy.name, place, described(busy), extra=_about("unique-dropped", self._queued),
        )  # fmt: skip
        raise Dropped(f"{self._run.label} is dropped.")

    def _stop_if_done(self) -> None:
        """An eager run is of no message, and has no copies."""
        request = self._queued.request
        if not self._task.request.is_eager:
            self._run.stop_if_done(request.name, self._queued.succession.backend.pinned(request.prefix))

    def _go_on_without(self, error: LockBackendError) -> None:
        """The store does not answer. Raises the error, unless the task is to run all the same."""
        self._is_over = self._is_unavailable = True
        queued = self._queued
        queued.succession.release_in_background(queued.request, longest_ttl=queued.left)
        if self._unique.on_unavailable != "run" or error.is_final:
            raise error
        logger.warning(
            "%s runs although it is not known whether its name %r is its own: %s",
            self._run.label, queued.request.name, error, extra=_about("runs-without-lock", queued),
        )  # fmt: skip

    def publish_again(self, send: Send, headers: Mapping[str, Any], delay: float) -> Any:
        """Send the message once more, as a retry or a requeue does. ``delay``: seconds until it is to run."""
        queued, seconds = self._queued, self._unique.ttl + delay
        if self._lease is None and not (self._is_over and self._unique.until == "start"):
            self._is_over = True  # from now on the name is that of the next message
            sent = send({**headers, HEADER: queued.to_text()})
            _lengthen(queued, seconds)
            return sent
        new = queued.again(queued.until if self._unique.until == "success" else wall_clock() + seconds)
        try:
            answer = self._exchange(new)
        except LockError as error:
            logger.warning(
                "%s is sent again without a lease on its name: %s", self._run.label, error,
                extra=_about("unique-not-kept", queued),
            )  # fmt: skip
            # If it is free when the next run begins, that one takes it.
            return send({**headers, HEADER: queued.to_text()} if self._unique.until != "start" else _without(headers))
        if isinstance(answer, LockInfo):
            return send(_without(headers))
        new.granted(answer)
        return publish(new, send, headers, seconds)

    def _exchange(self, new: QueuedLease) -> Grant | LockInfo:
        lease, self._lease = self._lease, None
        if lease is None:
            return new.succession.claim(new.request)
        try:
            return new.succession.requeue(lease, new.request)
        except (LockLost, LockNotHeld):
            return new.succession.claim(new.request)

    def _end(self, *, is_done: bool) -> None:
        queued, lease = self._queued, self._lease
        request = queued.request
        if is_done and not self._is_unavailable and not self._task.request.is_eager:
            self._run.leave_mark(request.name, queued.using, request.prefix)
        if lease is None:
            if not self._is_over and self._unique.until == "start":  # its body did not begin
                queued.succession.release_in_background(request, longest_ttl=queued.left)
            return
        self._lease = None
        if is_done and self._unique.until == "success":
            lease.rest = queued.left
        try:
            lease.release()
        except (LockLost, LockNotHeld):
            pass  # which was logged when it happened
        except LockBackendError as error:
            logger.error("%s", error, extra=_about("end-failed", queued))


def _without(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in headers.items() if key != HEADER}


def _about(event: str, queued: QueuedLease) -> dict[str, Any]:
    request = queued.request
    return about_event(
        event, alias=queued.using, name=request.name, template=request.template or request.name,
        task=task_of(queued.message),
    )  # fmt: skip


# Messages whose tasks are not run


def release_name_of(headers: Mapping[str, Any] | None) -> None:
    """Free the name that a message holds which no worker will run."""
    text = (headers or {}).get(HEADER)
    if not text or text == DUPLICATE:
        return
    try:
        queued = QueuedLease.from_text(text)
        queued.succession.release_in_background(queued.request, longest_ttl=queued.left)
    except Exception as error:  # whatever others put into their messages: the worker goes on
        logger.warning(
            "The name that a unique task holds cannot be freed; it ends by its ttl: %s", error,
            extra=about_event("unique-not-freed"),
        )  # fmt: skip


@task_revoked.connect  # type: ignore[untyped-decorator]
def _on_revoked(request: Any, **_: Any) -> None:
    release_name_of(getattr(request, "headers", None))


@task_rejected.connect  # type: ignore[untyped-decorator]
@task_unknown.connect  # type: ignore[untyped-decorator]
def _on_refused(message: Any, **_: Any) -> None:
    release_name_of(message.headers)
