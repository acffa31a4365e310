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

    ``fence``: the number of its creation; in the order of places, these numbers grow. ``until``: when its TTL ends, on
    ``clock()``; inf while it waits. ``has_rest``: a rest was written with its grant. ``unwritten``: data about the
    holder that must still be written to its node.
    """

    is_held = False
    until = inf
    has_rest = False
    unwritten: bytes | None = None
    events = 0  # from its watches
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
        """A request with which to release it if its own request is gone."""
        return LockRequest(self.name, self.ttl, self.holder, self.token, prefix=self.prefix)

    def wait_for(self, request: LockRequest, on_gone: Callable[[str], object]) -> None:
        """Wake that request from now on. ``on_gone``: gets the token when nothing refers to the request any more."""
        token = self.token
        self._waiter = ref(request, lambda _: on_gone(token))

    @property
    def is_orphan(self) -> bool:
        """Whether nobody waits for it, and nobody has it."""
        return not self.is_held and self._waiter() is None

    def note_event(self, event: object = None) -> None:
        """A watched node has changed, or is no longer watched because the connection was lost."""
        self.events += 1
        self._seen = None
        if waiter := self._waiter():
            waiter.event.set()

    def remember(self, info: LockInfo, events: int) -> None:
        """Keep the answer until an event comes. ``events``: how many had come when it was asked for."""
        self._seen, self._seen_at = info, clock()
        if self.events != events:
            self._seen = None

    def recall(self, longest: float) -> LockInfo | None:
        """The answer of at most ``longest`` seconds ago if it still stands, without asking the store."""
        seen, now = self._seen, clock()
        remaining = -inf if seen is None else seen.remaining - (now - self._seen_at)
        if seen is None or remaining <= 0 or now - self._seen_at > longest or self.session.is_suspended:
            return None
        return seen._replace(remaining=remaining)


class Places:
    """The places by token. A forked child has none, because the nodes belong to the parent."""

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
        """None also if its session, and the place with it, is over."""
        place = self._places.get(token)
        return None if place is None or place.session.is_over else place

    def take(self, token: str) -> OwnPlace | None:
        """Call it before the node is deleted, or when it is gone. Of two callers at once, only one gets the place."""
        return self._places.pop(token, None)

    def held(self) -> list[OwnPlace]:
        return [place for place in self if place.is_held]
