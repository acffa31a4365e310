"""Publishes a message that holds its name, and finds out who already has the name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .. import signals
from ..core.busy import described
from ..exceptions import LockBackendError, TaskAlreadyQueued
from ..message_ids import task_of
from ..types import Grant, LockInfo, place_of
from ..utils.clock import clock
from .options import Unique
from .queued import QUEUED, QueuedLease

Send = Callable[[str], Any]  # publishes a message with this text

logger = logging.getLogger("django_distlock")


class UniqueHolder(NamedTuple):
    """Who has the name of a unique task.

    ``state``: "queued", "running" or "done"; "done" is a task with ``until="success"`` that has succeeded. ``task_id``:
    "" if something else holds a lock with that name, and if a task of ImmediateBackend is about to begin. ``info``: the
    lease of the name.
    """

    task_id: str
    state: Literal["queued", "running", "done"]
    info: LockInfo

    @classmethod
    def of(cls, info: LockInfo) -> UniqueHolder:
        message, label = (info.holder.message, info.holder.label) if info.holder else ("", "")
        state: Literal["queued", "running", "done"] = "queued" if label.startswith(QUEUED) else "running"
        return cls(task_of(message), "done" if info.resting else state, info)

    def __str__(self) -> str:
        return f"the task {self.task_id} is {self.state}" if self.task_id else "its name is taken"


def claim(given: Unique, queued: QueuedLease) -> UniqueHolder | None:
    """Take the name for a message that is about to be published. Returns who has it; None if the message may be
    published.

    ``queued.is_granted``: whether the name was taken. With None and without a grant, the store does not answer, and the
    message is published nevertheless. If a run of this very message already has the name, no duplicate is reported.
    Raises LockBackendError.
    """
    request, backend, began = queued.request, queued.succession.backend, clock()
    about = {"name": request.name, "template": request.template or request.name, "using": queued.using}
    try:
        answer = queued.succession.claim(request)
    except LockBackendError as error:
        signals.send_signal(
            signals.lock_unavailable, type(backend), **about, error=error, lease=None, waited=clock() - began
        )
        if given.on_unavailable != "run" or error.is_final:
            raise
        logger.warning(
            "%s is queued although it is not known whether it is queued already: %s", queued.task, error,
            extra=queued.about("unique-unavailable"),
        )  # fmt: skip
        return None
    if isinstance(answer, Grant):
        queued.granted(answer)
        return None
    found = UniqueHolder.of(answer)
    if answer.holder and answer.holder.message == queued.message:
        return found  # a worker may be faster than this process
    signals.send_signal(
        signals.lock_busy, type(backend), **about, holder=answer.holder, waited=clock() - began, reason="duplicate"
    )
    logger.info(
        "%s is not queued: %s. %s", queued.task, found, described(answer), extra=queued.about("duplicate"),
    )  # fmt: skip
    return found


def publish(queued: QueuedLease, send: Send, seconds: float) -> Any:
    """Send a message that holds its name. After the broker has accepted it, the lease lasts for ``seconds``.

    Until then the lease lasts only for the TTL of the alias, so that a process that is killed before it has published
    does not keep the name for long. If publishing takes longer than the TTL, there is no lease left to lengthen.
    """
    succession, request = queued.succession, queued.request
    try:
        sent = send(queued.to_text())
    except Exception:
        try:
            succession.backend.release(request)
        except LockBackendError:
            succession.release_in_background(request)
        raise
    except BaseException:
        succession.release_in_background(request)
        raise
    lengthen(queued, seconds)
    return sent


def lengthen(queued: QueuedLease, seconds: float) -> None:
    """Lengthen the lease. The message is already in the queue, so a failure is logged."""
    try:
        queued.succession.backend.renew([(queued.request, seconds)])
    except LockBackendError as error:
        logger.warning(
            "%s is published, but holds its name for %.0f s only, if it waits for longer in the queue: %s",
            queued.request.holder.label, queued.request.ttl, error, extra=queued.about("unique-not-lengthened"),
        )  # fmt: skip


def already_queued(task: str, found: UniqueHolder) -> TaskAlreadyQueued:
    """Returns the error for a duplicate. ``task``: the name of the task."""
    info = found.info
    return TaskAlreadyQueued(
        f"{task} is not queued again: {found}. The name {info.name!r} ({place_of(info.using, info.prefix)}) is"
        f" {described(info)}",
        task_id=found.task_id, retry_after=info.remaining, holder=info.holder, resting=info.resting,
        name=info.name, using=info.using,
    )  # fmt: skip
