"""Runs of unique tasks. They exchange the lease of their message for one that ends soon if the worker is killed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..core.busy import described
from ..core.succession import SucceedingLease
from ..decorators import key
from ..exceptions import LockBackendError, LockError, LockLost, LockNotHeld
from ..types import NOT_WAITING, Holder, LockInfo, LockRequest, place_of
from ..utils.events import about_event
from .options import Unique
from .queued import FIELD, QueuedLease

logger = logging.getLogger("django_distlock")


def is_guarded(function: Any) -> bool:
    """Returns whether the function has ``@distributed_lock``, which then says when the body begins."""
    return hasattr(function, key.MARK)


def read_lease(text: str, given: Unique, task: str) -> QueuedLease | None:
    """Returns the lease of a message. None: it cannot be read, and the task should run nevertheless.

    ``task``: name and id of the task. Raises LockBackendError.
    """
    try:
        return QueuedLease.from_text(text)
    except LockError as error:
        told = f"The lease {FIELD!r} of {task} cannot be read: {error}"
        if given.on_unavailable != "run":
            raise LockBackendError(told) from error
        logger.warning("%s", told, extra=about_event("unique-unreadable", task=task))
        return None


def release_unrun(text: str) -> None:
    """Free the name of a message whose task does not run, in the background and by the message's own token."""
    try:
        queued = QueuedLease.from_text(text)
        queued.succession.release_in_background(queued.request, longest_ttl=queued.left)
    except Exception as error:  # the worker continues, whatever others put into their messages
        logger.warning(
            "The name that a unique task holds cannot be freed; it ends by its ttl: %s", error,
            extra=about_event("unique-not-freed"),
        )  # fmt: skip


class UniqueRun:
    """One delivery of a message that holds its name, in the worker that runs its task.

    The class for a queue says which exception ends a run whose work belongs to another message (``dropped``), and what
    happens to copies of the message, if the queue makes any.

    ``label``: name and id of the task. ``message``: the id of the message.
    """

    dropped: type[Exception]

    def __init__(self, unique: Unique, queued: QueuedLease, label: str, message: str) -> None:
        self._unique, self._queued, self._label, self._message = unique, queued, label, message
        self._lease: SucceedingLease | None = None
        self._is_over = False  # whether its message has given up the name, or the next message has it
        self._is_unavailable = False

    @property
    def name(self) -> str:
        return self._queued.request.name

    def _stop_if_done(self) -> None:
        """Ends the run if another delivery of the message has done the work. Raises LockBackendError."""

    def _stop_if_copy(self, busy: LockInfo) -> None:
        """Ends the run because another delivery of the message has its name. Returns if the run must ask again."""
        raise NotImplementedError

    def _leave_mark(self) -> None:
        """Leave a mark for other deliveries of the message: the work is done."""

    def run(self, body: Callable[[], Any], *, is_guarded: bool) -> Any:
        """Run the body and return its result. ``is_guarded``: the body calls ``body_begins()`` when it has its lock."""
        is_done = False
        try:
            if self._unique.until != "start":
                self._begin()
            elif not is_guarded:
                self.body_begins()
            result = body()
            is_done = True
            return result
        finally:
            self._end(is_done=is_done)

    def _begin(self) -> None:
        """Exchange the lease of the message for one that is renewed."""
        queued = self._queued
        holder = Holder.here(self._label, message=self._message)
        request = LockRequest(
            queued.request.name, queued.succession.ttl, holder,
            prefix=queued.request.prefix, template=queued.request.template, deadline=NOT_WAITING,
        )  # fmt: skip
        try:
            while isinstance(answer := queued.succession.begin(queued.request, request), LockInfo):
                self._stop_if_late(answer)
            self._lease = answer
            # Also if the name was granted: another delivery may have held it and be done.
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
            while leases := backend.pinned(queued.request.prefix).look([queued.request.name])[0]:
                self._stop_if_late(leases[0])
        except LockBackendError as error:
            self._go_on_without(error)
            return
        self._is_over = True

    def _stop_if_late(self, busy: LockInfo) -> None:
        """Ends the run because this delivery no longer has the name. Returns if the run must ask again."""
        self._stop_if_done()
        if busy.holder and busy.holder.message == self._message:
            self._stop_if_copy(busy)
            return
        logger.warning(
            "%s is dropped: the lease of its message on %r (%s) has ended, and another message does the work. %s",
            self._label, busy.name, place_of(busy.using, busy.prefix), described(busy),
            extra=self._queued.about("unique-dropped"),
        )  # fmt: skip
        raise self.dropped(f"{self._label} is dropped.")

    def _go_on_without(self, error: LockBackendError) -> None:
        """Continue without the store, which does not answer. Raises the error unless the task should still run."""
        self._is_over = self._is_unavailable = True
        queued = self._queued
        queued.succession.release_in_background(queued.request, longest_ttl=queued.left)
        if self._unique.on_unavailable != "run" or error.is_final:
            raise error
        logger.warning(
            "%s runs although it is not known whether its name %r is its own: %s",
            self._label, queued.request.name, error, extra=queued.about("runs-without-lock"),
        )  # fmt: skip

    def _end(self, *, is_done: bool) -> None:
        queued, lease = self._queued, self._lease
        if is_done and not self._is_unavailable:
            self._leave_mark()
        if lease is None:
            if not self._is_over and self._unique.until == "start":  # its body did not begin
                queued.succession.release_in_background(queued.request, longest_ttl=queued.left)
            return
        self._lease = None
        if is_done and self._unique.until == "success":
            lease.rest = queued.left
        try:
            lease.release()
        except (LockLost, LockNotHeld):
            pass  # it was logged when it happened
        except LockBackendError as error:
            logger.error("%s", error, extra=queued.about("end-failed"))
