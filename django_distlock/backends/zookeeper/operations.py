"""Requests to the servers to take, release and renew locks, and the results from their answers. Without I/O.

The recipe is from ZooKeeper's documentation: each request for the lock has an ephemeral node with a number, and the
smallest one has the lock. The others watch the node right before their own. Any server may answer that a node has
become the smallest, not only the leader: nodes before it never come back, and that server had the node itself to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...grants import SessionGrant
from ...types import Crowded, Grant, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.drive import Steps
from . import requests as ask
from .errors import Interrupted
from .inspection import FoundRest, Inspection, Subject
from .names import Line, Place
from .places import OwnPlace
from .requests import Multi, refusal
from .values import Held, Rest

RENEWALS = 500  # nodes per check: fewer than the longest request has that a server accepts


class Attempt(NamedTuple):
    """An attempt to acquire. ``deadline``: on ``clock()``, for the answers."""

    request: LockRequest
    about: Subject
    queue: bool
    deadline: float

    @property
    def data(self) -> bytes:
        return Held(self.request.ttl, self.request.holder).to_bytes()


class Sight(NamedTuple):
    """The line at some moment after ``sent_at``. ``is_written``: its own node already says who holds the lock."""

    line: Line
    sent_at: float
    is_written: bool


class Operations(Inspection):
    """Operations on one lock, and the renewal of many."""

    # Acquire

    def acquire(self, request: LockRequest, queue: bool, deadline: float) -> Steps[Grant | LockInfo]:
        attempt = Attempt(request, self._subject(request), queue, deadline)
        place = self._places.get(request.token)
        if place is None and (request.in_doubt or not queue):
            line = yield from self._line(attempt.about.key, deadline, catches_up=request.in_doubt)
            if mine := line.of_token(request.token):
                place = yield from self._find(attempt, mine[0])
            elif not queue and (busy := (yield from self._standing(attempt.about, line, deadline))):
                return busy
        while True:
            if place is None:
                place, sight = yield from self._join(attempt)
            elif queue and not place.is_held and (busy := place.recall(self._upkeep.timing.watch_trusted)):
                return busy
            else:
                sight = yield from self._look_again(attempt, place)
            if (answer := (yield from self._decide(attempt, place, sight))) is not None:
                return answer
            place = self._places.get(request.token)

    def _join(self, attempt: Attempt) -> Steps[tuple[OwnPlace, Sight]]:
        """Stand in line as the last one."""
        request, key, deadline = attempt.request, attempt.about.key, attempt.deadline
        shard = self._tree.shard(key)
        create = ask.create_place(self._tree.new_place(key, request.token), attempt.data)
        answers = yield from self.ask([create, ask.children(shard)], deadline)
        if isinstance(answers.values[0], NoNodeError):
            yield from self.ask([ask.ensure(shard)], deadline)
            answers = yield from self.ask([create, ask.children(shard)], deadline)
        (path, stat), nodes = answers.values
        self.note_server_time(stat.ctime)
        found = Place.of(path.rpartition("/")[2])
        assert found
        place = OwnPlace(request, key, found, path, answers.session, stat.czxid)
        self._upkeep.add(place, request)
        return place, Sight(Line.of(key, nodes), answers.sent_at, is_written=True)

    def _find(self, attempt: Attempt, found: Place) -> Steps[OwnPlace | None]:
        """The place of an attempt whose answer was lost. None: it belongs to a session that is about to end."""
        request, key = attempt.request, attempt.about.key
        path = self._tree.place(key, found.node)
        answers = yield from self.ask([ask.read(path)], attempt.deadline)
        [value] = answers.values
        if isinstance(value, NoNodeError) or value[1].ephemeralOwner != answers.session.number:
            return None
        place = OwnPlace(request, key, found, path, answers.session, value[1].czxid)
        self._upkeep.add(place, request)
        return place

    def _look_again(self, attempt: Attempt, place: OwnPlace) -> Steps[Sight]:
        answers = yield from self.ask([ask.children(self._tree.shard(place.key))], attempt.deadline)
        return Sight(Line.of(place.key, answers.values[0]), answers.sent_at, is_written=False)

    def _decide(self, attempt: Attempt, place: OwnPlace, sight: Sight) -> Steps[Grant | LockInfo | None]:
        """What the line means for its own place. None: the place changed, so look again."""
        line, deadline = sight.line, attempt.deadline
        if place.session.is_over or place.place not in line.places:
            self._upkeep.forget(place)
            return None
        older = line.of_token(place.token)[0]
        if older != place.place:  # an earlier attempt had arrived after all
            is_own = yield from self._find(attempt, older)
            yield from self._delete(place.path if is_own else self._tree.place(place.key, older.node), deadline)
            return None
        rest = (yield from self._rest(place.key, deadline)) if line.rests and not place.is_held else None
        if line.first == place.place and (rest is None or rest.is_over):
            return (yield from self._take(attempt, place, sight, rest))
        is_crowded = attempt.queue and self._is_crowded(attempt, place, line, rest)
        if is_crowded or not attempt.queue:
            busy = yield from self._standing(attempt.about, line, deadline)
            if busy:
                self._places.take(place.token)
                yield from self._delete(place.path, deadline)
                attempt.request.inbox = attempt.request.place = ""
            return Crowded(*busy) if busy and is_crowded else busy
        return (yield from self._watch(attempt, place, line, rest))

    @staticmethod
    def _is_crowded(attempt: Attempt, place: OwnPlace, line: Line, rest: FoundRest | None) -> bool:
        if not (most := attempt.request.most_places):
            return False
        before, is_resting = line.places.index(place.place), rest is not None and not rest.is_over
        return most <= (before if is_resting else before - 1)  # else the first one has the lock and does not wait

    def _take(self, attempt: Attempt, place: OwnPlace, sight: Sight, over: FoundRest | None) -> Steps[Grant | None]:
        """It has the lock. Everything that belongs to the grant is written in one step. ``over``: an old rest."""
        request, session, sent_at = attempt.request, place.session, sight.sent_at
        path, changes = self._tree.rest(place.key), []
        if request.min_hold and not place.is_held:
            data = Rest(request.token, place.fence, request.min_hold, request.holder).to_bytes()
            changes.append(ask.write(path, data, over.version) if over else ask.create(path, data))
        elif over:
            changes.append(ask.delete(path, over.version))
        if changes:
            changes.append(ask.write(place.path, attempt.data))
            answers = yield from self.ask([Multi(changes)], attempt.deadline)
            if refusal(answers.values[0]):
                return None
            sent_at = answers.sent_at
        if session.is_about_to_end:
            self._client.reconnect()
            raise Interrupted("the session had to be confirmed first")
        if not (changes or sight.is_written):
            self._upkeep.write(place, attempt.data)
        ttl = min(request.ttl, session.timeout)
        self._upkeep.hold(place, sent_at + ttl, has_rest=place.has_rest or request.min_hold > 0)
        return SessionGrant(place.fence, sent_at, ttl, session)

    def _watch(self, attempt: Attempt, place: OwnPlace, line: Line, rest: FoundRest | None) -> Steps[LockInfo | None]:
        """Wait behind the rest, or behind others; it watches the place right before its own."""
        is_first, events = line.first == place.place, place.events
        before = None if is_first else line.before(place.place)
        path = self._tree.place(place.key, before.node) if before else self._tree.rest(place.key)
        [value] = (yield from self.ask([ask.read(path, place.note_event)], attempt.deadline)).values
        if isinstance(value, NoNodeError):
            return None
        if is_first and rest:
            info = self._of_rest(attempt.about, rest)
        else:  # the watch reports when that place goes; nobody knows it before
            known = value if before == line.first else None
            info = self._of_line(attempt.about, line, known)._replace(remaining=inf)
        place.remember(info, events)
        return info

    # Release

    def release(self, request: LockRequest, cooldown: float, force: bool, deadline: float) -> Steps[bool]:
        place = self._upkeep.take(request.token)
        if place is None or request.in_doubt or place.session.is_over:
            return (yield from self._release_found(request, cooldown, force, deadline))
        if cooldown and not place.has_rest:
            released = yield from self._rest_from_now(request, place.path, place.fence, cooldown, deadline)
        elif place.has_rest and not cooldown:
            changes = [ask.delete(place.path), ask.delete(self._tree.rest(place.key))]
            answers = yield from self.ask([Multi(changes)], deadline)
            released = not refusal(answers.values[0]) or (yield from self._delete(place.path, deadline))
        else:
            released = yield from self._delete(place.path, deadline)
        if not (released and place.is_held):
            return False
        if cooldown:
            self._upkeep.end_rest_later(place.key, place.token, cooldown)
        self._upkeep.note_freed(place)
        return True

    def _release_found(self, request: LockRequest, cooldown: float, force: bool, deadline: float) -> Steps[bool]:
        """Release for another process, or for an attempt whose answer was lost, which may have several places."""
        key = self._subject(request).key
        line = yield from self._line(key, deadline, catches_up=True)
        places, released = line.of_token(request.token), False
        for place in places:
            path, has_lock = self._tree.place(key, place.node), place == line.first
            if has_lock and cooldown and not line.rests:
                released = yield from self._rest_from_now(request, path, 0, cooldown, deadline)
            elif (yield from self._delete(path, deadline)) and has_lock:
                released = True
        rest = (yield from self._rest(key, deadline)) if line.rests else None
        if rest is None or rest.rest.token != request.token:
            return released
        # If it was written with a grant whose answer was lost, it ends with the grant.
        if force or ((places or request.in_doubt) and not cooldown):
            [answer] = (yield from self.ask([ask.delete(self._tree.rest(key), rest.version)], deadline)).values
            return not isinstance(answer, Exception)
        return True

    def _rest_from_now(
        self, request: LockRequest, path: str, fence: int, cooldown: float, deadline: float
    ) -> Steps[bool]:
        """Delete the place in the step in which the cooldown begins. False: it was gone."""
        data = Rest(request.token, fence, cooldown, request.holder).to_bytes()
        rest = self._tree.rest(self._subject(request).key)
        for change in (ask.create(rest, data), ask.write(rest, data)):  # an old rest may still be there
            answers = yield from self.ask([Multi([ask.delete(path), change])], deadline)
            refused = refusal(answers.values[0])
            if refused is None or refused[0] == 0:
                return refused is None
        return (yield from self._delete(path, deadline))

    def _delete(self, path: str, deadline: float) -> Steps[bool]:
        """Delete the node. Returns whether it was there."""
        [answer] = (yield from self.ask([ask.delete(path)], deadline)).values
        return not isinstance(answer, NoNodeError)

    # Renew

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], deadline: float) -> Steps[list[bool | None]]:
        now, renewed = clock(), set()
        found = [(request.token, self._places.get(request.token), ttl) for request, ttl in wanted]
        held = [(place, ttl) for _, place, ttl in found if place and place.is_held and now < place.until]
        for start in range(0, len(held), RENEWALS):
            batch = held[start : start + RENEWALS]
            sent_at, there = yield from self._check([place for place, _ in batch], deadline)
            for place, ttl in batch:
                if place in there:
                    place.until = max(place.until, sent_at + ttl)
                    renewed.add(place.token)
        return [token in renewed for token, _, _ in found]

    def _check(self, places: Sequence[OwnPlace], deadline: float) -> Steps[tuple[float, set[OwnPlace]]]:
        """Returns when the existing places were asked for, and which places these are."""
        left = list(places)
        while True:
            answers = yield from self.ask([Multi([ask.check(place.path) for place in left])], deadline)
            refused = refusal(answers.values[0])
            if refused is None:
                return answers.sent_at, set(left)
            stats = (yield from self.ask([ask.stat(place.path) for place in left], deadline)).values
            gone = [place for place, stat in zip(left, stats, strict=True) if stat is None]
            gone = gone or [left[refused[0]]]  # the server that answers had not heard of it yet
            for place in gone:
                self._upkeep.forget(place)
            left = [place for place in left if place not in gone]
            if not left:
                return answers.sent_at, set()
