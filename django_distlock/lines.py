"""The waiters of one process: for each name one of them speaks to the store, the others stand behind it."""

from __future__ import annotations

import threading
from collections import deque

from .tickets import Ticket, clock

SILENT = 3.0  # seconds after which a speaker that does nothing is passed over: its event loop is stuck or gone


class Line:
    __slots__ = ("heard_at", "tickets")

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self.heard_at = clock()  # when the first one last did something


class Lines:
    """By name, in the order of arrival, threads and tasks alike.

    A speaker that leaves without the lock bequeaths its place in the store's queue to the next one, so that
    a process keeps its turn while anybody in it waits.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._lines: dict[str, Line] = {}

    def join(self, ticket: Ticket) -> None:
        with self._guard:
            line = self._lines.get(ticket.name)
            if line is None:
                line = self._lines[ticket.name] = Line()
            line.tickets.append(ticket)

    def speaks(self, ticket: Ticket) -> bool:
        """Whether it is this one's turn to speak to the store."""
        with self._guard:
            line = self._lines[ticket.name]
            first = line.tickets[0]
            now = clock()
            if first is not ticket and now - line.heard_at > SILENT and line.tickets[1] is ticket:
                # The silent one keeps its own place in the store and stands behind here.
                line.tickets.popleft()
                line.tickets.append(first)
                first = ticket
            if first is ticket:
                line.heard_at = now
            return first is ticket

    def has_heir(self, ticket: Ticket) -> bool:
        with self._guard:
            return len(self._lines[ticket.name].tickets) > 1

    def fail(self, ticket: Ticket, failure: Exception) -> None:
        """The store does not answer: the others would learn it one after another, each by a timeout of its own."""
        with self._guard:
            line = self._lines.get(ticket.name)
            others = [other for other in line.tickets if other is not ticket] if line and ticket in line.tickets else []
        for other in others:
            other.failure = failure
            other.bell.ring()

    def leave(self, ticket: Ticket, *, bequeath: bool) -> bool:
        """True when the place in the store went to the next one, who must not lose it."""
        with self._guard:
            line = self._lines[ticket.name]
            was_first = line.tickets[0] is ticket
            line.tickets.remove(ticket)
            if not line.tickets:
                del self._lines[ticket.name]
                return False
            if not was_first:
                return False
            line.heard_at = clock()
            heir = line.tickets[0]
            inherits = bequeath and bool(ticket.inbox) and not heir.inbox and not heir.unanswered
            if inherits:
                heir.inherit(ticket)
        heir.bell.ring()
        return inherits
