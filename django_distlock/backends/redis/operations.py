"""The commands of each operation on locks, and what their replies mean. No I/O here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

from redis.exceptions import RedisError

from ...exceptions import ClockIsAhead, LockBackendError, NewerRun, UnreadableRun
from ...formats import NEWER, is_newer
from ...journal import QueuedWaiter
from ...runs import LastRun
from ...types import Crowded, Grant, Holder, LockInfo, LockRequest
from ...utils.drive import Call, Steps
from ...utils.events import about_event
from ..common.attempts import InDoubt
from ..common.timing import Timing
from .codec import is_in_another_slot, read_holder, read_lease, read_queue, read_remaining, with_ends
from .errors import is_newer_value, is_of_publishing, is_wrong_type
from .keys import Keys
from .replies import Reply
from .scripts import Command, Script, for_all, for_each, milliseconds, pack, pack_parts, packed_keys

ACQUIRE, RELEASE, EXCHANGE = Script("acquire", keys=5), Script("release", keys=5), Script("exchange", keys=5)
EARS, CLAIM_RUN = Script("ears", keys=1), Script("claim_run", keys=2)
RENEW, RENEW_SLOT = Script("renew", keys=1), Script("renew_slot", keys=1)
MOST_TOGETHER = 16  # locks that are acquired in one step; each number of them has a script of its own
# Without the holder, and with it
RENEW_HEADS, RENEW_SLOT_HEADS = [(script.head(2), script.head(3)) for script in (RENEW, RENEW_SLOT)]

GONE = -2  # says PTTL
JOURNAL_TTL = 30 * 86_400  # seconds after the last entry
CROWDED = -2  # in the place of the ears of a waiter
POLLS = "polls"  # the inbox of a waiter that cannot be told of its turn

logger = logging.getLogger("django_distlock")


@lru_cache
def acquire_all_script(locks: int) -> Script:
    return Script("acquire_all", keys=5 * locks, locks=locks)


class Operations:
    """On the keys of one backend. A lock is told by the ``key`` of its requests.

    ``where``: the server as people know it; ``prefix_setting``: how messages name KEY_PREFIX; ``explain``: what to
    raise for an error of the server.
    """

    def __init__(
        self,
        alias: str,
        keys: Keys,
        where: str,
        prefix_setting: str,
        timing: Timing,
        explain: Callable[[Exception], LockBackendError],
    ) -> None:
        self._alias, self._keys, self._where, self._prefix_setting = alias, keys, where, prefix_setting
        self._timing, self._explain = timing, explain
        # What many calls have in common is packed once, the lengths of time in ``timing`` with it.
        packed_once = lru_cache(maxsize=1024)
        self._of_lock = packed_once(lambda key: packed_keys(*keys.of_lock(key)))
        self._question = packed_once(lambda first: Command(pack("EXISTS", first), key=first))
        self._acquire_options = packed_once(self._pack_acquire_options)
        self._release_options = packed_once(self._pack_release_options)
        self._packed_ttl = packed_once(lambda ttl: pack_parts(milliseconds(ttl)))

    # Commands

    def acquire(self, request: LockRequest, queue: bool, echo: bool = False) -> Command:
        """Of the modes, see acquire.lua. ``echo``: a look sends one to the inbox of the waiter."""
        most_places = 0
        if queue:
            most_places = request.most_places
            mode = ("look" if echo else "quiet") if request.place else "again" if request.in_doubt else "wait"
        else:
            mode = "last" if request.inbox else "try"
        head, options, end = self._acquire_options(request.ttl, mode, request.inbox, request.slots, most_places)
        if end:
            place = request.place  # of its own for each waiter, and so never packed before
            options = f"{options}${len(place)}\r\n{place}\r\n{end}"
        first, keys = self._of_lock(request.key)
        token, holder = request.token, request.holder.to_text()  # of ASCII both, as is the place
        text = f"{head}{keys}${len(token)}\r\n{token}\r\n${len(holder)}\r\n{holder}\r\n{options}"
        return Command(text.encode(), ACQUIRE, first)

    def acquire_all(self, requests: Sequence[LockRequest]) -> Steps[list[Grant] | None]:
        """In one step. None also where it has none: for very many, for several leases, in several slots of a Cluster.

        What the server refuses is asked for one by one then, so that each has its own error.
        """
        locks = [request.key for request in requests]
        has_step = len(locks) <= MOST_TOGETHER and all(request.slots == 1 for request in requests)
        if not has_step or not self._keys.are_together(locks):
            return None
        keys = [key for lock in locks for key in self._keys.of_lock(lock)]
        arguments: list[str | int] = []
        for request in requests:
            arguments += request.token, request.holder.to_text(), milliseconds(request.ttl)
        command = acquire_all_script(len(locks)).call(packed_keys(*keys), *arguments)
        in_doubt = True
        try:
            reply = yield Call("send", ((command,), requests[0].deadline))
            value = reply.values[0]
            in_doubt = reply.in_doubt or isinstance(value, RedisError)
        except LockBackendError as error:
            in_doubt = isinstance(error, InDoubt)
            raise
        finally:
            for request in requests:
                request.in_doubt = request.in_doubt or in_doubt
        return [Grant(fence, reply.sent_at) for fence in value] if isinstance(value, list) else None

    def release(self, request: LockRequest, cooldown: float, force: bool) -> Sequence[Command]:
        """The reply of the last one counts.

        An EXISTS stands before the release of a request that has waited, because others probably wait, too. A server
        writes first to those for whom it had something last. One that owes a reply already when the script publishes
        writes to the waiter before it answers the caller.
        """
        retire = request.retires_for if request.in_doubt else 0.0
        head, options = self._release_options(cooldown, retire, request.inbox, request.is_offer, force, request.slots)
        first, keys = self._of_lock(request.key)
        token = request.token
        text = f"{head}{keys}${len(token)}\r\n{token}\r\n{options}"
        command = Command(text.encode(), RELEASE, first)
        return (self._question(first), command) if request.inbox else (command,)

    def exchange(self, old: LockRequest, request: LockRequest) -> Command:
        ttl, retire = milliseconds(request.ttl), milliseconds(old.retires_for) if old.in_doubt else 0
        return EXCHANGE.call(
            self._of_lock(request.key), request.token, request.holder.to_text(), ttl, old.token, retire
        )  # fmt: skip

    def _pack_acquire_options(
        self, ttl: float, mode: str, inbox: str, slots: int, most_places: int
    ) -> tuple[str, str, str]:
        """What stands before the keys, behind token and holder, and behind the place of who has or wants one."""
        always = milliseconds(ttl), milliseconds(self._timing.grant_ttl)
        if mode == "try" and slots == 1:
            return ACQUIRE.head(4), pack_parts(*always), ""
        end: tuple[str | int, ...] = (inbox, milliseconds(self._timing.queue_ttl), *_told_slots(slots))
        if most_places:
            end = (*end[:2], f"{slots:04d}", most_places)
        return ACQUIRE.head(6 + len(end)), pack_parts(*always, mode), pack_parts(*end)

    def _pack_release_options(
        self, cooldown: float, retire: float, inbox: str, is_offer: bool, force: bool, slots: int
    ) -> tuple[str, str]:
        more: tuple[str | int, ...] = milliseconds(cooldown), milliseconds(retire), inbox, int(is_offer), int(force)
        more = (*more, *_told_slots(slots)) if any(more) else ()
        return RELEASE.head(2 + len(more)), pack_parts(milliseconds(self._timing.grant_ttl), *more)

    def ears(self, request: LockRequest, inbox: str, *, gives_leases: bool) -> list[Command]:
        """The question whether scripts are told who hears a message.

        ``gives_leases``: waiters take leases by messages there, and confirm them by scripts whose replies nobody reads.
        The server gets to know these by renewals of what nobody has.
        """
        question = EARS.call(packed_keys(self._keys.lease(request.key)), inbox)
        renewals = [self._renewal(request, request.token, slot, False, request.ttl) for slot in (1, 2)]
        return [question, *renewals] if gives_leases else [question]

    def renew(self, wanted: Sequence[tuple[LockRequest, float]]) -> list[Command]:
        commands = []
        for request, ttl in wanted:
            kept, about = request.renewal, (request.token, request.slot, request.is_unconfirmed, ttl)
            if not kept or kept[:-1] != about:
                kept = request.renewal = *about, self._renewal(request, *about)
            commands.append(kept[-1])
        return commands

    def confirm(self, request: LockRequest, client: Any) -> bool:
        """Send the command that confirms what was handed to the request. False: it was not sent."""
        posted: bool = client.post(*self.renew([(request, request.ttl)]))
        return posted

    def _renewal(self, request: LockRequest, token: str, slot: int, is_unconfirmed: bool, ttl: float) -> Command:
        key, heads, script = self._keys.lease(request.key), RENEW_HEADS, RENEW
        if slot > 1:
            key, heads, script = self._keys.others(request.key), RENEW_SLOT_HEADS, RENEW_SLOT
        length = len(key) if key.isascii() else len(key.encode())
        text = f"{heads[is_unconfirmed]}${length}\r\n{key}\r\n${len(token)}\r\n{token}\r\n{self._packed_ttl(ttl)}"
        if is_unconfirmed:
            holder = request.holder.to_text()
            text = f"{text}${len(holder)}\r\n{holder}\r\n"
        return Command(text.encode(), script, key)

    def look(self, groups: Sequence[Sequence[str]]) -> list[Command]:
        """At each lock's lease in the first slot, and whether any lock of a group has others."""
        commands: list[Command] = []
        for locks in groups:
            leases = [*map(self._keys.lease, locks)]
            commands += chain.from_iterable(zip(for_each("GET", leases), for_each("PTTL", leases), strict=True))
            commands.append(for_all("EXISTS", map(self._keys.others, locks)))
        return commands

    def look_at_others(self, locks: Sequence[str]) -> list[Command]:
        """At the leases in other slots, and then at the clock of the server by which they end."""
        commands = []
        for key in map(self._keys.others, locks):
            for question in (pack("ZRANGE", key, 0, -1, "WITHSCORES"), pack("TIME")):
                commands.append(Command(question, key=key))
        return commands

    def holders(self, groups: Sequence[Sequence[str]]) -> list[Command]:
        return [for_all("MGET", map(self._keys.lease, locks)) for locks in groups]

    def remaining(self, locks: Sequence[str]) -> list[Command]:
        return for_each("PTTL", map(self._keys.lease, locks))

    def count_waiters(self, locks: Sequence[str]) -> list[Command]:
        return for_each("ZCARD", map(self._keys.queue, locks))

    def claim_run(self, name: str, seen: LastRun, now: LastRun, ttl: float, grace: float, ahead: float) -> Command:
        return CLAIM_RUN.call(
            packed_keys(*self._keys.of_run(name)),
            repr(seen.at), repr(now.at), now.token, seen.to_text(), now.to_text(),
            milliseconds(ttl), milliseconds(grace), repr(ahead),
        )  # fmt: skip

    def find_runs(self, names: Sequence[str]) -> list[Command]:
        return for_each("GET", map(self._keys.run, names))

    def forget_run(self, name: str) -> Command:
        stamp, is_new = self._keys.of_run(name)
        return Command(pack("DEL", stamp, is_new), key=stamp)

    def waiters(self, locks: Sequence[str]) -> list[Command]:
        return [Command(pack("ZRANGE", key, 0, -1, "WITHSCORES"), key=key) for key in map(self._keys.queue, locks)]

    def write_journal(self, entries: Sequence[str], length: int) -> list[Command]:
        key = self._keys.journal
        parts = [("LPUSH", key, *entries), ("LTRIM", key, 0, length - 1), ("EXPIRE", key, JOURNAL_TTL)]
        return [Command(pack(*each), key=key) for each in parts]

    def read_journal(self) -> Command:
        return Command(pack("LRANGE", self._keys.journal, 0, -1), key=self._keys.journal)

    # Replies

    def only(self, reply: Reply) -> Any:
        value = reply.values[0]
        return self.checked(value) if isinstance(value, RedisError) else value

    def checked(self, value: Any) -> Any:
        """Raises LockBackendError for one by which the server refuses."""
        if isinstance(value, RedisError):
            raise self._explain(value) from value
        return value

    def busy(self, request: LockRequest, value: Any, left: Any, *, is_crowded: bool) -> LockInfo:
        """Who is in the way of an acquisition."""
        if info := read_lease(self._alias, request.name, value, left):
            info = info._replace(prefix=request.prefix) if request.prefix else info
            return Crowded(*info) if is_crowded else info
        raise self._unreadable(request.key, value, is_other=is_in_another_slot(value))

    def counts_ears(self, reply: Reply) -> bool | None:
        """Whether scripts are told who hears a message. None: nobody does, and who listens may just not be there."""
        value = reply.values[0]
        if is_of_publishing(value):
            return False
        heard, anyway = self.checked(value)
        if heard > anyway:
            return True
        return False if anyway else None

    def renewed(self, reply: Reply) -> list[bool | None]:
        """A node that refuses must not hide what became of leases elsewhere; raises where that is all there is."""
        if {*map(type, reply.values)} <= {int}:
            return list(map(bool, reply.values))
        renewed = list(map(self._is_renewed, reply.values))
        if all(still_held is None for still_held in renewed):
            return list(map(self.checked, reply.values))
        failures = [value for value, still_held in zip(reply.values, renewed, strict=True) if still_held is None]
        for reason in dict.fromkeys(str(self._explain(failure)) for failure in failures):
            about = about_event("renewal-refused", alias=self._alias)
            logger.warning("Some leases are not renewed now: %s", reason, extra=about)
        return renewed

    @staticmethod
    def _is_renewed(value: Any) -> bool | None:
        if is_wrong_type(value):
            return False
        return None if isinstance(value, RedisError) else bool(value)

    def infos(self, groups: Sequence[Sequence[str]], reply: Reply) -> tuple[dict[str, list[LockInfo]], list[str]]:
        """The leases in the first slots, and which locks may have others. Each is named by its whole key."""
        found: dict[str, list[LockInfo]] = {}
        others: list[str] = []
        values = iter(reply.values)
        for locks in groups:
            for lock in locks:
                info = self._info(lock, next(values), next(values))
                found[lock] = [info] if info else []
            if self.checked(next(values)):
                others += locks
        return found, others

    def other_infos(self, locks: Sequence[str], reply: Reply) -> dict[str, list[LockInfo]]:
        """The leases in the other slots, in their order."""
        values, found = iter(reply.values), {}
        for lock, leases, time in zip(locks, values, values, strict=True):
            ends = with_ends(self.checked(leases), self.checked(time))
            infos = [self._info(lock, value, left, is_other=True) for value, left in ends if left > 0]
            found[lock] = sorted(filter(None, infos), key=attrgetter("slot"))
        return found

    def found_holders(self, locks: Sequence[str], groups: Sequence[Sequence[str]], reply: Reply) -> list[Holder | None]:
        values: dict[str, bytes | None] = {}
        for group, value in zip(groups, reply.values, strict=True):
            values.update(zip(group, self.checked(value), strict=True))
        return [read_holder(values[lock]) for lock in locks]

    def found_remaining(self, reply: Reply) -> list[float | None]:
        return [None if self.checked(left) == GONE else read_remaining(left) for left in reply.values]

    def counted(self, reply: Reply) -> list[int | None]:
        return [None if is_wrong_type(value) else self.checked(value) for value in reply.values]

    def found_waiters(self, reply: Reply) -> list[list[QueuedWaiter] | None]:
        return [None if is_wrong_type(value) else read_queue(self.checked(value)) for value in reply.values]

    def journal_texts(self, reply: Reply) -> list[str]:
        return [text.decode(errors="replace") for text in self.only(reply)]

    def claimed_run(self, name: str, reply: Reply, ahead: float) -> LastRun | None:
        if is_newer_value(reply.values[0]):
            raise self._newer_run(name)
        value = self.only(reply)
        if isinstance(value, int) and value > 0:
            raise ClockIsAhead(value / 1000, ahead)
        return self._run(name, value)

    def found_runs(self, names: Sequence[str], reply: Reply) -> list[LastRun | UnreadableRun | None]:
        found: list[LastRun | UnreadableRun | None] = []
        for name, value in zip(names, reply.values, strict=True):
            try:
                found.append(self._run(name, value if is_wrong_type(value) else self.checked(value)))
            except UnreadableRun as error:
                found.append(error)
        return found

    def _info(self, lock: str, value: Any, left: Any, *, is_other: bool = False) -> LockInfo | None:
        if value is None or left == GONE:
            return None
        info = None
        if not is_wrong_type(value):
            info = read_lease(self._alias, lock, self.checked(value), self.checked(left))
        if info is None:
            about = about_event("unreadable", alias=self._alias, name=lock)
            logger.error("%s", self._unreadable(lock, value, is_other=is_other), extra=about)
        return info

    def _run(self, name: str, value: Any) -> LastRun | None:
        if value is None:
            return None
        try:
            if isinstance(value, bytes):
                return LastRun.from_text(value)
        except ValueError:
            if is_newer(value):
                raise self._newer_run(name) from None
        raise UnreadableRun(
            f"The key {self._keys.run(name)!r} at {self._where}",
            f", or give the locks a prefix of their own in {self._prefix_setting}",
        )

    def _newer_run(self, name: str) -> NewerRun:
        return NewerRun(f"The key {self._keys.run(name)!r} at {self._where}")

    def _unreadable(self, lock: str, value: Any, *, is_other: bool) -> LockBackendError:
        """``is_other``: it stands among the leases in other slots than the first."""
        if is_other:
            what = f"A member of the key {self._keys.others(lock)!r} at {self._where}"
            wrong = "is no lease. Remove it with ZREM"
        else:
            what = f"The key {self._keys.lease(lock)!r} at {self._where}"
            wrong = "holds something that is no lock. Delete it"
        if isinstance(value, bytes) and is_newer(value):
            error = LockBackendError(f"{what} {NEWER}.")
        else:
            error = LockBackendError(
                f"{what} {wrong}, or give the locks a prefix of their own in {self._prefix_setting}."
            )
        error.is_final = True
        return error


def _told_slots(slots: int) -> tuple[str, ...]:
    """As an entry of the queue has them; of one, scripts know by themselves."""
    return (f"{slots:04d}",) if slots > 1 else ()
