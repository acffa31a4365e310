"""Scripts with one rule broken each, to show that the simulation would notice."""

from __future__ import annotations

from typing import NamedTuple

from django_distlock.backends.redis.commands import Script


class Mutant(NamedTuple):
    """``profile``: under which faults it is found soon."""

    script: str
    text: str
    replacement: str
    profile: str

    def texts(self) -> dict[str, str]:
        original = Script(self.script).text.decode()
        assert original.count(self.text) == 1, f"{self.script}.lua no longer says {self.text!r} once"
        return {self.script: original.replace(self.text, self.replacement)}


MUTANTS = {
    "a free lock goes to whoever asks": Mutant("acquire", "redis.call('EXISTS', QUEUE, RETIRED) == 0", "true", "death"),
    "any claim can be taken": Mutant(
        "acquire",
        "if lease and string.sub(lease, 1, 27) == token .. ' ' then",
        "if lease and (string.sub(lease, 1, 27) == token .. ' ' or string.sub(lease, 28, 28) == 'c') then",
        "calm",
    ),
    "a look does not bring back who was dropped": Mutant(
        "acquire", "  redis.call('ZADD', QUEUE, 'LT', place, me) -- a waiter", "  -- a waiter", "deaf"
    ),
    "a look brings back to the end of the queue": Mutant(
        "acquire",
        "  redis.call('ZADD', QUEUE, 'LT', place, me) -- a waiter",
        "  redis.call('ZADD', QUEUE, 'NX', number(), me) -- a waiter",
        "deaf",
    ),
    "a queue that nobody looks at is kept": Mutant(
        "acquire",
        "redis.call('PEXPIRE', QUEUE, ARGV[8])\nreturn",
        "return",
        "death",
    ),
    "the last attempt does not leave the queue": Mutant(
        "acquire", "if mode == 'last' then redis.call('ZREM', QUEUE, me) end", "", "calm"
    ),
    "fencing numbers follow the clock alone": Mutant("acquire", "if last >= now then", "if false then", "clock"),
    "retired tokens are granted the lock": Mutant(
        "acquire", "return redis.call('ZSCORE', RETIRED, token) and true", "return false", "network"
    ),
    "release retires no token": Mutant("release", "if retire > 0 then", "if false then", "network"),
    "release does not compare tokens": Mutant(
        "release", "if string.sub(lease, 1, 27) ~= token .. ' ' then", "if lease == '' then", "network"
    ),
    "release leaves the place in the queue": Mutant("release", "if inbox ~= '' then", "if false then", "calm"),
    "release keeps what was handed over": Mutant(
        "release", "if state == 'r' and rest >= 0 then return 1 end", "if state ~= 'h' then return 1 end", "calm"
    ),
    "a hand-back ends a lease that was taken": Mutant(
        "release", "if ARGV[6] == '1' and state ~= 'c' then return 0 end", "", "deaf"
    ),
    "release hands over to the dead": Mutant(
        "release", "first .. ' ' .. LEASE) > 0", "first .. ' ' .. LEASE) >= 0", "death"
    ),
    "release hands over for good": Mutant("release", "first .. ' c '", "first .. ' h '", "death"),
    "a place is the fencing number of a hand-off": Mutant(
        "release", "local fence = time[1] * 1000000 + time[2]", "local fence = tonumber(head[2])", "calm"
    ),
    "the fencing numbers of hand-offs follow the clock alone": Mutant(
        "release", "if last >= fence then", "if false then", "clock"
    ),
    "min_hold is not kept": Mutant("release", "if rest > 0 and state == 'h' then", "if false then", "calm"),
    "renewal does not compare tokens": Mutant(
        "renew", "if redis.call('GETRANGE', KEYS[1], 0, 27) ~= ARGV[1] .. ' h' then", "if false then", "network"
    ),
}
