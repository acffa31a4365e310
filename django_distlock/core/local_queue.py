"""The waiters of one process: for each name one of them speaks to the store, the others stand behind it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..types import Ticket
from ..utils.clock import clock

SILENT = 3.0  # seconds after which a speaker that does nothing is passed over: its event loop is stuck or gone


class Lines:
    """By name, in the order of arrival, threads and tasks alike.

    A speaker that leaves without the lock bequeaths its place in the store's queue to the next one, so that
    a process keeps its turn while anybody in it waits.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # the garbage collector may end a wait while this very thread is inside
        self._lines: dict[str, deque[Ticket]] = {}

    def join(self, ticket: Ticket) -> None:
        with self._guard:
            self._lines.setdefault(ticket.name, deque()).append(ticket)

    def speaks(self, ticket: Ticket) -> bool:
        """Whether it is this one's turn to speak to the store."""
        with self._guard:
            ticket.heard_at = clock()
            return _first_heard(self._lines[ticket.name]) is ticket

    def asks(self, ticket: Ticket) -> None:
        """From now on, until it waits again, it inherits nothing: its attempt goes on with the token that it has."""
        with self._guard:
            ticket.asking = True

    def length(self, name: str) -> int:
        with self._guard:
            return len(self._lines.get(name, ()))

    def queued(self) -> list[Ticket]:
        """Those that have a place in the store."""
        with self._guard:
            return [ticket for line in self._lines.values() for ticket in line if ticket.inbox]

    def wake(self, name: str) -> None:
        """Let all look whether they may go on."""
        with self._guard:
            line = list(self._lines.get(name, ()))
        for ticket in line:
            ticket.bell.ring()

    def has_heir(self, ticket: Ticket) -> bool:
        with self._guard:
            return len(self._lines[ticket.name]) > 1

    def leave(self, ticket: Ticket, *, bequeath: bool, succeed: Callable[[Ticket], None], again: bool = False) -> None:
        """Wake who speaks next. ``succeed`` is told who goes on with the place in the store, if anybody does.

        ``again``: it was interrupted and has done an unknown part of this.
        """
        with self._guard:
            line = self._lines.get(ticket.name, deque())
            was_first = again or (bool(line) and line[0] is ticket)
            if ticket in line:
                line.remove(ticket)
            if not line:
                self._lines.pop(ticket.name, None)
                return
            first = _first_heard(line)
            # A process has one place, so not if the next one has its own; and not to one that is about to leave.
            if bequeath and ticket.inbox and not (ticket.is_bequeathed or first.inbox or first.unanswered):
                heir = next((one for one in line if not (one.asking or one.inbox or one.unanswered)), None)
                if heir:
                    heir.inherit(ticket)
            if ticket.is_bequeathed and (heir := next((one for one in line if one.token == ticket.token), None)):
                succeed(heir)
                heir.bell.ring()
            if was_first:
                first.bell.ring()


def _first_heard(line: deque[Ticket]) -> Ticket:
    """Puts silent ones behind; they keep their own places in the store."""
    now = clock()
    for _ in range(len(line)):
        if now - line[0].heard_at <= SILENT:
            break
        line.rotate(-1)
    return line[0]
