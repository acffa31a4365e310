"""Where requests end whose callers could not end them: interrupted, cancelled, or before a store that was away."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from .backends.base import BaseLockBackend
from .exceptions import LockBackendError
from .types import Ticket
from .utils.clock import clock
from .utils.threads import RETRY, Worker

logger = logging.getLogger("django_distlock")

PROMPT = 0.1  # a store that refuses sooner is there; of one that needs longer, the others need not be asked too


@dataclass(slots=True)
class Abandoned:
    """Released until its TTL has freed it anyway."""

    ticket: Ticket
    free_at: float  # when its min_hold is over
    until: float
    told: bool = False

    @property
    def rest(self) -> float:
        return max(0.0, self.free_at - clock())


class Cleaner:
    """Releases what was abandoned at one backend. In a thread of its own, so that renewal never waits for it."""

    def __init__(self, backend: BaseLockBackend) -> None:
        self._backend = backend
        self._abandoned: dict[str, Abandoned] = {}
        self._worker = Worker(f"distlock-cleaning-{backend.alias}", self._release)

    def add(self, ticket: Ticket, rest: float, until: float) -> None:
        if ticket.is_offer and ticket.token in self._abandoned:
            return  # what is there gives back more
        self._abandoned[ticket.token] = Abandoned(ticket, clock() + rest, until)
        self._worker.nudge()

    @property
    def is_busy(self) -> bool:
        return bool(self._abandoned)

    def left(self) -> list[tuple[Ticket, float]]:
        """What is not released yet, and how long each is still to rest."""
        return [(abandoned.ticket, abandoned.rest) for abandoned in list(self._abandoned.values())]

    def forget(self) -> None:
        """In a forked child: the parent releases what was abandoned there."""
        self._abandoned.clear()

    def _release(self) -> float | None:
        waiting = list(self._abandoned.items())
        waiting.sort(key=lambda item: item[1].told)  # those at a part of the store that does not answer come last
        for token, abandoned in waiting:
            if token not in self._abandoned:
                continue
            name, began = abandoned.ticket.name, clock()
            try:
                self._backend.release(abandoned.ticket, abandoned.rest)
            except LockBackendError as error:
                if began < abandoned.until:
                    if not abandoned.told:
                        logger.warning("Lock %r could not be given back and is tried again: %s", name, error)
                    abandoned.told = True
                    if clock() - began > PROMPT:
                        break
                    continue
                logger.error("Lock %r could not be given back; its TTL has freed it: %s", name, error)
            if self._abandoned.get(token) is abandoned:  # and was not given up once more meanwhile
                del self._abandoned[token]
        return clock() + RETRY if self._abandoned else None
