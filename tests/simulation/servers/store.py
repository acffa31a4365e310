"""The keys of a server, and the commands that read and change them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sized
from math import inf
from typing import Any, NamedTuple
from zlib import crc32

from .resp import OK, ServerError, Status
from .scripting import Scripts

Value = Any  # text, or a dict from member to score, or a list of texts; texts have one character per byte

EPOCH = 1_800_000_000  # seconds of Unix time at which the simulated clock shows 0
OVERHEAD = 1_000_000  # bytes of memory that an empty server uses

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
NO_INTEGER = "ERR value is not an integer or out of range"
SYNTAX = "ERR syntax error"


class Entry(NamedTuple):
    """A key's value and the second of the world at which it expires."""

    value: Value
    expires_at: float = inf

    def copy(self) -> Entry:
        value = self.value
        return self._replace(value=value.copy() if isinstance(value, dict | list) else value)


class Store:
    """``now`` in seconds. ``publish(kind, channel, text)`` returns how many listen; kind is "S" or "P".

    ``ears(kind, channel)`` are those who listen.

    ``clock_error``: seconds by which TIME is wrong. Expiry does not follow it: a clock that steps forward
    ends leases early, which no protocol can mend.

    ``guard(name, words)`` may refuse a command of a script by raising ServerError.
    """

    def __init__(
        self,
        now: Callable[[], float],
        publish: Callable[[str, str, str], int],
        ears: Callable[[str, str], Sized],
        guard: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        self._now = now
        self._publish, self._ears = publish, ears
        self._guard = guard
        self._entries: dict[str, Entry] = {}
        self._changed: dict[str, None] = {}
        self._scripts = Scripts(self._call)
        self.clock_error = 0.0

    # For the server

    def run(self, text: str, keys: list[str], arguments: list[str]) -> Any:
        """The reply of a script, with texts as bytes. Raises ServerError as a server words it."""
        self.expire()
        return self._scripts.run(text, keys, arguments)

    def execute(self, name: str, *arguments: str) -> Any:
        """The reply to a command that is there for its keys; raises ServerError."""
        self.expire()
        return getattr(self, f"_do_{name}")(*arguments)

    def knows(self, name: str) -> bool:
        return hasattr(self, f"_do_{name}")

    def peek(self, key: str) -> Value:
        self.expire()
        entry = self._entries.get(key)
        return entry.value if entry else None

    def seconds(self) -> float:
        """Of the world, now."""
        return self._now()

    def remaining(self, key: str) -> float:
        """Seconds until the key expires."""
        return self.expires_at(key) - self._now()

    def expires_at(self, key: str) -> float:
        """The second of the world."""
        entry = self._entries.get(key)
        return entry.expires_at if entry else inf

    def keys(self) -> set[str]:
        self.expire()
        return set(self._entries)

    def flush(self) -> None:
        self._changed.update(dict.fromkeys(self._entries))
        self._entries.clear()

    def expire(self) -> None:
        now = self._now()
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._remove(key)

    @property
    def used_memory(self) -> int:
        return OVERHEAD + sum(len(key) + _size(entry.value) for key, entry in self._entries.items())

    # For replication

    def take_changes(self) -> dict[str, Entry | None]:
        """The keys that changed since the last call, with what they are now. None: they are gone."""
        changed, self._changed = self._changed, {}
        return {key: entry.copy() if (entry := self._entries.get(key)) else None for key in changed}

    def apply(self, changes: Mapping[str, Entry | None]) -> None:
        for key, entry in changes.items():
            self._changed[key] = None
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = entry.copy()

    def snapshot(self) -> dict[str, Entry]:
        self.expire()
        return {key: entry.copy() for key, entry in self._entries.items()}

    def restore(self, snapshot: Mapping[str, Entry]) -> None:
        """As if nothing else had ever been there."""
        self._entries.clear()
        self.apply(snapshot)
        self._changed.clear()
        self.expire()

    # Entries

    def _call(self, name: str, *arguments: str) -> Any:
        if self._guard:
            self._guard(name, list(arguments))
        return getattr(self, f"_do_{name.replace('|', '_')}")(*arguments)

    def _put(self, key: str, value: Value, expires_at: float | None = None) -> None:
        """None: it expires as before."""
        old = self._entries.get(key)
        self._entries[key] = Entry(value, expires_at or (old.expires_at if old else inf))
        self._changed[key] = None

    def _remove(self, key: str) -> bool:
        self._changed[key] = None
        return self._entries.pop(key, None) is not None

    def _of_type(self, kind: type[Any], key: str) -> Any:
        """The value, or None. Raises ServerError for a value of another type."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not isinstance(entry.value, kind):
            raise ServerError(WRONG_TYPE)
        return entry.value

    # Texts

    def _do_get(self, key: str) -> Any:
        return self._of_type(str, key)

    def _do_mget(self, *keys: str) -> Any:
        values = [entry.value if (entry := self._entries.get(key)) else None for key in keys]
        return [value if isinstance(value, str) else None for value in values]

    def _do_getrange(self, key: str, first: str, last: str) -> str:
        text = self._of_type(str, key) or ""
        return text[_span(len(text), _integer(first), _integer(last))]

    def _do_setrange(self, key: str, offset: str, text: str) -> int:
        start = _integer(offset)
        if start < 0:
            raise ServerError("ERR offset is out of range")
        old = self._of_type(str, key) or ""
        if not text:
            return len(old)
        old = old.ljust(start, "\0")
        new = old[:start] + text + old[start + len(text) :]
        self._put(key, new)
        return len(new)

    def _do_set(self, key: str, text: str, *options: str) -> Any:
        words, expires_at = list(options), inf
        flags = set()
        while words:
            word = words.pop(0).upper()
            if word in ("PX", "EX") and words:
                ttl = _integer(words.pop(0)) / (1000 if word == "PX" else 1)
                if ttl <= 0:
                    raise ServerError("ERR invalid expire time in 'set' command")
                expires_at = self._now() + ttl
            elif word in ("NX", "XX", "GET", "KEEPTTL"):
                flags.add(word)
            else:
                raise ServerError(SYNTAX)
        if {"NX", "XX"} <= flags or ("KEEPTTL" in flags and expires_at < inf):
            raise ServerError(SYNTAX)
        old = self._of_type(str, key) if "GET" in flags else None
        is_there = key in self._entries
        if ("NX" in flags and is_there) or ("XX" in flags and not is_there):
            return old
        self._put(key, text, None if "KEEPTTL" in flags else expires_at)
        return old if "GET" in flags else OK

    # Keys

    def _do_exists(self, *keys: str) -> int:
        return sum(key in self._entries for key in keys)

    def _do_del(self, *keys: str) -> int:
        return sum(self._remove(key) for key in keys if key in self._entries)

    _do_unlink = _do_del

    def _do_type(self, key: str) -> Status:
        value = entry.value if (entry := self._entries.get(key)) else None
        names = {str: "string", dict: "zset", list: "list", type(None): "none"}
        return Status(names[type(value)])

    def _do_pttl(self, key: str) -> int:
        if (entry := self._entries.get(key)) is None:
            return -2
        # A server has the moment in whole milliseconds.
        return -1 if entry.expires_at == inf else max(0, int((entry.expires_at - self._now()) * 1000 + 1e-6))

    def _do_ttl(self, key: str) -> int:
        left = self._do_pttl(key)
        return (left + 500) // 1000 if left >= 0 else left

    def _do_pexpire(self, key: str, ttl: str) -> int:
        return self._expire_in(key, _integer(ttl) / 1000)

    def _do_pexpireat(self, key: str, moment: str) -> int:
        return self._expire_in(key, _integer(moment) / 1000 - self.micros() / 1_000_000)

    def _expire_in(self, key: str, seconds: float) -> int:
        if (entry := self._entries.get(key)) is None:
            return 0
        if seconds <= 0:
            self._remove(key)
        else:
            self._put(key, entry.value, self._now() + seconds)
        return 1

    def _do_scan(self, cursor: str, *options: str) -> list[Any]:
        """In the order of hashes, from the one that the cursor names, so that what stays is found."""
        if not cursor.isdecimal():
            raise ServerError("ERR invalid cursor")
        named = {word.upper(): value for word, value in zip(options[::2], options[1::2], strict=False)}
        if len(options) % 2 or not named.keys() <= {"MATCH", "COUNT", "TYPE"}:
            raise ServerError(SYNTAX)
        count = _integer(named.get("COUNT", "10"))
        if count < 1:
            raise ServerError(SYNTAX)
        later = sorted((number, key) for key in self._entries if (number := _hash(key)) >= int(cursor))
        visited, rest = later[:count], later[count:]
        while rest and rest[0][0] == visited[-1][0]:
            visited.append(rest.pop(0))
        matches = _pattern(named.get("MATCH", "*")).fullmatch
        return [str(rest[0][0] if rest else 0), [key for _, key in visited if matches(key)]]

    def _do_dbsize(self) -> int:
        return len(self._entries)

    def _do_flushall(self, *mode: str) -> Status:
        self.flush()
        return OK

    _do_flushdb = _do_flushall

    def _do_rpush(self, key: str, *texts: str) -> int:
        """For tests of what another program left there."""
        values = [*(self._of_type(list, key) or ()), *texts]
        self._put(key, values)
        return len(values)

    # Sorted sets

    def _do_zadd(self, key: str, *arguments: str) -> int:
        words, flags = list(arguments), set()
        while words and words[0].upper() in ("NX", "XX", "GT", "LT", "CH"):
            flags.add(words.pop(0).upper())
        if not words or len(words) % 2:
            raise ServerError(SYNTAX)
        if {"NX", "XX"} <= flags:
            raise ServerError("ERR XX and NX options at the same time are not compatible")
        if {"GT", "LT"} <= flags or ("NX" in flags and flags & {"GT", "LT"}):
            raise ServerError("ERR GT, LT, and/or NX options at the same time are not compatible")
        pairs = [(member, _number(score)) for score, member in zip(words[::2], words[1::2], strict=True)]
        scores = dict(self._of_type(dict, key) or {})
        added = changed = 0
        for member, score in pairs:
            old = scores.get(member)
            if "XX" in flags if old is None else "NX" in flags:
                continue
            if old is not None and (("GT" in flags and score <= old) or ("LT" in flags and score >= old)):
                continue
            added += old is None
            changed += old != score
            scores[member] = score
        if changed:
            self._put(key, scores)
        return changed if "CH" in flags else added

    def _do_zrem(self, key: str, *members: str) -> int:
        scores = dict(self._of_type(dict, key) or {})
        known = [member for member in dict.fromkeys(members) if scores.pop(member, None) is not None]
        if known and scores:
            self._put(key, scores)
        elif known:
            self._remove(key)
        return len(known)

    def _do_zremrangebyscore(self, key: str, lowest: str, highest: str) -> int:
        least, most = _bound(lowest), _bound(highest)
        past = [
            member
            for score, member in self._ranked(key)
            if (least[0] < score if least[1] else least[0] <= score)
            and (score < most[0] if most[1] else score <= most[0])
        ]
        return self._do_zrem(key, *past) if past else 0

    def _do_zpopmin(self, key: str, count: str = "1") -> Any:
        popped = self._ranked(key)[: _integer(count)]
        self._do_zrem(key, *(member for _, member in popped))
        return [part for score, member in popped for part in (member, score)]

    def _do_zrange(self, key: str, first: str, last: str, *options: str) -> Any:
        start, stop, ranked = _integer(first), _integer(last), self._ranked(key)
        if options and [option.upper() for option in options] != ["WITHSCORES"]:
            raise ServerError(SYNTAX)
        found = ranked[_span(len(ranked), start, stop)]
        return [part for score, member in found for part in ((member, score) if options else (member,))]

    def _do_zrank(self, key: str, member: str) -> Any:
        members = [member for _, member in self._ranked(key)]
        return members.index(member) if member in members else None

    def _do_zscore(self, key: str, member: str) -> Any:
        return (self._of_type(dict, key) or {}).get(member)

    def _do_zcard(self, key: str) -> int:
        return len(self._of_type(dict, key) or {})

    def _ranked(self, key: str) -> list[tuple[float, str]]:
        return sorted((score, member) for member, score in (self._of_type(dict, key) or {}).items())

    # The rest

    def micros(self) -> int:
        """What TIME says, in microseconds."""
        return round((EPOCH + self._now() + self.clock_error) * 1_000_000)

    def _do_time(self) -> Any:
        seconds, micros = divmod(self.micros(), 1_000_000)
        return [str(seconds), str(micros)]

    def _do_publish(self, channel: str, text: str) -> int:
        return self._publish("P", channel, text)

    def _do_spublish(self, channel: str, text: str) -> int:
        return self._publish("S", channel, text)

    def _do_pubsub_numsub(self, *channels: str) -> list[Any]:
        return [word for channel in channels for word in (channel, len(self._ears("P", channel)))]

    def _do_pubsub_shardnumsub(self, *channels: str) -> list[Any]:
        return [word for channel in channels for word in (channel, len(self._ears("S", channel)))]


def _integer(text: str) -> int:
    if not re.fullmatch(r"0|-?[1-9]\d{0,18}", text):
        raise ServerError(NO_INTEGER)
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number or text.strip() != text:
        raise ServerError("ERR value is not a valid float")
    return number


def _bound(text: str) -> tuple[float, bool]:
    """A score, and whether it is left out itself."""
    try:
        return _number(text.removeprefix("(")), text.startswith("(")
    except ServerError:
        raise ServerError("ERR min or max is not a float") from None


def _span(length: int, first: int, last: int) -> slice:
    """Positions as Redis has them: negative ones count from the end, the last one is included."""
    start = max(0, first + length if first < 0 else first)
    stop = last + length if last < 0 else last
    return slice(start, max(0, stop + 1))


def _size(value: Value) -> int:
    return len(value) if isinstance(value, str) else sum(map(len, value)) + 16 * len(value)


def _hash(key: str) -> int:
    return crc32(key.encode("latin-1")) + 1  # 0 ends a scan


def _pattern(glob: str) -> re.Pattern[str]:
    parts, index = [], 0
    while index < len(glob):
        letter = glob[index]
        index += 1
        if letter == "*":
            parts.append(".*")
        elif letter == "?":
            parts.append(".")
        elif letter == "[" and (end := glob.find("]", index)) > 0:
            parts.append(f"[{glob[index:end]}]")
            index = end + 1
        else:
            if letter == "\\" and index < len(glob):
                letter = glob[index]
                index += 1
            parts.append(re.escape(letter))
    return re.compile("".join(parts), re.DOTALL)
