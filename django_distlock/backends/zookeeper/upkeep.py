"""The work of a process beside its calls: it confirms its session, and gives up places that nobody has any more."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Protocol

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...types import LockRequest
from ...utils import fork
from ...utils.clock import clock
from ...utils.threads import Worker
from ..common.timing import Timing
from . import requests as ask
from .client import Client
from .config import Config
from .confirmations import ZooKeeperSession
from .errors import INTERRUPTIONS
from .names import Tree
from .places import OwnPlace, Places
from .requests import Multi, refusal
from .values import Rest, Unreadable

CHECKED = 500  # nodes of one request
FEW = 1000
WATCHED = "watch"  # the inbox of a waiter, which a watch wakes
LOST_IN_TIME = "no server confirmed the session with ZooKeeper in time"
SESSION_OVER = "the session with ZooKeeper is over"
FREED = "somebody freed the lock: its node in ZooKeeper is gone"

logger = logging.getLogger("django_distlock")


class Owner(Protocol):
    """The backend, which informs others."""

    def lose(self, token: str, reason: str) -> None: ...
    def give_up(self, request: LockRequest) -> None: ...


class Upkeep:
    """One thread for all places of an alias. It does not wait for answers.

    While the session is open, it sends a request that the leader must commit each third of the timeout: a check of all
    held nodes, whatever their number. If there is no answer in time, it uses another connection. It gives up a lease
    whose TTL ends, because nobody else does that while the session lasts.
    """

    def __init__(self, alias: str, config: Config, tree: Tree, timing: Timing, owner: Owner) -> None:
        self.timing = timing
        self._tree, self._owner = tree, owner
        self.places = Places()
        self.client = Client(alias, config, self._note_change)
        self._worker = Worker(f"distlock-session-{alias}", self.work, lambda: bool(self.places.held()))
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._ends: list[tuple[float, str]] = []  # a heap: when the TTL of a held place may end, and its token
        self._new: deque[tuple[float, str]] = deque()  # when to look at places that got the lock, and their tokens
        self._sessions: dict[ZooKeeperSession, None] = {}  # of places
        self._orphans: deque[str] = deque()  # tokens of waiters that nothing refers to any more
        self._lost: deque[tuple[str, str]] = deque()  # tokens of leases that are over, and why
        self._rests: list[tuple[float, str, str]] = []  # a heap: when a rest may be over, its key and token
        self._checked_at = -inf  # when the last check was sent
        self._answered_at = -inf  # when the first answer to it came
        self._silent_since: float | None = None  # of the oldest check that is on its way
        self._has_changed = False  # whether the connection has changed since the last look
        self._is_closing = False

    # For operations, and from callbacks of kazoo

    def add(self, place: OwnPlace, request: LockRequest) -> None:
        """It waits for its turn."""
        place.wait_for(request, self._note_orphan)
        self._sessions[place.session] = None
        self.places.add(place)
        request.inbox, request.place = WATCHED, str(place.fence)
        self._worker.nudge(clock() + self.timing.idle_kept)

    def wake_instead(self, request: LockRequest) -> None:
        """Another waiter continues with a place."""
        if place := self.places.get(request.token):
            place.wait_for(request, self._note_orphan)

    def hold(self, place: OwnPlace, until: float, *, has_rest: bool) -> None:
        """It has the lock. ``until``: on ``clock()``, unless it is renewed."""
        place.until, place.has_rest = max(until, place.until if place.is_held else -inf), has_rest
        due = min(place.until, clock() + self.timing.watch_after)
        if not place.is_held:
            place.is_held = True
            self._new.append((due, place.token))
        self._worker.nudge(due)

    def write(self, place: OwnPlace, data: bytes) -> None:
        """Write into its node who has the lock. This is for people, so nobody waits for it; most places go before."""
        place.unwritten = data
        if place.is_held:
            self._write(place)

    def take(self, token: str) -> OwnPlace | None:
        """It is about to be released."""
        return self.places.take(token)

    def forget(self, place: OwnPlace) -> None:
        """Its node is gone."""
        if self.places.take(place.token) and place.is_held:
            self._note_loss(place.token, FREED)

    def note_freed(self, place: OwnPlace) -> None:
        """It was released, perhaps not by its holder: an operator may do so in this process."""
        self._owner.lose(place.token, FREED)

    def end_rest_later(self, key: str, token: str, seconds: float) -> None:
        heappush(self._rests, (clock() + seconds, key, token))
        self._worker.nudge(clock() + seconds)

    def close(self) -> None:
        """End the session when nobody has or waits for a lock."""
        self._is_closing = True
        if not self.places:
            self.client.close()
        self._worker.nudge()

    def _note_change(self) -> None:
        self._has_changed = True
        self._worker.nudge()

    def _note_orphan(self, token: str) -> None:
        """The garbage collector calls it, from anywhere."""
        self._orphans.append(token)
        self._worker.nudge()

    def _note_loss(self, token: str, reason: str) -> None:
        self._lost.append((token, reason))
        self._worker.nudge()

    def _note_own_event(self, token: str, event: Any) -> None:
        """The node was deleted, or is no longer watched."""
        place = self.places.get(token)
        if place is None or not place.is_held:
            return
        if event.type == "DELETED":
            self.forget(place)
        # Otherwise the connection was lost: when there is another one, all nodes are watched anew.

    # In the thread

    def work(self) -> float | None:
        """Do what is due. Returns when something is due again, on ``clock()``."""
        if self._has_changed:
            self._has_changed = False
            self._begin_connection()
        self._end_sessions()
        dues = [self._look_at_new(), self._end_leases()]
        self._tell()
        dues.append(self._end_rests())
        if self.client.is_open:
            dues += [self._close_if_idle(), self._confirm()]
        due = min(dues)
        return None if due == inf else due

    def _begin_connection(self) -> None:
        self._silent_since = None
        for place in self.places:
            if not place.is_held:
                place.note_event()
            elif self.client.is_connected:
                self._watch(place)
        if self.client.is_connected:
            self._checked_at = self._answered_at = -inf

    def _end_sessions(self) -> None:
        """Nobody may believe in leases of a session that may be over."""
        for session in list(self._sessions):
            is_over = session.is_over
            if not is_over and clock() < session.until:
                continue
            for place in self.places:
                if place.session is not session or not (is_over or place.is_held):
                    continue
                if place.is_held:
                    self._lost.append((place.token, SESSION_OVER if is_over else LOST_IN_TIME))
                if is_over:
                    self.places.take(place.token)
                    place.note_event()
                else:
                    self._give_up(place)
            if is_over:
                self._sessions.pop(session, None)

    def _look_at_new(self) -> float:
        """Returns when to look at the next one. Most are released before."""
        now = clock()
        while self._new and self._new[0][0] <= now:
            _, token = self._new.popleft()
            if (place := self.places.get(token)) and place.is_held:
                heappush(self._ends, (place.until, token))
                self._watch(place)
                self._write(place)
        return self._new[0][0] if self._new else inf

    def _end_leases(self) -> float:
        """Returns when the next one may end, by its TTL or with its session."""
        now = clock()
        while self._ends and self._ends[0][0] <= now:
            _, token = heappop(self._ends)
            place = self.places.get(token)
            if place is None or not place.is_held:
                continue
            if place.until > now:  # renewed meanwhile
                heappush(self._ends, (place.until, token))
            else:
                self._give_up(place)
        if len(self._ends) > 2 * len(self.places) + FEW:
            self._ends = [end for end in self._ends if self.places.get(end[1])]
            heapify(self._ends)
        while self._orphans:
            place = self.places.get(self._orphans.popleft())
            if place and place.is_orphan:
                self._give_up(place)
        if not self._ends:
            return inf
        return min(self._ends[0][0], *(session.until for session in list(self._sessions) if session.until > now), inf)

    def _give_up(self, place: OwnPlace) -> None:
        if self.places.take(place.token):
            self._owner.give_up(place.as_request())

    def _tell(self) -> None:
        while self._lost:
            self._owner.lose(*self._lost.popleft())

    def _close_if_idle(self) -> float:
        kept = self.timing.call_grace if self._is_closing else self.timing.idle_kept
        now = clock()
        if self.places:
            return now + kept
        if now < (due := self.client.used_at + kept):
            return due
        self.client.close()
        return inf

    def _confirm(self) -> float:
        """Returns when the next check is due, or is too late."""
        session, now = self.client.session, clock()
        if session is None or not self.client.is_connected:
            return inf
        if self._silent_since is not None:
            if now < (too_late := self._silent_since + session.timeout / 4):
                return too_late
            self._silent_since = None
            self.client.reconnect()
            return inf  # until the connection has changed
        # A check that is sent sooner after the last answer would not make that one count.
        due = max(self._checked_at + session.timeout / 3, self._answered_at + session.timeout / 4)
        if now < due:
            return due
        held = self.places.held()
        self._checked_at = self._silent_since = now
        for start in range(0, max(1, len(held)), CHECKED):
            batch = held[start : start + CHECKED]
            paths = [place.path for place in batch] or [self._tree.root]
            if not self.client.post(Multi([ask.check(path) for path in paths]), partial(self._note_check, batch)):
                return inf
        return now + session.timeout / 4

    def _note_check(self, batch: list[OwnPlace], sent_at: float, value: Any) -> None:
        if isinstance(value, INTERRUPTIONS):
            return
        if self._silent_since is not None:
            self._silent_since, self._answered_at = None, clock()
        if isinstance(value, list) and refusal(value):
            for place in batch:
                self.client.post(ask.stat(place.path), partial(self._note_stat, place))

    def _note_stat(self, place: OwnPlace, sent_at: float, value: Any) -> None:
        if value is None:
            self.forget(place)

    def _write(self, place: OwnPlace) -> None:
        data, place.unwritten = place.unwritten, None
        if data is not None:
            self.client.post(ask.write(place.path, data), partial(self._note_own, place))

    def _watch(self, place: OwnPlace) -> None:
        """If there is no connection, this is done when there is one."""
        watch = ask.children_watched(place.path, partial(self._note_own_event, place.token))
        self.client.post(watch, partial(self._note_own, place))

    def _note_own(self, place: OwnPlace, sent_at: float, value: Any) -> None:
        if isinstance(value, NoNodeError):
            self.forget(place)

    def _end_rests(self) -> float:
        """Delete rests that this process left behind. Returns when the next one may be over."""
        while self._rests and self._rests[0][0] <= clock():
            if not self.client.is_connected:
                self.client.open()
                return inf  # until the connection has changed
            _, key, token = heappop(self._rests)
            self.client.post(ask.read(self._tree.rest(key)), partial(self._note_rest, key, token))
        return self._rests[0][0] if self._rests else inf

    def _note_rest(self, key: str, token: str, sent_at: float, value: Any) -> None:
        if isinstance(value, Exception):
            return  # it is gone; or the next caller for the lock finds it
        data, stat = value
        path, server_time = self._tree.rest(key), self.client.server_time
        try:
            rest = Rest.from_bytes(data, path)
        except Unreadable:
            return
        if rest.token != token or server_time is None:
            return
        remaining = stat.mtime / 1000 + rest.length - server_time
        if remaining > 0:
            self.end_rest_later(key, token, remaining)
        else:
            self.client.post(ask.delete(path, stat.version), lambda *_: None)
