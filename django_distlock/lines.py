"""The waiters of one process: for each name one of them speaks to the store, the others stand behind it."""

from __future__ import annotations

import threading
from collections import deque

from .tickets import Ticket, clock

SILENT = 3.0  # seconds after which a speaker that does nothing is passed over: its event loop is stuck or gone


class Lines:
    """By name, in the order of arrival, threads and tasks alike.

    A speaker that leaves without the lock bequeaths its place in the store's queue to the next one, so that
    a process keeps its turn while anybody in it waits.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # the garbage collector may end a wait while this very thread is inside
        self._lines: dict[str, deque[Ticket]] = {}
        self._alone: dict[str, Ticket] = {}

    def goes_ahead(self, ticket: Ticket) -> bool:
        """Whether nobody else here asks for the lock, so that this one may try without a line, until ``tried()``."""
        return ticket.name not in self._lines and self._alone.setdefault(ticket.name, ticket) is ticket

    def tried(self, ticket: Ticket) -> None:
        del self._alone[ticket.name]

    def join(self, ticket: Ticket) -> None:
        with self._guard:
            self._lines.setdefault(ticket.name, deque()).append(ticket)

    def speaks(self, ticket: Ticket) -> bool:
        """Whether it is this one's turn to speak to the store."""
        with self._guard:
            ticket.heard_at = clock()
            return _first_heard(self._lines[ticket.name]) is ticket

    def length(self, name: str) -> int:
        with self._guard:
            return len(self._lines.get(name, ()))

    def wake(self, name: str) -> None:
        """Let all look whether they may go on."""
        with self._guard:
            line = list(self._lines.get(name, ()))
        for ticket in line:
            ticket.bell.ring()

    def has_heir(self, ticket: Ticket) -> bool:
        with self._guard:
            return len(self._lines[ticket.name]) > 1

    def fail(self, ticket: Ticket, failure: Exception) -> None:
        """The store does not answer: the others would learn it one after another, each by a timeout of its own."""
        with self._guard:
            line = self._lines.get(ticket.name, ())
            others = [other for other in line if other is not ticket] if ticket in line else []
        for other in others:
            other.failure = failure
            other.bell.ring()

    def leave(self, ticket: Ticket, *, bequeath: bool) -> tuple[Ticket | None, bool]:
        """Who speaks next, to be woken, and whether the place in the store went to it."""
        with self._guard:
            line = self._lines.get(ticket.name, deque())
            if ticket not in line:
                return None, False  # interrupted before it had joined
            was_first = line[0] is ticket
            line.remove(ticket)
            if not line:
                del self._lines[ticket.name]
                return None, False
            if not was_first:
                return None, False
            heir = _first_heard(line)
            # Not to one that has a place, or may get one just now.
            inherits = bequeath and bool(ticket.inbox) and not (heir.inbox or heir.unanswered or heir.asking)
            if inherits:
                heir.inherit(ticket)
        return heir, inherits


def _first_heard(line: deque[Ticket]) -> Ticket:
    """Puts silent ones behind; they keep their own places in the store."""
    now = clock()
    for _ in range(len(line)):
        if now - line[0].heard_at <= SILENT:
            break
        line.rotate(-1)
    return line[0]
