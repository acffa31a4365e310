"""Deliveries of Celery messages that hold their names: copies, retries, and messages that no worker runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery.exceptions import Ignore  # type: ignore[import-untyped]
from celery.signals import task_rejected, task_revoked, task_unknown  # type: ignore[import-untyped]

from ..core.busy import not_acquired
from ..exceptions import LockError, LockLost, LockNotHeld
from ..types import Grant, LockInfo, place_of
from ..unique.options import Unique
from ..unique.publishing import lengthen, publish
from ..unique.queued import FIELD as HEADER
from ..unique.queued import QueuedLease
from ..unique.runs import UniqueRun, is_guarded, release_unrun
from ..utils.clock import wall_clock
from .tasks import UNIQUE_RUN, Run

DUPLICATE = "duplicate"  # replaces the lease in a message that is published only because a canvas waits for it

SendHeaders = Callable[[Mapping[str, Any]], Any]  # publishes a message with these headers

logger = logging.getLogger("django_distlock")


class Dropped(Ignore):  # type: ignore[misc]
    """This delivery does nothing, because the work belongs to another message."""


class Delivery(UniqueRun):
    """One delivery of a message that holds its name, in the worker that runs its task."""

    dropped = Dropped

    def __init__(self, task: Any, unique: Unique, queued: QueuedLease) -> None:
        self._task, self._run = task, Run(task, task.run)
        super().__init__(unique, queued, self._run.label, queued.message)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the body. Returns its result, or None if it is dropped."""
        request = self._task.request
        setattr(request, UNIQUE_RUN, self)
        try:
            return self.run(lambda: self._task.run(*args, **kwargs), is_guarded=is_guarded(self._task.run))
        except Dropped:
            if request.chord or request.group or request.chain:
                return None
            raise
        finally:
            delattr(request, UNIQUE_RUN)

    # An eager run has no message and no copies.

    def _stop_if_done(self) -> None:
        request = self._queued.request
        if not self._task.request.is_eager:
            self._run.stop_if_done(request.name, self._queued.succession.backend.pinned(request.prefix))

    def _stop_if_copy(self, busy: LockInfo) -> None:
        """Send the copy again."""
        place = place_of(busy.using, busy.prefix)
        self._run.ignore_copy(not_acquired(f"{busy.name!r} ({place})", busy, 1, None))

    def _leave_mark(self) -> None:
        request = self._queued.request
        if not self._task.request.is_eager:
            self._run.leave_mark(request.name, self._queued.using, request.prefix)

    def publish_again(self, send: SendHeaders, headers: Mapping[str, Any], delay: float) -> Any:
        """Send the message once more, for a retry or a requeue. ``delay``: seconds until it should run."""
        queued, seconds = self._queued, self._unique.ttl + delay
        if self._lease is None and not (self._is_over and self._unique.until == "start"):
            self._is_over = True  # from now on the name belongs to the next message
            sent = send({**headers, HEADER: queued.to_text()})
            lengthen(queued, seconds)
            return sent
        new = queued.again(queued.until if self._unique.until == "success" else wall_clock() + seconds)
        try:
            answer = self._exchange(new)
        except LockError as error:
            logger.warning(
                "%s is sent again without a lease on its name: %s", self._run.label, error,
                extra=queued.about("unique-not-kept"),
            )  # fmt: skip
            # If the name is free when the next run begins, that run takes it.
            return send({**headers, HEADER: queued.to_text()} if self._unique.until != "start" else _without(headers))
        if isinstance(answer, LockInfo):
            return send(_without(headers))
        new.granted(answer)
        return publish(new, lambda text: send({**headers, HEADER: text}), seconds)

    def _exchange(self, new: QueuedLease) -> Grant | LockInfo:
        lease, self._lease = self._lease, None
        if lease is None:
            return new.succession.claim(new.request)
        try:
            return new.succession.requeue(lease, new.request)
        except (LockLost, LockNotHeld):
            return new.succession.claim(new.request)


def _without(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in headers.items() if key != HEADER}


# Messages whose tasks are not run


def release_name_of(headers: Mapping[str, Any] | None) -> None:
    """Free the name of a message that no worker will run."""
    text = (headers or {}).get(HEADER)
    if text and text != DUPLICATE:
        release_unrun(text)


@task_revoked.connect  # type: ignore[untyped-decorator]
def _on_revoked(request: Any, **_: Any) -> None:
    release_name_of(getattr(request, "headers", None))


@task_rejected.connect  # type: ignore[untyped-decorator]
@task_unknown.connect  # type: ignore[untyped-decorator]
def _on_refused(message: Any, **_: Any) -> None:
    release_name_of(message.headers)
