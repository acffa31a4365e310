"""Writes the journal of a backend. No caller that acquires or releases a lock waits for it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from math import isinf
from typing import TYPE_CHECKING

from ..exceptions import LockBackendError
from ..journal import GRANTED, RELEASED, Event, JournalEntry
from ..types import LockRequest, digest
from ..utils import fork
from ..utils.clock import clock, wall_clock
from ..utils.events import about_event
from ..utils.threads import Worker

if TYPE_CHECKING:
    from ..backends.optional import JournalBackend

INTERVAL = 0.25  # seconds between two writes: the events between them are written together
MOST_NOTED = 250  # events between two writes: more would not stay in the caches of a processor

Noted = tuple[float, Event, LockRequest, float, int, str]  # when, what, of whom, since when, fencing number, text

logger = logging.getLogger("django_distlock")


class JournalWriter:
    """Takes note of events, and lets a thread write them.

    A journal keeps only the latest events. So if more happen between two writes than it keeps, the others are not even
    written, and a very busy process pays little more than another one.
    """

    GRANTED, RELEASED = GRANTED, RELEASED

    def __init__(self, backend: JournalBackend, most: int) -> None:
        self._backend = backend
        self._noted: deque[Noted] = deque(maxlen=min(most, MOST_NOTED))
        self._name = f"distlock-journal-{backend.alias}"
        self._worker = Worker(self._name, self.write, on_refusal=self._on_refusal)
        self._begin_anew()
        fork.in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        """In a forked child: the parent writes what the parent has noted."""
        self._noted.clear()
        self._is_due = False  # whether the thread knows that there is something
        self._is_failing = self._is_refused = False

    @property
    def unwritten(self) -> int:
        """How many noted events are not in the journal yet."""
        return len(self._noted)

    def note(self, event: Event, request: LockRequest, since: float, fence: int = 0, text: str = "") -> None:
        """``since``: on ``clock()``, when the lock was requested or granted. Pass a copy of a request that waits.

        Otherwise the note would keep the request alive, and its caller would seem to wait.
        """
        self._noted.append((wall_clock(), event, request, since, fence, text))
        if not self._is_due:
            self._is_due = True
            self._worker.nudge()

    def write(self) -> float | None:
        """The work of its thread. Returns when to do it again, on ``clock()``; None: when something is noted."""
        self._is_refused = False
        if not self._noted:
            self._is_due = False
            if not self._noted:  # else something was noted just now
                return None
            self._is_due = True
        self._write()
        return clock() + INTERVAL

    def _on_refusal(self, error: RuntimeError) -> None:
        """The next event asks for the thread again. The error is logged once, until a thread runs."""
        self._is_due = False
        if not self._is_refused:
            about = about_event("thread-refused", thread=self._name)
            logger.error("The thread %s cannot be started", self._name, exc_info=error, extra=about)
        self._is_refused = True

    def write_last(self) -> None:
        """At the exit of the process. A store that failed before is not asked again."""
        if self._noted and not self._is_failing:
            self._write()

    def _write(self) -> None:
        wall_ahead = wall_clock() - clock()
        entries = [self._entry(*noted, wall_ahead).to_text() for noted in self._taken()]
        if not entries:
            return
        try:
            self._backend.write_journal(entries)
        except LockBackendError as error:
            if not self._is_failing:
                about = about_event("journal-failed", alias=self._backend.alias)
                text = "The journal of %r is not written until its store takes it again: %s"
                logger.warning(text, self._backend.alias, error, extra=about)
            self._is_failing = True
        else:
            self._is_failing = False

    def _taken(self) -> Iterator[Noted]:
        """The events that are noted now."""
        with suppress(IndexError):  # the thread, and the thread that ends the process, may both write
            for _ in range(len(self._noted)):
                yield self._noted.popleft()

    @staticmethod
    def _entry(
        at: float, event: Event, request: LockRequest, since: float, fence: int, text: str, wall_ahead: float
    ) -> JournalEntry:
        """``wall_ahead``: by how much the wall clock is ahead of ``clock()``."""
        seconds = request.deadline - since if event is Event.WAITS else at - (since + wall_ahead)
        return JournalEntry(
            at, event, request.name, digest(request.token), request.holder, fence, request.ttl,
            None if isinf(seconds) else seconds, text, request.prefix,
        )  # fmt: skip
