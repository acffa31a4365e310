"""What a process has for one alias. Made when the alias is first used, so that other processes start sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .local_queue import LocalQueue
from .renewal import Renewer, mark_lost

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend
    from ..backends.optional import JournalBackend


class Service:
    """What a process has for one alias: the backend, the renewer of its leases, and the queue of its waiters."""

    __slots__ = ("ask_prefix", "backend", "journal", "queue", "renewer")

    def __init__(self, backend: BaseLockBackend) -> None:
        self.backend = backend
        self.ask_prefix = backend.ask_prefix
        self.queue = LocalQueue(backend.timing, backend.succeed)
        self.journal = None
        if backend.journal_length:
            from .journal_writer import JournalWriter  # few processes need it

            self.journal = JournalWriter(cast("JournalBackend", backend), backend.journal_length)
        self.renewer = Renewer(backend, self.queue, self.journal)
        backend.on_orphan = self.renewer.release_in_background
        backend.template_of = self.renewer.template_of
        backend.on_loss = self._lose

    def _lose(self, token: str, reason: str) -> None:
        """The store says that a lease is over."""
        if lease := self.renewer.get(token):
            mark_lost(lease, reason)
