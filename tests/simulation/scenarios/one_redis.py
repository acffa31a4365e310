"""One Redis: each command that the package sends, and each state in which a server refuses."""

from __future__ import annotations

from typing import Protocol

from django_distlock.backends.redis.keys import LEASES, OTHERS, RUNS, Keys, Listing
from django_distlock.backends.redis.operations import ACQUIRE, RENEW, Operations
from django_distlock.backends.redis.scripts import Command, packed_keys
from django_distlock.runs import LastRun

from .package import INBOX, QUORUM, SCRIPTS, operations, request
from .stages import Process, Stage


class RedisProcess(Process, Protocol):
    """One server, and what can be wrong with it."""

    def forget_data(self) -> None:
        """Begin without data the next time; else with all."""

    def load_slowly(self) -> None:
        """Need a second for that, the next time it begins."""

    def be_busy(self) -> None:
        """A script goes on and on."""

    def lose_disk(self) -> None:
        """It cannot save its data any more."""

    def mend_disk(self) -> None: ...


def one_redis(stage: Stage, process: RedisProcess) -> None:
    keys = Keys("lock")
    package = operations(keys)
    stage.connect("a", "redis")
    _greet(stage, "a")
    _misspeak(stage, "a")
    _lock(stage, package, keys)
    _wait(stage, package)
    _share(stage, package)
    _claim(stage, package)
    _vote(stage)
    _find_others_values(stage, package)
    _list(stage, keys)
    _forget_scripts(stage, package)
    _refuse(stage, package, process)
    _hang_and_die(stage, package, process)


def _greet(stage: Stage, name: str) -> None:
    stage.say(name, "HELLO", 3)
    stage.say(name, "HELLO", 2)
    stage.say(name, "HELLO", 4)
    stage.say(name, "CLIENT", "SETINFO", "LIB-NAME", "redis-py")
    stage.say(name, "CLIENT", "MAINT_NOTIFICATIONS", "ON")
    stage.say(name, "SELECT", 0)
    stage.say(name, "SELECT", 99)
    stage.say(name, "PING")
    stage.say(name, "TIME")
    stage.say(name, "INFO")
    stage.say(name, "ROLE")


def _misspeak(stage: Stage, name: str) -> None:
    stage.say(name, "FROBNICATE", "a", "b")
    stage.say(name, "GET")
    stage.say(name, "SCRIPT", "FROBNICATE")
    stage.say(name, "SET", "key", "value", "PX", "no number")
    stage.say(name, "PEXPIRE", "key", "1.5")
    stage.say(name, "ZADD", "key", "no number", "member")
    stage.say(name, "SCRIPT", "LOAD", "no Lua")
    for text in (
        "return redis.call('FROBNICATE')", "return redis.call('GET')", "return redis.call()", "return unknown",
        "\nlocal now = redis.call('TIME')\nreturn now[1] + 'x'", "error('it failed')", "return {err='ERR it failed'}",
        "return redis.call('SUBSCRIBE', 'x')", "return cjson.decode('x')", "return {1, 2.9, 'a', false, 3}",
        "return {ok='FINE'}", "return false", "return true", "return redis.pcall('GET')",
    ):  # fmt: skip
        stage.say(name, "EVAL", text, 0)


def _lock(stage: Stage, package: Operations, keys: Keys) -> None:
    mine, other = request("name", "a"), request("name", "b")
    stage.call("a", package.acquire(mine, queue=False))
    stage.load("a", *SCRIPTS)
    stage.say("a", "SCRIPT", "EXISTS", ACQUIRE.sha, "0" * 40)
    stage.call("a", package.acquire(mine, queue=False))
    stage.call("a", package.acquire(mine, queue=False))
    stage.call("a", package.acquire(other, queue=False))
    for command in (*package.look([["name", "none"]]), *package.remaining(["name", "none"])):
        _look(stage, command)
    for command in (*package.holders([["name", "none"]]), *package.count_waiters(["name"])):
        stage.call("a", command)
    stage.call("a", package.renew([(mine, 90.0)])[0])
    stage.call("a", package.renew([(other, 90.0)])[0])
    _look(stage, package.remaining(["name"])[0])
    stage.call("a", *package.release(mine, cooldown=30.0, force=False))
    stage.call("a", package.acquire(mine, queue=False))
    stage.call("a", *package.release(mine, cooldown=0.0, force=False))
    stage.call("a", *package.release(mine, cooldown=0.0, force=True))
    doubtful = request("name", "c", in_doubt=True)
    stage.call("a", *package.release(doubtful, cooldown=0.0, force=False))
    stage.call("a", package.acquire(doubtful, queue=False))
    stage.say("a", "ZRANGE", keys.of_lock("name")[2], 0, -1)
    stage.say("a", "PTTL", keys.of_lock("name")[2])


