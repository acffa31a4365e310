"""Scripts with one rule broken each, to show that the simulation would notice."""

from __future__ import annotations

from typing import NamedTuple

from django_distlock.backends.redis.scripts import Script


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
        "redis.call('PEXPIRE', QUEUE, ARGV[8])\n",
        "",
        "death",
    ),
    "the last attempt does not leave the queue": Mutant(
        "acquire", "if mode == 'last' and redis.call('ZREM', QUEUE, me) == 1", "if false", "calm"
    ),
    "who comes to an empty queue is not told when the lease ends": Mutant(
        "acquire", "return {0, place, is_first and", "return {0, place, mode == 'look' and is_first and", "short leases"
    ),
    "who stands behind one that is granted the lock is not told": Mutant(
        "acquire", "if state == 'c' and ttl < LOOK then", "if false then", "short leases"
    ),
    "who stands behind one that takes a free lock is not told": Mutant(
        "acquire", "    if ttl < LOOK then", "    if false then", "short leases"
    ),
    "who stands behind one that comes too late is not told": Mutant(
        "acquire", "== 1 and left < LOOK then", "== 2 then", "short leases"
    ),
    "fencing numbers follow the clock alone": Mutant("acquire", "if last >= now then", "if false then", "clock"),
    "retired tokens are granted the lock": Mutant(
        "acquire", "return redis.call('ZSCORE', RETIRED, token) and true", "return false", "network"
    ),
    "release retires no token": Mutant("release", "if retire > 0 then", "if false then", "network"),
    "release does not compare tokens": Mutant(
        "release", "if string.sub(lease, 1, 27) ~= token .. ' ' then", "if lease == '' then", "network"
    ),
    "release leaves the place in the queue": Mutant(
        "release", "local left = inbox ~= '' and", "local left = false and", "calm"
    ),
    "release keeps what was handed over": Mutant(
        "release", "if state == 'r' and ARGV[7] ~= '1' then return 1 end", "if state ~= 'h' then return 1 end", "calm"
    ),
    "a hand-back ends a lease that was taken": Mutant(
        "release", "if ARGV[6] == '1' and state ~= 'c' then return 0 end", "", "deaf"
    ),
    "release hands over to the dead": Mutant("release", "tell(head) > 0", "tell(head) >= 0", "death"),
    "release hands over for good": Mutant("release", "first .. ' c '", "first .. ' h '", "death"),
    "the fencing number of a hand-off is older than it": Mutant(
        "release",
        "local fence = time[1] * 1000000 + time[2]",
        "local fence = tonumber(string.sub(lease, 30, 45)) + 1",
        "calm",
    ),
    "the fencing numbers of hand-offs follow the clock alone": Mutant(
        "release", "if last >= fence then", "if false then", "clock"
    ),
    "who stands behind one that is cancelled is not told": Mutant(
        "release", "if left and redis.call('PTTL', LEASE) < LOOK then", "if false then", "short leases"
    ),
    "nobody is told of a min_hold": Mutant("release", "if cooldown < LOOK then", "if false then", "calm"),
    "min_hold is not kept": Mutant("release", "if cooldown > 0 and state == 'h' then", "if false then", "calm"),
    "renewal does not compare tokens": Mutant(
        "renew", "if redis.call('GETRANGE', KEYS[1], 0, 27) ~= ARGV[1] .. ' h' then", "if false then", "network"
    ),
}
