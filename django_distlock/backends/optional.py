"""Parts of the contract that not every store has. A backend inherits them in addition to ``BaseLockBackend``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from ..runs import LastRun
from ..types import Grant, LockInfo, LockRequest


class JournalBackend(ABC):
    """Keeps what happened to locks lately, if JOURNAL is set. Without twins: a thread writes, operators read.

    A store that keeps a journal inherits it in addition to ``BaseLockBackend``.
    """

    alias: str

    @abstractmethod
    def write_journal(self, entries: Sequence[str]) -> None:
        """Add entries, and drop all but the last ``journal_length``. Raises LockBackendError; some may be added then.

        ``entries``: texts of JournalEntry, at most ``journal_length``.
        """

    @abstractmethod
    def read_journal(self) -> list[str]:
        """The entries, in no certain order. An entry may be there twice."""


class RunsBackend(ABC):
    """Keeps the runs of beat's entries. Without twins, because beat has no event loop.

    A store that keeps runs inherits it in addition to ``BaseLockBackend``.
    """

    grace = 5.0  # seconds, above what a beat needs to notice that the store lost its data
    runs_ahead = 60.0  # seconds at most that the clock of a beat may be ahead of the store's

    @abstractmethod
    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float) -> LastRun | None:
        """Move the stamp of an entry from ``seen`` to ``now``, in one step of the store; None if it is moved.

        It is moved if it is not newer than ``seen``, or if it has the token of ``now``. In this case an earlier
        attempt, whose answer was lost, has moved it. A stamp never becomes older, so ``now`` may be ``seen`` itself, to
        tell the store what the caller knows. The stamp is kept for ``ttl`` seconds.

        Otherwise the stamp that stands is returned, for example a newer one if another beat ran the entry. A store
        without a stamp keeps ``seen``. Because it may have lost a newer one, it then gives no run of that entry to
        anybody for ``grace`` seconds, in which all beats tell it what they know.

        Raises UnreadableRun if the value is not a stamp, which stays as it is. Raises ClockIsAhead if ``now`` is more
        than ``runs_ahead`` seconds ahead of the store's clock, because the other beats would wait until then.
        """

    @abstractmethod
    def find_runs(self, names: Sequence[str]) -> list[LastRun | None]:
        """The stamp of each entry; None if there is none, or if it cannot be read."""

    @abstractmethod
    def forget_run(self, name: str) -> bool:
        """Delete the stamp of an entry, also one that cannot be read. Returns whether there was one."""

    @abstractmethod
    def runs(self) -> Iterator[tuple[str, LastRun]]:
        """All entries with a stamp, each once, in no order. A stamp that cannot be read is logged as an error."""


class ExchangeBackend(ABC):
    """A store that lets one lease follow on another without a moment in which the lock is free.

    Without twins, because Celery has no event loop. A store that can do this inherits it in addition to
    ``BaseLockBackend``.
    """

    @abstractmethod
    def exchange(self, old: LockRequest, request: LockRequest) -> Grant | LockInfo:
        """End the lease of ``old`` and grant its slot to the request, in one step of the store.

        Nobody comes in between, also if others wait for the lock. The new lease has a new number, and the holder and
        the TTL of the request. If ``old`` does not hold the lock, this is ``acquire(request, queue=False)``. It may be
        repeated in the same way: if an earlier attempt was granted without an answer, it is granted again, and a
        release of the request gives it back.

        If ``old`` is in doubt, its token is retired, so that a command of it that arrives late is granted nothing.
        """