def _look(stage: Stage, command: Command) -> None:
    """One that is as the servers have it, and not as the package's scripts."""
    words = command.packed.decode().split("\r\n")[2::2]
    stage.say("a", *words)


def _share(stage: Stage, package: Operations) -> None:
    """A lock with several slots."""
    holders = [request("shared", letter, slots=3) for letter in "abc"]
    for number, holder in enumerate(holders, 1):
        for _ in range(2):
            stage.call("a", package.acquire(holder, queue=False))
        holder.slot = number
    stage.call("a", package.acquire(request("shared", "d", slots=3), queue=False))
    for command in (*package.look([["shared"]]), *package.look_at_others(["shared"])):
        _look(stage, command)
    for holder in (*holders, request("shared", "d", slot=2)):
        stage.call("a", package.renew([(holder, 90.0)])[0])
    stage.call("a", *package.release(holders[1], cooldown=30.0, force=False))
    stage.call("a", *package.release(holders[2].copy(slot=1), cooldown=0.0, force=False))
    stage.call("a", *package.release(holders[1], cooldown=0.0, force=True))
    stage.say("a", "EXISTS", "lock|l:shared")
    stage.call("a", *package.release(holders[0], cooldown=0.0, force=False))


def _wait(stage: Stage, package: Operations) -> None:
    holder, first, second = request("queue", "a"), *(request("queue", letter, inbox=INBOX) for letter in "bc")
    stage.connect("ears", "redis")
    stage.say("ears", "SSUBSCRIBE", INBOX[1:])
    stage.say("ears", "GET", "lock:queue")
    stage.call("a", package.acquire(holder, queue=True))
    for waiter in (first, second):
        reply = stage.call("a", package.acquire(waiter, queue=True))
        waiter.place = reply.split(b"\r\n")[2].decode()
        stage.call("a", package.acquire(waiter.copy(place="", in_doubt=True), queue=True))
        stage.call("a", package.acquire(waiter, queue=True))
        stage.call("a", package.acquire(waiter, queue=True, echo=True))
        stage.hear("ears")
    stage.call("a", package.count_waiters(["queue"])[0])
    stage.call("a", *package.release(holder, cooldown=0.0, force=False))
    stage.hear("ears")
    for verb in ("NUMSUB", "SHARDNUMSUB"):
        stage.say("a", "EVAL", f"return redis.call('PUBSUB', '{verb}', 'nobody', KEYS[1])", "1", INBOX[1:])
    stage.call("a", package.acquire(first, queue=True))
    stage.hear_nothing("ears")
    stage.call("a", *package.release(second, cooldown=0.0, force=False))
    stage.call("a", *package.release(first, cooldown=0.0, force=False))
    stage.say("ears", "SUNSUBSCRIBE", INBOX[1:])
    stage.say("ears", "SUBSCRIBE", "news")
    stage.say("ears", "PING")
    stage.say("ears", "GET", "lock:queue")
    stage.say("a", "PUBLISH", "news", "hear")
    stage.hear("ears")
    stage.say("ears", "UNSUBSCRIBE")


