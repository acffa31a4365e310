"""Histories of the ZooKeeper backend."""

from __future__ import annotations

from django_distlock.backends.zookeeper import ZooKeeperBackend
from django_distlock.core.session_lease import SessionLease
from tests.support.history import RecordedLease, Recording


class RecordingZooKeeperBackend(Recording, ZooKeeperBackend):
    """In an ensemble."""


class RecordedSessionLease(RecordedLease, SessionLease):
    """Its deadline moves with each confirmation of its session, so it is told when its holder asks for it no more."""

    __slots__ = ()

    @property
    def deadline(self) -> float:
        return min(self._ttl_deadline, self._session.confirmed_until)

    def tell_deadline(self) -> None:
        self.journal.write("renewal", deadline=self.deadline, name=self.name, fence=self.fence)
