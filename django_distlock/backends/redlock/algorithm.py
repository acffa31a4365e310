"""The algorithm: the messages to the nodes, fan-out by fan-out, and the results from the replies. No I/O here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ...exceptions import LockBackendError
from ...formats import NEWER
from ...types import Grant, LockInfo, LockRequest
from ...utils.clock import clock
from ..redis.errors import is_wrong_type
from ..redis.keys import LEASES, SCAN_STEP, Keys
from ..redis.scripts import Command, milliseconds, pack, packed_keys
from .messages import ACQUIRE, RELEASE, RENEW, Exchange, FanOut, Message, NodeSteps, StaleConnections, all_settled
from .quorum import FenceClock, Observation, Votes, fence_of, is_decided, is_final, is_known, majority_of

Explain = Callable[[Sequence[Exception | None]], LockBackendError]


class Redlock:
    """Operations on ``size`` nodes.

    ``explain``: makes the error from the failure of each node (None: it answered). ``release_in_background``: returns
    whether somebody will release the request.
    """

    def __init__(
        self, alias: str, keys: Keys, size: int, explain: Explain, release_in_background: Callable[[LockRequest], bool]
    ) -> None:
        self.alias, self.keys, self.size, self.explain = alias, keys, size, explain
        self._release_in_background = release_in_background
        self.majority = majority_of(size)
        self.fences = FenceClock()
        # By granted request: the last exchange with each node, if not all nodes had answered by then.
        self._late: WeakKeyDictionary[LockRequest, list[Exchange]] = WeakKeyDictionary()
        self._followed_up: WeakSet[LockRequest] = WeakSet()  # requests made for nodes that did not get a release
        self._released: WeakSet[LockRequest] = WeakSet()  # so that a later repair is undone
        self._repaired_late: WeakSet[LockRequest] = WeakSet()  # their repair may be undone before their own release

    # Acquire

    def acquire(self, request: LockRequest, last_try: bool) -> NodeSteps[Grant | LockInfo]:
        proposal, enough, sent_at = self.fences.propose(), is_decided, clock()
        if request.held_fence:
            proposal, enough = max(proposal, request.held_fence + 1), all_settled
        exchanges = yield self._to_all([self._acquire(request, proposal, "new")], enough)
        votes = Votes.of(exchanges)
        if votes.is_granted:
            numbers = list(votes.granted.values())
            self.fences.observe(max(numbers))
            # A new grant of a node has the proposed number, or a larger one.
            if request.held_fence and sum(number < proposal for number in numbers) >= self.majority:
                return Grant(request.held_fence, sent_at)
            fence = fence_of(numbers, self.majority)
            if not is_known(fence, numbers, self.majority):
                confirmed = yield self._to_all([self._acquire(request, fence, "keep")], is_decided)
                exchanges, votes = _latest(exchanges, confirmed), Votes.of(confirmed)
            if votes.is_granted:
                self._remember_late(request, exchanges)
                return Grant(fence, sent_at)
        if votes.is_down and not last_try and _may_be_stale(exchanges):
            request.in_doubt = True
            raise StaleConnections
        if not request.held_fence:
            yield from self._undo(request, exchanges, votes)
        if votes.is_down:
            raise self.explain([votes.failed.get(node) for node in range(self.size)])
        return self._busy(request, votes)

    def _undo(self, request: LockRequest, exchanges: Sequence[Exchange], votes: Votes) -> NodeSteps[None]:
        """Release it, also on nodes without an answer; on the same connections, to be executed after the request."""
        doubtful = [exchange.was_sent and node not in votes.taken for node, exchange in enumerate(exchanges)]
        if not any(doubtful):
            return
        message = self._release_message(request.key, request.token)

        def enough(undone: Sequence[Exchange]) -> bool:
            return all(undone[node].is_settled for node in votes.granted)

        undone = yield FanOut(lambda node, _: message if doubtful[node] else None, enough)
        if all(exchange.is_answered for exchange in undone) and not request.in_doubt:
            return
        if any(exchange.failure and (exchange.is_lost or not exchange.was_sent) for exchange in undone):
            request.in_doubt = True  # its connection broke in between
        given_back = request.copy()
        for exchange in undone:
            self._repeat_if_lost(exchange, given_back, in_doubt=True)
        self._change_token(request)

    def _change_token(self, request: LockRequest) -> None:
        """For the next try: a release of the old token that is under way would undo that, too."""
        if request.in_doubt and not self._release_in_background(request.copy()):
            return
        request.replace_token()

    def _remember_late(self, request: LockRequest, exchanges: list[Exchange]) -> None:
        late = [exchange for exchange in exchanges if not exchange.is_answered]
        if late:
            self._late[request] = exchanges
            undo_message = partial(self._release_message, request.key, request.token)  # does not keep the request alive
            for exchange in late:
                exchange.undo_message = undo_message

    def _busy(self, request: LockRequest, votes: Votes) -> LockInfo:
        observed = Observation(self.size, free=len(votes.granted), failed=len(votes.failed))
        for left, lease in votes.taken.values():
            observed.add(self.alias, request.name, lease, left)
        if best := observed.best():
            return best._replace(prefix=request.prefix)
        error = self.unreadable(request.key, observed)  # none of the copies was a lease
        refused = len(votes.taken) + sum(map(is_final, votes.failed.values()))
        error.is_final = refused > self.size - self.majority
        raise error

    def unreadable(self, lock: str, observed: Observation) -> LockBackendError:
        key = f"The key {self.keys.lease(lock)!r} on nodes of {self.alias!r}"
        if observed.is_newer:
            return LockBackendError(f"{key} {NEWER}.")
        return LockBackendError(
            f"{key} holds something that is no lock. Delete it, or give the locks a prefix of their own in"
            f" DISTRIBUTED_LOCKS[{self.alias!r}]['KEY_PREFIX']."
        )

    # Release

    def release(
        self, request: LockRequest, cooldown: float, last_try: bool, repeated: bool, *, force: bool = False
    ) -> NodeSteps[bool]:
        self._released.add(request)
        acquired = self._late.get(request)
        late = {node: one for node, one in enumerate(acquired or ()) if one.was_sent and not one.is_answered}
        plain = self._release_message(request.key, request.token, cooldown, force=force)

        def message(node: int, connection: object) -> Message:
            # On another connection, the release may arrive before the acquisition that was not answered.
            overtakes = node in late and late[node].connection is not connection
            if request.in_doubt or overtakes:
                return self._release_message(request.key, request.token, cooldown, request.retires_for, force=force)
            return plain

        def counted(exchanges: Sequence[Exchange]) -> list[Any]:
            return [exchange.replies[0] for exchange in exchanges if exchange.is_answered]

        def enough(exchanges: Sequence[Exchange]) -> bool:
            replies = counted(exchanges)
            return max(replies.count(1), replies.count(0)) >= self.majority or all_settled(exchanges)

        # A release for nodes that missed one waits for them, because no caller waits for it.
        exchanges = yield FanOut(message, all_settled if request in self._followed_up else enough)
        replies = counted(exchanges)
        if replies.count(0) + replies.count(1) < self.majority:
            request.in_doubt = True
            raise self._no_majority(exchanges, last_try)
        if not cooldown and not force:
            self._follow_up(request, exchanges, acquired, late)
        # While no majority has lost it, nobody else can have had the lock: nodes that failed stay away for a TTL.
        return repeated or replies.count(0) < self.majority or request in self._repaired_late

    def _follow_up(
        self,
        request: LockRequest,
        exchanges: Sequence[Exchange],
        acquired: Sequence[Exchange] | None,
        late: Mapping[int, Exchange],
    ) -> None:
        """Have a request released in the background on nodes that did not get the release, now or later.

        Not on nodes that were not asked to grant it. Its token is retired if a node may still grant it. If this release
        is itself such a release in the background, it has failed, so that it is repeated after a pause.
        """
        missed = [
            node
            for node, one in enumerate(exchanges)
            if one.may_reach_later and (request.in_doubt or acquired is None or acquired[node].was_sent)
        ]
        if missed and request in self._followed_up:
            raise self._down(exchanges)
        if missed:
            self._release_again(request, in_doubt=any(node in late for node in missed))
            return
        for node, one in enumerate(exchanges):
            self._repeat_if_lost(one, request, in_doubt=node in late)

    def _repeat_if_lost(self, exchange: Exchange, request: LockRequest, *, in_doubt: bool) -> None:
        """Have the release repeated if its connection breaks while it is still on its way."""
        if exchange.was_sent and not exchange.is_answered:
            exchange.on_lost = partial(self._release_again, request, in_doubt=in_doubt)

    def _release_again(self, request: LockRequest, *, in_doubt: bool) -> None:
        further = request.copy(in_doubt=request.in_doubt or in_doubt)
        self._followed_up.add(further)
        if acquired := self._late.get(request):
            self._late[further] = acquired
        self._release_in_background(further)

    # Renew

    def renew(self, wanted: Sequence[tuple[LockRequest, float]], last_try: bool) -> NodeSteps[list[bool | None]]:
        """True; False if the lease is gone; None if no majority says either.

        A node that lost the lease, because it was restarted or never got it, is given it again while no majority has
        lost it. So a lease survives restarts of all nodes, one after another.
        """
        commands = [
            RENEW.call(packed_keys(self.keys.lease(request.key)), request.token, milliseconds(ttl))
            for request, ttl in wanted
        ]
        exchanges = yield self._to_all(commands, all_settled)
        answered = [
            exchange for exchange in exchanges if exchange.is_answered and not all(map(_is_refusal, exchange.replies))
        ]
        if len(answered) < self.majority:
            raise self._no_majority(exchanges, last_try)
        outcomes: list[bool | None] = []
        repairs: list[list[Command]] = [[] for _ in exchanges]
        repaired: list[tuple[int, int]] = []  # which lease, on which node
        for index, (request, ttl) in enumerate(wanted):
            replies = {node: exchange.replies[index] for node, exchange in enumerate(exchanges) if exchange.is_answered}
            kept = [int(reply) for reply in replies.values() if isinstance(reply, bytes)]
            lost = [node for node, reply in replies.items() if reply == 0]
            outcomes.append(True if len(kept) >= self.majority else False if len(lost) >= self.majority else None)
            if lost and kept and outcomes[-1] is not False:
                fence = fence_of(kept, self.majority)
                for node in lost:
                    repairs[node].append(self._acquire(request, fence, "keep", ttl))
                    repaired.append((index, node))
        if repaired:
            yield from self._repair(repairs, repaired, wanted, exchanges, outcomes)
        return outcomes

    def _repair(
        self,
        commands: Sequence[Sequence[Command]],
        repaired: Sequence[tuple[int, int]],
        wanted: Sequence[tuple[LockRequest, float]],
        exchanges: Sequence[Exchange],
        outcomes: list[bool | None],
    ) -> NodeSteps[None]:
        repaired_on = yield FanOut(lambda node, _: Message.of(*commands[node]) if commands[node] else None, all_settled)
        answers = {node: iter(exchange.replies) for node, exchange in enumerate(repaired_on) if exchange.is_answered}
        repaired_copies: dict[int, int] = {}
        for index, node in repaired:
            if known := self._late.get(wanted[index][0]):
                known[node] = repaired_on[node]  # so that a release that does not arrive is repeated
            if node not in answers:
                wanted[index][0].in_doubt = True
                continue
            match next(answers[node]):
                case int(number) if number > 0:
                    repaired_copies[index] = repaired_copies.get(index, 0) + 1
        for index, count in repaired_copies.items():
            kept = sum(isinstance(exchange.replies[index], bytes) for exchange in exchanges if exchange.is_answered)
            if kept + count >= self.majority:
                outcomes[index] = True
        for index in {index for index, _ in repaired}:
            if (request := wanted[index][0]) in self._released:  # meanwhile: maybe before the repair
                if outcomes[index]:
                    self._repaired_late.add(request)
                self._release_in_background(request.copy(in_doubt=True))

    # Look and list

    def look(self, locks: Sequence[str], last_try: bool) -> NodeSteps[list[Observation]]:
        keys = map(self.keys.lease, locks)
        commands = [Command(pack(verb, key)) for key in keys for verb in ("GET", "PTTL")]
        exchanges = yield self._to_all(commands, all_settled)
        answered = [
            exchange.replies
            for exchange in exchanges
            if exchange.is_answered and not any(map(_is_refusal, exchange.replies))
        ]
        if len(answered) < self.majority:
            raise self._no_majority(exchanges, last_try)
        found = []
        for index, lock in enumerate(locks):
            observed = Observation(self.size, failed=self.size - len(answered))
            for replies in answered:
                observed.add(self.alias, lock, replies[2 * index], replies[2 * index + 1])
            found.append(observed)
        return found

    def info(self) -> NodeSteps[list[Exchange]]:
        exchanges = yield self._to_all([Command(pack("INFO"))], all_settled)
        return exchanges

    def scan(self, listing: MajorityListing, last_try: bool) -> NodeSteps[None]:
        """The next page of each node that has more."""

        def message(node: int, _: object) -> Message | None:
            if (cursor := listing.cursors[node]) is None:
                return None
            return Message.of(Command(pack("SCAN", cursor, "MATCH", listing.pattern, "COUNT", SCAN_STEP)))

        exchanges = yield FanOut(message, all_settled)
        cursors: list[bytes | None] = [None] * self.size
        names: list[list[str]] = [[] for _ in exchanges]
        failures = dict(listing.failures)
        for node, exchange in enumerate(exchanges):
            if listing.cursors[node] is None:
                continue
            match exchange.replies[0] if exchange.is_answered else exchange.failure:
                case [bytes() as cursor, list() as keys]:
                    cursors[node] = None if cursor == b"0" else cursor
                    names[node].extend(listing.names_in(keys))
                case Exception() as error:
                    failures[node] = error
        if len(failures) > self.size - self.majority:
            if not last_try and _may_be_stale(exchanges):
                raise StaleConnections
            raise self.explain([failures.get(node) for node in range(self.size)])
        listing.add_page(cursors, names, failures)

    # Of each request

    def _acquire(self, request: LockRequest, number: int, mode: str, ttl: float | None = None) -> Command:
        return ACQUIRE.call(
            packed_keys(*self._keys(request.key)),
            request.token, milliseconds(ttl or request.ttl), request.holder.to_text(), number, mode,
        )  # fmt: skip

    def _keys(self, lock: str) -> tuple[str, str, str]:
        """Lease, retired tokens, last fencing number."""
        lease, _, retired, counter, _ = self.keys.of_lock(lock)
        return lease, retired, counter

    def _to_all(self, commands: Sequence[Command], enough: Callable[[Sequence[Exchange]], bool]) -> FanOut:
        message = Message.of(*commands)
        return FanOut(lambda node, connection: message, enough)

    def _release_message(
        self, lock: str, token: str, cooldown: float = 0.0, retire: float = 0.0, *, force: bool = False
    ) -> Message:
        keys = packed_keys(*self._keys(lock)[:2])
        return Message.of(RELEASE.call(keys, token, milliseconds(cooldown), milliseconds(retire), int(force)))

    def _no_majority(self, exchanges: Sequence[Exchange], last_try: bool) -> Exception:
        return StaleConnections() if not last_try and _may_be_stale(exchanges) else self._down(exchanges)

    def _down(self, exchanges: Sequence[Exchange]) -> LockBackendError:
        return self.explain([_failure(exchange) for exchange in exchanges])


def _may_be_stale(exchanges: Sequence[Exchange]) -> bool:
    return any(exchange.failure and exchange.was_sent for exchange in exchanges)


def _failure(exchange: Exchange) -> Exception | None:
    if not exchange.is_answered:
        return exchange.failure  # None: the other nodes decided before it answered
    return next((reply for reply in exchange.replies if isinstance(reply, Exception)), None)


def _is_refusal(reply: object) -> bool:
    """Whether the reply says nothing about the lease. A value of another type says that there is none."""
    return isinstance(reply, Exception) and not is_wrong_type(reply)


def _latest(exchanges: Sequence[Exchange], again: Sequence[Exchange]) -> list[Exchange]:
    """For each node the later exchange if its reply is still to come, else the earlier one."""
    return [
        later if later.was_sent and not later.is_answered else earlier
        for earlier, later in zip(exchanges, again, strict=True)
    ]


class MajorityListing:
    """The names found so far. A name is locked if a majority has it, or may have it because other nodes do not answer.

    ``cursors``: where each node continues; None: it has no more. ``failures``: by node; such a node has no more, too.
    """

    def __init__(self, keys: Keys, start: str, size: int, majority: int) -> None:
        """``start``: the text that the names begin with."""
        self._keys, self._start = keys, start
        self.pattern = keys.pattern([LEASES], start)
        self.cursors: list[bytes | None] = [b"0"] * size
        self.failures: dict[int, Exception] = {}
        self._majority = majority
        self._found: list[set[str]] = [set() for _ in range(size)]  # SCAN may return a key twice

    @property
    def is_open(self) -> bool:
        return any(cursor is not None for cursor in self.cursors)

    def names_in(self, keys: Sequence[bytes]) -> list[str]:
        return self._keys.names_in(LEASES, self._start, keys)

    def add_page(
        self, cursors: list[bytes | None], names: Sequence[Sequence[str]], failures: dict[int, Exception]
    ) -> None:
        self.cursors, self.failures = cursors, failures
        for found, more in zip(self._found, names, strict=True):
            found.update(more)

    @property
    def locked(self) -> list[str]:
        votes = Counter(name for node, found in enumerate(self._found) if node not in self.failures for name in found)
        return [name for name, count in votes.items() if count + len(self.failures) >= self._majority]