def _claim(stage: Stage, package: Operations) -> None:
    never, seen = LastRun(1_700_000_000.0), LastRun(1_700_000_100.0, "host", 1_700_000_200.0, "b" * 26)
    later = LastRun(1_700_000_300.5, "host", None, "c" * 26)
    for last, now in ((never, never), (never, seen), (never, seen), (seen, later), (never, later)):
        stage.call("a", package.claim_run("task", last, now, 60.0, 60.0, 1.0))
    stage.say("a", "DEL", "lock|n:task")
    for last, now in ((never, seen), (never, seen), (never, later), (seen, later)):
        stage.call("a", package.claim_run("task", last, now, 60.0, 60.0, 1.0))
    stage.call("a", package.find_runs(["task"])[0])
    stage.say("a", "SET", "lock|r:bad", "no stamp")
    stage.call("a", package.claim_run("bad", never, seen, 60.0, 60.0, 1.0))
    stage.say("a", "DEL", "lock|r:bad")


def _vote(stage: Stage) -> None:
    """The scripts of a node of a quorum."""
    lease, retired, last = "lock:vote", "lock|x:vote", "lock|f:vote"
    all_keys, keys, key = packed_keys(lease, retired, last), packed_keys(lease, retired), packed_keys(lease)
    acquire, release, renew = QUORUM
    stage.load("a", *QUORUM)
    number = 1_700_000_000_000_000
    for letter, proposed, mode in (("a", number, "new"), ("b", number, "new"), ("a", number + 5, "keep")):
        stage.call("a", acquire.call(all_keys, letter * 26, "60000", "[]", str(proposed), mode))
    stage.call("a", renew.call(key, "a" * 26, "90000"))
    stage.call("a", renew.call(key, "b" * 26, "90000"))
    stage.call("a", release.call(keys, "b" * 26, "0", "60000", "0"))
    stage.call("a", release.call(keys, "a" * 26, "0", "0", "0"))
    stage.call("a", acquire.call(all_keys, "b" * 26, "60000", "[]", str(number), "new"))
    stage.call("a", acquire.call(all_keys, "c" * 26, "60000", "[]", str(number), "new"))
    stage.call("a", release.call(keys, "c" * 26, "30000", "0", "0"))


def _find_others_values(stage: Stage, package: Operations) -> None:
    stage.say("a", "RPUSH", "lock:list", "value")
    stage.call("a", package.acquire(request("list", "a"), queue=False))
    stage.call("a", package.renew([(request("list", "a"), 60.0)])[0])
    stage.call("a", *package.release(request("list", "a"), cooldown=0.0, force=False))
    stage.call("a", package.holders([["list"]])[0])
    stage.say("a", "SET", "lock|q:list", "value")
    stage.call("a", package.count_waiters(["list"])[0])
    stage.say("a", "RPUSH", "lock|r:list", "value")
    stage.call("a", package.claim_run("list", LastRun(1.0), LastRun(2.0), 60.0, 60.0, 1.0))
    stage.say("a", "DEL", "lock:list", "lock|q:list", "lock|r:list")


def _list(stage: Stage, keys: Keys) -> None:
    """One of each kind, because servers have keys in any order."""
    stage.say("a", "SET", "lock:[ü]*", "value")
    for kinds, start in (([RUNS], "ta"), ([LEASES, OTHERS], "[ü]*"), ([LEASES, OTHERS], "none")):
        for command in Listing(keys, kinds, start).commands(None):
            words = command.packed.decode().split("\r\n")[2::2]
            stage.say("a", *words)
            break
    stage.say("a", "SCAN", "no number")


def _forget_scripts(stage: Stage, package: Operations) -> None:
    stage.say("a", "SCRIPT", "FLUSH")
    stage.call("a", package.renew([(request("name", "a"), 60.0)])[0])
    stage.load("a", *SCRIPTS)


def _try(stage: Stage, package: Operations, ttl: float) -> None:
    """What operations are told by a server that does not serve.

    ``ttl``: longer than the one before, because a renewal that finds as much left writes nothing.
    """
    stage.call("a", package.acquire(request("new", "a"), queue=False))
    stage.call("a", package.renew([(request("kept", "a"), ttl)])[0])
    stage.call("a", *package.release(request("kept", "z"), cooldown=0.0, force=False))
    for command in (*package.look([["kept"]]), *package.holders([["kept"]])):
        _look(stage, command)
    stage.say("a", "SET", "other", "value")
    stage.say("a", "DEL", "other")
    stage.say("a", "PING")
    stage.say("a", "TIME")
    stage.say("a", "SCRIPT", "LOAD", ACQUIRE.text)
    stage.say("a", "SPUBLISH", "news", "hear")
    stage.say("a", "ROLE")


