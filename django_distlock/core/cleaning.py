"""Releases in the background, for callers that were interrupted or failed, and of locks handed to unknown tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ..exceptions import LockBackendError
from ..types import LockRequest
from ..utils.clock import clock
from ..utils.drive import Call, Steps, drive
from ..utils.threads import Worker
from .events import about_request
from .local_queue import LocalQueue

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend

logger = logging.getLogger("django_distlock")


class PendingRelease:
    """A release that is tried until its TTL has freed the lock anyway.

    ``until`` is inf if no TTL does that: such a release is tried until the store has made or finally refused it.
    ``on_released`` is called once the store says that it has freed the lock.
    """

    def __init__(
        self, request: LockRequest, cooldown_until: float, until: float, on_released: Callable[[], None] | None
    ) -> None:
        self.request = request
        self.on_released = on_released
        self.cooldown_until = cooldown_until
        self.until = until
        self.told = False

    @property
    def cooldown(self) -> float:
        return max(0.0, self.cooldown_until - clock())


class Cleaner:
    """Releases in the background, in a thread of its own, so that renewal never waits for it."""

    def __init__(self, backend: BaseLockBackend, queue: LocalQueue) -> None:
        self._backend, self._queue = backend, queue
        self._pending: dict[str, PendingRelease] = {}
        self._worker = Worker(f"distlock-cleaning-{backend.alias}", self.release)

    def add(self, request: LockRequest, cooldown: float, on_released: Callable[[], None] | None) -> None:
        now = clock()
        until = inf if self._backend.has_sessions else now + request.retires_for
        pending = PendingRelease(request, now + cooldown, until, on_released)
        if not request.is_offer:
            self._pending[request.token] = pending
        elif self._pending.setdefault(request.token, pending) is not pending:
            return  # the entry that is there gives back more
        self._worker.nudge()

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def left(self) -> list[tuple[LockRequest, float]]:
        """The requests that are not released yet, and the cooldown that each has left."""
        return [(pending.request, pending.cooldown) for pending in list(self._pending.values())]

    def forget(self) -> None:
        """In a forked child: the parent makes its own releases."""
        self._pending.clear()

    def _done(self, token: str, pending: PendingRelease) -> None:
        """It is done; but another release may have replaced it meanwhile, and an offer may come at any moment."""
        replaced = self._pending.pop(token, pending)
        if replaced is not pending and self._pending.setdefault(token, replaced).request.is_offer:
            self._pending[token] = replaced

    def release(self) -> float | None:
        """The work of its thread."""
        return drive(self.steps(), self._backend)

    def steps(self) -> Steps[float | None]:
        """Try each once. Returns when the rest is tried again, on ``clock()``."""
        waiting = self._pending.copy().items()  # a copy is made in one step: others may add some meanwhile
        # Last: those at a part of the store that does not answer.
        for token, pending in sorted(waiting, key=lambda item: item[1].told):
            if token not in self._pending:
                continue
            name, began = pending.request.name, clock()
            try:
                released = yield Call("release", (pending.request, pending.cooldown))
                if released and pending.on_released:
                    pending.on_released()
            except LockBackendError as error:
                if began < pending.until and not (error.is_final and pending.until == inf):
                    if error.was_asked and not pending.told:
                        about = about_request("release-failed", self._backend.alias, pending.request)
                        text = "Lock %r could not be released; the release is tried again: %s"
                        logger.warning(text, name, error, extra=about)
                    pending.told = True
                    if clock() - began > self._backend.timing.prompt_failure:
                        break
                    continue
                about = about_request("release-given-up", self._backend.alias, pending.request)
                freed = "the end of its session frees it" if pending.until == inf else "its TTL has freed it"
                logger.error("Lock %r could not be released; %s: %s", name, freed, error, extra=about)
            self._done(token, pending)
            self._queue.wake_first(pending.request.key)
        return clock() + self._backend.timing.retry_delay if self._pending else None
