"""The lease of a message that waits in a queue. It travels with the message.

It is written like a detached lease. The process that receives the message continues with it: a worker that runs the
task, or one that rejects it.
"""

from __future__ import annotations

from typing import Any, Self

from ..core.detached import Detached
from ..core.succession import Succession
from ..message_ids import task_of
from ..options import Terms
from ..types import NOT_WAITING, Grant, Holder, LockRequest
from ..utils.clock import wall_clock
from ..utils.events import about_event

FIELD = "distlock_unique"  # the field of a message with the detached lease
QUEUED = "queued: "  # the beginning of the label of its holder


class QueuedLease:
    """The request with which a message holds its name, and until when it may do so.

    ``message``: the id of the message. ``until``: when the name is free again if no worker has run the task, in seconds
    of Unix time; with ``until="success"``, also if a worker has run it.
    """

    def __init__(self, succession: Succession, request: LockRequest, until: float, fence: int = 0) -> None:
        self.succession, self.request, self.until, self._fence = succession, request, until, fence

    @classmethod
    def new(
        cls, succession: Succession, name: str, template: str, prefix: str, task: str, message: str, until: float
    ) -> Self:
        """``prefix``: the result of a callable KEY_PREFIX. ``task``: name and id of the task."""
        holder = Holder.here(f"{QUEUED}{task}", message=message)
        request = LockRequest(
            name, succession.ttl, holder, template=template, prefix=prefix, deadline=NOT_WAITING
        )  # fmt: skip
        return cls(succession, request, until)

    def granted(self, grant: Grant) -> None:
        self._fence = grant.fence

    @property
    def message(self) -> str:
        return self.request.holder.message

    @property
    def is_granted(self) -> bool:
        return self._fence > 0

    @property
    def task(self) -> str:
        """Name and id of the task, for people."""
        return self.request.holder.label.removeprefix(QUEUED)

    @property
    def using(self) -> str:
        return self.succession.backend.alias

    @property
    def left(self) -> float:
        """Seconds until ``until``."""
        return max(0.0, self.until - wall_clock())

    def again(self, until: float) -> Self:
        """Returns one with another token, for the next message of the same work."""
        holder = self.request.holder
        new = Holder.here(holder.label, message=holder.message)
        return type(self)(self.succession, self.request.with_new_token().copy(holder=new), until)

    def to_text(self) -> str:
        request, now = self.request, wall_clock()
        return Detached(
            using=self.using, name=request.name, prefix=request.prefix, template=request.template, token=request.token,
            fence=self._fence, label=request.holder.label, since=request.holder.since, granted_at=now,
            remaining=self.left, until=self.until, text_id=self.message, terms={"ttl": request.ttl},
            slot=request.slot,
        ).to_text()  # fmt: skip

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises LockNotHeld and LockBackendError for a text that cannot be read, InvalidLockBackend."""
        detached = Detached.from_text(text)
        here = Holder.here(detached.label, message=detached.text_id)
        # The publisher may have asked more than once, and one of its commands may still be on its way to the store.
        request = LockRequest(
            detached.name, Terms(**detached.terms).ttl, here._replace(since=detached.since), detached.token,
            in_doubt=True, prefix=detached.prefix, template=detached.template, slot=detached.slot, deadline=NOT_WAITING,
        )  # fmt: skip
        return cls(Succession(detached.using), request, detached.until, detached.fence)

    def about(self, event: str) -> dict[str, Any]:
        """Returns the ``extra`` of a log record."""
        request = self.request
        return about_event(
            event, alias=self.using, name=request.name, template=request.template or request.name,
            task=task_of(self.message),
        )  # fmt: skip