def _refuse(stage: Stage, package: Operations, process: RedisProcess) -> None:
    stage.call("a", package.acquire(request("kept", "a"), queue=False))
    for setting, wrong, right, ttl in (("maxmemory", 1, 0, 600.0), ("min-replicas-to-write", 1, 0, 610.0)):
        stage.say("a", "CONFIG", "SET", setting, wrong)
        _try(stage, package, ttl)
        stage.say("a", "CONFIG", "SET", setting, right)
    stage.say("a", "REPLICAOF", "127.0.0.1", 1)
    _try(stage, package, 620.0)
    stage.say("a", "INFO")
    stage.say("a", "CONFIG", "SET", "replica-serve-stale-data", "no")
    _try(stage, package, 630.0)
    stage.say("a", "REPLICAOF", "127.0.0.1", 1)
    stage.say("a", "REPLICAOF", "NO", "ONE")
    stage.say("a", "CONFIG", "SET", "replica-serve-stale-data", "yes")
    process.lose_disk()
    _try(stage, package, 640.0)
    process.mend_disk()
    process.be_busy()
    _try(stage, package, 650.0)
    stage.say("a", "HELLO", 2)
    stage.say("a", "SCRIPT", "KILL")
    stage.until_told("redis", "ECHO", "", reply=b"$0\r\n\r\n")
    stage.say("a", "SCRIPT", "KILL")
    _try(stage, package, 660.0)


def _hang_and_die(stage: Stage, package: Operations, process: RedisProcess) -> None:
    stage.connect("b", "redis")
    stage.connect("ears", "redis")
    stage.say("ears", "SUBSCRIBE", "news")
    stage.say("a", "CLIENT", "KILL", "TYPE", "pubsub")
    stage.hear_end("ears")
    stage.say("a", "CLIENT", "KILL", "TYPE", "normal")
    stage.hear_end("b")
    stage.say("a", "CONFIG", "SET", "maxclients", 1)
    stage.connect("b", "redis")
    stage.hear("b")
    stage.hear_end("b")
    stage.say("a", "CONFIG", "SET", "maxclients", 100)
    process.stop()
    stage.connect("b", "redis")
    for name in "ab":
        stage.send(name, "GET", "none")
        stage.hear_nothing(name)
    stage.connect("c", "redis")
    stage.send("c", "SET", "left", "by c")
    stage.connect("c", "redis")
    process.go_on()
    for name in "ab":
        stage.hear(name)
    stage.until_told("redis", "GET", "left", reply=b"$4\r\nby c\r\n")
    process.load_slowly()
    _begin_again(stage, process)
    _try(stage, package, 670.0)
    stage.say("a", "INFO")
    stage.until_told("redis", "GET", "none", reply=b"$-1\r\n")
    stage.call("a", package.renew([(request("kept", "a"), 60.0)])[0])
    stage.load("a", RENEW)
    stage.call("a", package.renew([(request("kept", "a"), 60.0)])[0])
    process.forget_data()
    _begin_again(stage, process)
    stage.load("a", RENEW)
    stage.call("a", package.renew([(request("kept", "a"), 60.0)])[0])
    stage.say("a", "DBSIZE")
    stage.say("a", "CONFIG", "SET", "requirepass", "secret")
    stage.say("a", "DBSIZE")
    stage.connect("b", "redis")
    for words in (("GET", "a"), ("HELLO", 3), ("AUTH", "wrong"), ("AUTH", "default", "secret"), ("GET", "a")):
        stage.say("b", *words)


def _begin_again(stage: Stage, process: RedisProcess) -> None:
    process.kill()
    stage.hear_end("a")
    stage.connect("nobody", "redis")
    process.start()
    stage.connect("a", "redis")
