"""A toy store: the commands that the scripts use, and the scripts themselves, exactly as the package has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type

Value = Any  # text, or a dict from member to score

EPOCH = 1_800_000_000  # seconds of Unix time at which the simulated clock shows 0
COMPILE = "function(text) return assert(loadstring('return function(KEYS, ARGV, redis) ' .. text .. '\\nend'))() end"

lua = LuaRuntime(unpack_returned_tuples=False, encoding="latin-1")


@cache
def compiled(text: str) -> Callable[..., Any]:
    return lua.eval(COMPILE)(text)


class Store:
    """``now`` in seconds. ``publish(kind, channel, text)`` returns how many listen; kind is "S" or "P".

    ``clock_error``: seconds by which TIME is wrong. Expiry does not follow it: a clock that steps forward
    ends leases early, which no protocol can mend.
    """

    def __init__(self, now: Callable[[], float], publish: Callable[[str, str, str], int]) -> None:
        self._now = now
        self._publish = publish
        self._values: dict[str, Value] = {}
        self._expiry: dict[str, float] = {}
        self._redis = lua.table(call=self._call)
        self.clock_error = 0.0

    def run(self, text: str, keys: list[str], arguments: list[str]) -> Any:
        """The reply, with texts as bytes."""
        self.expire()
        return _as_reply(compiled(text)(lua.table(*keys), lua.table(*arguments), self._redis))

    def peek(self, key: str) -> Value:
        self.expire()
        return self._values.get(key)

    def remaining(self, key: str) -> float:
        """Seconds until the key expires."""
        return self._expiry.get(key, inf) - self._now()

    def keys(self) -> set[str]:
        self.expire()
        return set(self._values)

    def flush(self) -> None:
        self._values.clear()
        self._expiry.clear()

    def expire(self) -> None:
        now = self._now()
        for key in [key for key, moment in self._expiry.items() if moment <= now]:
            self._remove(key)

    def _remove(self, key: str) -> bool:
        self._expiry.pop(key, None)
        return self._values.pop(key, None) is not None

    def _call(self, verb: str, *arguments: Any) -> Any:
        return getattr(self, f"_do_{verb.lower()}")(*map(_as_argument, arguments))

    # Texts

    def _do_get(self, key: str) -> Any:
        return self._values.get(key, False)

    def _do_getrange(self, key: str, first: str, last: str) -> str:
        return self._values.get(key, "")[int(first) : int(last) + 1]

    def _do_setrange(self, key: str, offset: str, text: str) -> int:
        start = int(offset)
        old = self._values[key]
        self._values[key] = old[:start] + text + old[start + len(text) :]
        return len(self._values[key])

    def _do_set(self, key: str, text: str, option: str = "", ttl: str = "") -> Any:
        assert option in ("", "PX", "GET")
        old = self._values.get(key, False)
        self._remove(key)
        self._values[key] = text
        if option == "PX":
            self._do_pexpire(key, ttl)
        return old if option == "GET" else "OK"

    # Keys

    def _do_exists(self, *keys: str) -> int:
        return sum(key in self._values for key in keys)

    def _do_del(self, key: str) -> int:
        return int(self._remove(key))

    def _do_pttl(self, key: str) -> int:
        if key not in self._values:
            return -2
        return int(self.remaining(key) * 1000) if key in self._expiry else -1

    def _do_pexpire(self, key: str, ttl: str) -> int:
        assert float(ttl) > 0, "Redis would delete the key"
        if key in self._values:
            self._expiry[key] = self._now() + float(ttl) / 1000
        return int(key in self._values)

    # Sorted sets

    def _do_zadd(self, key: str, *arguments: str) -> int:
        *options, score, member = arguments
        assert options in ([], ["NX"], ["LT"], ["GT"])
        scores = self._values.setdefault(key, {})
        old = scores.get(member)
        if old is None or not options or options == ["LT" if float(score) < old else "GT"]:
            scores[member] = float(score)
        return int(old is None)

    def _do_zrem(self, key: str, member: str) -> int:
        scores = self._values.get(key, {})
        known = scores.pop(member, None) is not None
        if known and not scores:
            self._remove(key)
        return int(known)

    def _do_zremrangebyscore(self, key: str, lowest: str, highest: str) -> int:
        past = [member for score, member in self._ranked(key) if float(lowest) <= score <= float(highest)]
        return sum(self._do_zrem(key, member) for member in past)

    def _do_zpopmin(self, key: str) -> Any:
        if not (ranked := self._ranked(key)):
            return lua.table()
        score, member = ranked[0]
        self._do_zrem(key, member)
        return lua.table(member, f"{score:.17g}")

    def _do_zrange(self, key: str, first: str, last: str) -> Any:
        return lua.table(*[member for _, member in self._ranked(key)[int(first) : int(last) + 1]])

    def _do_zrank(self, key: str, member: str) -> Any:
        members = [member for _, member in self._ranked(key)]
        return members.index(member) if member in members else False

    def _do_zscore(self, key: str, member: str) -> Any:
        score = self._values.get(key, {}).get(member)
        return False if score is None else f"{score:.17g}"

    def _ranked(self, key: str) -> list[tuple[float, str]]:
        return sorted((score, member) for member, score in self._values.get(key, {}).items())

    # The rest

    def micros(self) -> int:
        """What TIME says, in microseconds."""
        return round((EPOCH + self._now() + self.clock_error) * 1_000_000)

    def _do_time(self) -> Any:
        seconds, micros = divmod(self.micros(), 1_000_000)
        return lua.table(str(seconds), str(micros))

    def _do_publish(self, channel: str, text: str) -> int:
        return self._publish("P", channel, text)

    def _do_spublish(self, channel: str, text: str) -> int:
        return self._publish("S", channel, text)


def _as_argument(value: Any) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _as_reply(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("latin-1")
    if lua_type(value) == "table":
        return [_as_reply(value[index + 1]) for index in range(len(value))]
    return int(value)
