"""The algorithm: what is sent to the nodes, round by round, and what follows from their answers. No I/O here."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ...exceptions import LockBackendError
from ...types import Grant, LockInfo, LockRequest
from ...utils.clock import clock
from ...utils.wakeup import WakeEvent
from ..redis.errors import is_wrong_type
from ..redis.scripts import Command, pack
from .messages import ACQUIRE, RELEASE, RENEW, Asked, Message, Round, Verdict, all_settled
from .quorum import FenceClock, Seen, Votes, fence_of, is_decided, is_final, is_known, majority_of

SCAN_STEP = 1000  # keys a node visits per SCAN: well below a millisecond

Explain = Callable[[Sequence[Exception | None]], LockBackendError]


class StaleConnections(Verdict):
    """No majority answered, but connections that had stood idle may be to blame: worth another try on new ones."""


class Rounds:
    """Requests to ``size`` nodes.

    ``explain`` makes the error from what each node failed with (None: it did not). ``abandon`` has a request
    released in the background, if it can.
    """

    def __init__(
        self, alias: str, prefix: str, size: int, explain: Explain, abandon: Callable[[LockRequest], bool]
    ) -> None:
        self.alias, self.prefix, self.size, self.explain, self.abandon = alias, prefix, size, explain, abandon
        self.majority = majority_of(size)
        self.numbers = FenceClock()
        # Messages of granted requests where not all nodes had answered by then.
        self._late: WeakKeyDictionary[LockRequest, Sequence[Asked]] = WeakKeyDictionary()
        self._pursued: WeakSet[LockRequest] = WeakSet()
        self._released: WeakSet[LockRequest] = WeakSet()

    # Acquire

    def acquire(self, request: LockRequest, last_try: bool) -> Generator[Round, list[Asked], Grant | LockInfo]:
        proposal, sent_at = self.numbers.propose(), clock()
        asked = yield self._to_all([self._acquire(request, proposal, "new")], is_decided)
        tally = Votes.of(asked)
        if tally.is_granted:
            numbers = list(tally.granted.values())
            self.numbers.saw(max(numbers))
            fence = fence_of(numbers, self.majority)
            if not is_known(fence, numbers, self.majority):
                told = yield self._to_all([self._acquire(request, fence, "keep")], is_decided)
                asked, tally = _latest(asked, told), Votes.of(told)
            if tally.is_granted:
                self._remember(request, asked)
                return Grant(fence, sent_at)
        if tally.is_down and not last_try and _may_have_faded(asked):
            request.in_doubt = True
            raise StaleConnections
        if not request.is_held:
            yield from self._undo(request, asked, tally)
        if tally.is_down:
            raise self.explain([tally.failed.get(node) for node in range(self.size)])
        return self._busy(request.name, tally)

    def _undo(self, request: LockRequest, asked: Sequence[Asked], tally: Votes) -> Generator[Round, list[Asked], None]:
        """Also where no answer came; on the same connections, so that it is executed behind the request."""
        doubtful = [one.was_sent and node not in tally.taken for node, one in enumerate(asked)]
        if not any(doubtful):
            return
        message = self._giving_back(request)

        def enough(undone: Sequence[Asked]) -> bool:
            return all(undone[node].is_settled for node in tally.granted)

        undone = yield Round(lambda node, _: message if doubtful[node] else None, enough)
        if any(there and not one.was_sent for there, one in zip(doubtful, undone, strict=True)):
            request.in_doubt = True  # its connection broke in between
        if request.in_doubt or not all(one.is_answered for one in undone):
            self._renounce(request)

    def _renounce(self, request: LockRequest) -> None:
        """Go on with another token: what is on its way for this one would undo another try, too."""
        if request.in_doubt and not self.abandon(replace(request, event=WakeEvent())):
            return
        request.anew()

    def _remember(self, request: LockRequest, asked: Sequence[Asked]) -> None:
        late = [one for one in asked if not one.is_answered]
        if late:
            self._late[request] = asked
            remedy = partial(self._giving_back, request)
            for one in late:
                one.remedy = remedy

    def _busy(self, name: str, tally: Votes) -> LockInfo:
        seen = Seen(self.size, free=len(tally.granted), failed=len(tally.failed))
        for left, lease in tally.taken.values():
            seen.add(self.alias, name, lease, left)
        if best := seen.best():
            return best
        error = self.foreign_value(name)
        refused = len(tally.taken) + sum(map(is_final, tally.failed.values()))
        error.is_final = refused > self.size - self.majority
        raise error

    def foreign_value(self, name: str) -> LockBackendError:
        return LockBackendError(
            f"The key {f'{self.prefix}:{name}'!r} on nodes of {self.alias!r} holds something that is no lock. Delete"
            f" it, or give the locks a prefix of their own in DISTRIBUTED_LOCKS[{self.alias!r}]['KEY_PREFIX']."
        )

    # Release

    def release(
        self, request: LockRequest, cooldown: float, last_try: bool, repeated: bool, *, force: bool = False
    ) -> Generator[Round, list[Asked], bool]:
        self._released.add(request)
        late = self._late.pop(request, None)
        plain = self._giving_back(request, cooldown, force=force)
        retiring = cache(partial(self._giving_back, request, cooldown, request.lasts, force=force))
        is_late = [bool(late and late[node].was_sent and not late[node].is_answered) for node in range(self.size)]

        def message(node: int, connection: object) -> Message:
            overtakes = late and is_late[node] and late[node].connection is not connection
            return retiring() if request.in_doubt or overtakes else plain

        def counted(asked: Sequence[Asked]) -> list[Any]:
            return [one.replies[0] for one in asked if one.is_answered]

        def enough(asked: Sequence[Asked]) -> bool:
            replies = counted(asked)
            return max(replies.count(1), replies.count(0)) >= self.majority or all_settled(asked)

        asked = yield Round(message, enough)
        replies = counted(asked)
        if replies.count(0) + replies.count(1) < self.majority:
            request.in_doubt = True
            raise self._no_majority(asked, last_try)
        if not cooldown and not force:
            if any((request.in_doubt or there) and one.hangs for there, one in zip(is_late, asked, strict=True)):
                self._pursue(request, asked)
            elif any(one.was_missed and (late is None or late[node].was_sent) for node, one in enumerate(asked)):
                self.abandon(replace(request, event=WakeEvent()))
        # While no majority has lost it, nobody else can have had the lock: nodes that failed stay away for a TTL.
        return repeated or replies.count(0) < self.majority

    def _pursue(self, request: LockRequest, asked: Sequence[Asked]) -> None:
        """A node that hangs may grant what it was asked for when it wakes up: tell it then that it is over."""
        if request in self._pursued:
            raise self._down(asked)  # to be repeated
        remainder = replace(request, in_doubt=True, event=WakeEvent())
        self._pursued.add(remainder)
        self.abandon(remainder)

    # Renew

    def renew(
        self, wanted: Sequence[tuple[LockRequest, float]], last_try: bool
    ) -> Generator[Round, list[Asked], list[bool | None]]:
        """True, False where the lease is gone, None where no majority says either.

        A node that lost the lease, because it was restarted or did not hear of it, is given it again while
        no majority has lost it: so a lease outlives restarts of all nodes, one after another.
        """
        commands = [RENEW.call(self._keys(request.name)[:1], request.token, _ms(ttl)) for request, ttl in wanted]
        asked = yield self._to_all(commands, all_settled)
        answered = [one for one in asked if one.is_answered and not all(map(_is_refusal, one.replies))]
        if len(answered) < self.majority:
            raise self._no_majority(asked, last_try)
        outcomes: list[bool | None] = []
        repairs: list[list[Command]] = [[] for _ in asked]
        repaired: list[tuple[int, int]] = []  # which lease, on which node
        for index, (request, ttl) in enumerate(wanted):
            replies = {node: one.replies[index] for node, one in enumerate(asked) if one.is_answered}
            kept = [int(reply) for reply in replies.values() if isinstance(reply, bytes)]
            lost = [node for node, reply in replies.items() if reply == 0]
            outcomes.append(True if len(kept) >= self.majority else False if len(lost) >= self.majority else None)
            if lost and kept and outcomes[-1] is not False:
                fence = fence_of(kept, self.majority)
                for node in lost:
                    repairs[node].append(self._acquire(request, fence, "keep", ttl))
                    repaired.append((index, node))
        if repaired:
            yield from self._repair(repairs, repaired, wanted, asked, outcomes)
        return outcomes

    def _repair(
        self,
        commands: Sequence[Sequence[Command]],
        repaired: Sequence[tuple[int, int]],
        wanted: Sequence[tuple[LockRequest, float]],
        asked: Sequence[Asked],
        outcomes: list[bool | None],
    ) -> Generator[Round, list[Asked], None]:
        given = yield Round(lambda node, _: Message.of(*commands[node]) if commands[node] else None, all_settled)
        answers = {node: iter(one.replies) for node, one in enumerate(given) if one.is_answered}
        again: dict[int, int] = {}
        for index, node in repaired:
            if node not in answers:
                wanted[index][0].in_doubt = True
                continue
            match next(answers[node]):
                case [1, _]:
                    again[index] = again.get(index, 0) + 1
        for index in {index for index, _ in repaired}:
            if (request := wanted[index][0]) in self._released:  # meanwhile: a node may have executed that before
                self.abandon(replace(request, in_doubt=True, event=WakeEvent()))
        for index, count in again.items():
            kept = sum(isinstance(one.replies[index], bytes) for one in asked if one.is_answered)
            if kept + count >= self.majority:
                outcomes[index] = True

    # Look and list

    def look(self, names: Sequence[str], last_try: bool) -> Generator[Round, list[Asked], list[Seen]]:
        keys = [self._keys(name)[0] for name in names]
        commands = [Command(pack(verb, key)) for key in keys for verb in ("GET", "PTTL")]
        asked = yield self._to_all(commands, all_settled)
        answered = [one.replies for one in asked if one.is_answered and not any(map(_is_refusal, one.replies))]
        if len(answered) < self.majority:
            raise self._no_majority(asked, last_try)
        found = []
        for index, name in enumerate(names):
            seen = Seen(self.size, failed=self.size - len(answered))
            for replies in answered:
                seen.add(self.alias, name, replies[2 * index], replies[2 * index + 1])
            found.append(seen)
        return found

    def info(self) -> Generator[Round, list[Asked], list[Asked]]:
        asked = yield self._to_all([Command(pack("INFO"))], all_settled)
        return asked

    def scan(self, listing: Listing, prefix: str, last_try: bool) -> Generator[Round, list[Asked], None]:
        """The next page of each node that is not through."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", f"{self.prefix}:{prefix}") + "*"

        def message(node: int, _: object) -> Message | None:
            if (cursor := listing.cursors[node]) is None:
                return None
            return Message.of(Command(pack("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_STEP)))

        asked = yield Round(message, all_settled)
        cursors: list[bytes | None] = [None] * self.size
        names: list[list[str]] = [[] for _ in asked]
        failures = dict(listing.failures)
        for node, one in enumerate(asked):
            if listing.cursors[node] is None:
                continue
            match one.replies[0] if one.is_answered else one.failure:
                case [bytes() as cursor, list() as keys]:
                    cursors[node] = None if cursor == b"0" else cursor
                    names[node].extend(self._names(keys))
                case Exception() as error:
                    failures[node] = error
        if len(failures) > self.size - self.majority:
            if not last_try and _may_have_faded(asked):
                raise StaleConnections
            raise self.explain([failures.get(node) for node in range(self.size)])
        listing.turn(cursors, names, failures)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        names = []
        for key in keys:
            try:
                names.append(key.decode().removeprefix(f"{self.prefix}:"))
            except UnicodeDecodeError:
                continue  # no lock has such a key
        return names

    # Of each request

    def _acquire(self, request: LockRequest, number: int, mode: str, ttl: float | None = None) -> Command:
        return ACQUIRE.call(
            self._keys(request.name), request.token, _ms(ttl or request.lasts), request.holder.to_text(), number, mode
        )  # fmt: skip

    def _keys(self, name: str) -> tuple[str, str, str]:
        """Lease, retired tokens, last fencing number. The kind stands before the name, so that none collide."""
        return f"{self.prefix}:{name}", f"{self.prefix}|x:{name}", f"{self.prefix}|f"

    def _to_all(self, commands: Sequence[Command], enough: Callable[[Sequence[Asked]], bool]) -> Round:
        message = Message.of(*commands)
        return Round(lambda node, connection: message, enough)

    def _giving_back(
        self, request: LockRequest, cooldown: float = 0.0, retire: float = 0.0, *, force: bool = False
    ) -> Message:
        keys = self._keys(request.name)[:2]
        return Message.of(RELEASE.call(keys, request.token, _ms(cooldown), _ms(retire), int(force)))

    def _no_majority(self, asked: Sequence[Asked], last_try: bool) -> Exception:
        return StaleConnections() if not last_try and _may_have_faded(asked) else self._down(asked)

    def _down(self, asked: Sequence[Asked]) -> LockBackendError:
        return self.explain([_failure(one) for one in asked])


def _may_have_faded(asked: Sequence[Asked]) -> bool:
    return any(one.failure and one.was_sent for one in asked)


def _failure(asked: Asked) -> Exception | None:
    if not asked.is_answered:
        return asked.failure  # None: the others decided before it answered
    return next((reply for reply in asked.replies if isinstance(reply, Exception)), None)


def _is_refusal(reply: object) -> bool:
    """Whether the node says nothing about the lease. A value of another type does: it is none."""
    return isinstance(reply, Exception) and not is_wrong_type(reply)


def _latest(asked: Sequence[Asked], again: Sequence[Asked]) -> list[Asked]:
    """Of two requests to each node the one whose answer is still to come, if there is one."""
    return [
        later if later.was_sent and not later.is_answered else earlier
        for earlier, later in zip(asked, again, strict=True)
    ]


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)


class Listing:
    """What was told until now. Locked is what a majority has, or may have because the others do not answer.

    ``cursors``: where each node goes on; None: it is through. ``failures``: by node; such a one is through, too.
    """

    def __init__(self, size: int, majority: int) -> None:
        self.cursors: list[bytes | None] = [b"0"] * size
        self.failures: dict[int, Exception] = {}
        self._majority = majority
        self._found: list[set[str]] = [set() for _ in range(size)]  # SCAN may tell a key twice

    @property
    def is_open(self) -> bool:
        return any(cursor is not None for cursor in self.cursors)

    def turn(self, cursors: list[bytes | None], names: Sequence[Sequence[str]], failures: dict[int, Exception]) -> None:
        self.cursors, self.failures = cursors, failures
        for found, told in zip(self._found, names, strict=True):
            found.update(told)

    @property
    def locked(self) -> list[str]:
        votes = Counter(name for node, found in enumerate(self._found) if node not in self.failures for name in found)
        return [name for name, count in votes.items() if count + len(self.failures) >= self._majority]
