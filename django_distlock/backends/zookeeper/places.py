"""The nodes of this process in the lines for locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from weakref import ref

from ...types import LockInfo, LockRequest
from ...utils import fork
from ...utils.clock import clock
from .confirmations import ZooKeeperSession
from .names import Place


def _nobody() -> None:
    return None


class OwnPlace:
    """One node of this process, which waits or has the lock.

    ``fence``: the number of its creation, by which nodes of a lock have the order of their places. ``until``: when its
    TTL ends, on ``clock()``; inf while it waits. ``has_rest``: a rest was written with its grant.
    ``unwritten``: what its node is yet to say of who has the lock.
    """

    is_held = False
    until = inf
    has_rest = False
    unwritten: bytes | None = None
    events = 0  # that came of what it watches
    _seen: LockInfo | None = None
    _seen_at = -inf

    def __init__(
        self, request: LockRequest, key: str, place: Place, path: str, session: ZooKeeperSession, fence: int
    ) -> None:
        self.name, self.prefix, self.key, self.token = request.name, request.prefix, key, request.token
        self.ttl, self.holder = request.ttl, request.holder
        self.place, self.path, self.session, self.fence = place, path, session, fence
        self._waiter: Callable[[], LockRequest | None] = _nobody

    def as_request(self) -> LockRequest:
        """For whoever releases it, where its own request is gone."""
        return LockRequest(self.name, self.ttl, self.holder, self.token, prefix=self.prefix)

    def wait_for(self, request: LockRequest, on_gone: Callable[[str], object]) -> None:
        """Wake that request. ``on_gone``: told the token where nothing refers to the request any more."""
        token = self.token
        self._waiter = ref(request, lambda _: on_gone(token))

    @property
    def is_orphan(self) -> bool:
        """Whether nobody waits for it, and nobody has it."""
        return not self.is_held and self._waiter() is None

    def note_event(self, event: object = None) -> None:
        """Something that it watches has changed, or is watched no more, because the connection was lost."""
        self.events += 1
        self._seen = None
        if waiter := self._waiter():
            waiter.event.set()

    def remember(self, info: LockInfo, events: int) -> None:
        """What stands until an event comes. ``events``: as many had come when it was asked for."""
        self._seen, self._seen_at = info, clock()
        if self.events != events:
            self._seen = None

    def recall(self, longest: float) -> LockInfo | None:
        """What was seen ``longest`` seconds ago at most, if that still stands, without asking the store."""
        seen, now = self._seen, clock()
        remaining = -inf if seen is None else seen.remaining - (now - self._seen_at)
        if seen is None or remaining <= 0 or now - self._seen_at > longest or self.session.is_suspended:
            return None
        return seen._replace(remaining=remaining)


class Places:
    """By token. In a forked child there are none: those nodes are the parent's."""

    def __init__(self) -> None:
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._places: dict[str, OwnPlace] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[OwnPlace]:
        return iter(list(self._places.values()))

    def add(self, place: OwnPlace) -> None:
        self._places[place.token] = place

    def get(self, token: str) -> OwnPlace | None:
        """None also where its session is over, and it with that."""
        place = self._places.get(token)
        return None if place is None or place.session.is_over else place

    def take(self, token: str) -> OwnPlace | None:
        """Its node is about to be deleted, or gone. Of two who come at once, one gets it."""
        return self._places.pop(token, None)

    def held(self) -> list[OwnPlace]:
        return [place for place in self if place.is_held]
