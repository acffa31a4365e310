"""A primary with a replica and three sentinels: replication, failover, split brain, and sentinels that do not help."""

from __future__ import annotations

from functools import partial

from django_distlock.backends.redis.keys import Keys
from django_distlock.runs import LastRun
from tests.support.sentinel import SERVICE

from .package import INBOX, SCRIPTS, operations, request
from .stages import Stage

SENTINELS = [f"sentinel {number}" for number in range(3)]
QUESTION = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)


def one_primary(stage: Stage) -> None:
    for name in ("server 0", "server 1", *SENTINELS):
        stage.connect(name, name)
    _ask_sentinels(stage)
    _replicate(stage)
    _lose_replica(stage)
    _fail_over(stage)
    _come_back(stage)
    _die(stage)
    _lose_sentinels(stage)


def _ask_sentinels(stage: Stage) -> None:
    name = "sentinel 0"
    stage.until_told(name, "SENTINEL", "CKQUORUM", SERVICE, reply=lambda reply: reply.startswith(b"+OK 3"))
    stage.say(name, "HELLO", 2)
    stage.say(name, "PING")
    stage.say(name, "CLIENT", "SETINFO", "LIB-NAME", "redis-py")
    stage.say(name, *QUESTION)
    stage.until_told(name, "SENTINEL", "REPLICAS", SERVICE, reply=lambda reply: b"$5\r\nslave\r\n" in reply)
    _describe(stage, name)
    stage.say(name, "SENTINEL", "SENTINELS", SERVICE)
    stage.say(name, "SENTINEL", "MASTERS")
    stage.say(name, "SENTINEL", "CKQUORUM", SERVICE)
    for question in (
        "GET-MASTER-ADDR-BY-NAME",
        "MASTER",
        "REPLICAS",
        "SENTINELS",
        "FAILOVER",
        "CKQUORUM",
        "FROBNICATE",
    ):
        stage.say(name, "SENTINEL", question, "another")
    for words in (("GET", "key"), ("SELECT", 0), ("TIME",), ("AUTH", "secret"), ("ROLE",)):
        stage.say(name, *words)


def _describe(stage: Stage, name: str) -> None:
    stage.say(name, "SENTINEL", "MASTER", SERVICE)
    stage.say(name, "SENTINEL", "REPLICAS", SERVICE)


def _replicate(stage: Stage) -> None:
    package = operations(Keys("lock"))
    mine, other = request("name", "a"), request("name", "b", inbox=INBOX)
    stage.load("server 0", *SCRIPTS)
    stage.call("server 0", package.acquire(mine, queue=False))
    stage.call("server 0", package.acquire(other, queue=True))
    stage.say("server 0", "SET", "last", 1)
    stage.until_told("server 1", "GET", "last", reply=b"$1\r\n1\r\n")
    for command in (*package.look([["name"]]), *package.count_waiters(["name"])):
        words = command.packed.decode().split("\r\n")[2::2]
        stage.say("server 1", *words)
    stage.say("server 1", "SET", "last", 2)
    stage.call("server 1", package.acquire(other, queue=True))
    stage.load("server 1", *SCRIPTS)
    stage.call("server 1", package.acquire(mine, queue=False))
    stage.call("server 1", package.acquire(request("name", "z"), queue=False))
    stage.call("server 1", *package.release(other, cooldown=0.0, force=False))
    stage.call("server 1", package.renew([(request("name", "z"), 60.0)])[0])
    stage.call("server 1", package.claim_run("task", LastRun(1.0), LastRun(2.0), 60.0, 60.0, 1.0))
    for name in ("server 0", "server 1"):
        stage.say(name, "ROLE")
        stage.say(name, "INFO")
        stage.say(name, "HELLO", 2)
    stage.connect("ears", "server 1")
    stage.say("ears", "SUBSCRIBE", "news")
    stage.say("server 0", "PUBLISH", "news", "hear")
    stage.hear("ears")


def _lose_replica(stage: Stage) -> None:
    """A primary with too few of them takes no writes."""
    package = operations(Keys("lock"))
    stage.say("server 0", "CONFIG", "SET", "min-replicas-max-lag", 1)
    stage.say("server 0", "CONFIG", "SET", "min-replicas-to-write", 1)
    stage.until_told("server 0", "SET", "last", 1, reply=b"+OK\r\n")
    stage.processes["server 1"].stop()
    stage.until_told("server 0", "SET", "last", 1, reply=lambda reply: reply.startswith(b"-NOREPLICAS"))
    stage.call("server 0", package.acquire(request("new", "a"), queue=False))
    stage.call("server 0", *package.release(request("name", "z"), cooldown=0.0, force=False))
    stage.say("server 0", "GET", "last")
    stage.processes["server 1"].go_on()
    stage.until_told("server 0", "SET", "last", 1, reply=b"+OK\r\n")
    stage.say("server 0", "CONFIG", "SET", "min-replicas-to-write", 0)
    stage.until_told("sentinel 0", "SENTINEL", "REPLICAS", SERVICE, reply=lambda reply: b"$5\r\nslave\r\n" in reply)


def _fail_over(stage: Stage) -> None:
    """The primary hangs; a sentinel gives its place to the replica, and sends the clients of that away."""
    stage.say("server 0", "SET", "last", 3)
    stage.until_told("server 1", "GET", "last", reply=b"$1\r\n3\r\n")
    stage.connect("events", "sentinel 1")
    stage.say("events", "SUBSCRIBE", "+switch-master")
    stage.processes["server 0"].stop()
    stage.send("server 0", "GET", "last")
    stage.hear_nothing("server 0")
    _wait_for(stage, "server 1")
    stage.hear("events")
    stage.hear_end("server 1")
    stage.hear_end("ears")
    stage.connect("server 1", "server 1")
    stage.say("server 1", "GET", "last")
    stage.say("server 1", "SET", "last", 4)
    stage.say("server 1", "ROLE")


def _wait_for(stage: Stage, primary: str) -> None:
    """Until all sentinels name it and are done with the failover."""
    expected = partial(_names, stage.port(primary))
    for name in SENTINELS:
        stage.until_told(name, "SENTINEL", "MASTER", SERVICE, reply=expected)
        stage.say(name, *QUESTION)
    stage.say(SENTINELS[0], "SENTINEL", "MASTER", SERVICE)


def _names(port: int, reply: bytes) -> bool:
    return b"port\r\n$%d\r\n%d\r\n" % (len(str(port)), port) in reply and b"flags\r\n$6\r\nmaster\r\n" in reply


def _come_back(stage: Stage) -> None:
    """The former primary takes writes until a sentinel makes it a replica; then they are gone."""
    stage.processes["server 0"].go_on()
    stage.hear("server 0")
    stage.say("server 0", "SET", "last", "lost")
    stage.say("server 0", "GET", "last")
    stage.hear_end("server 0")
    stage.until_told("server 0", "GET", "last", reply=b"$1\r\n4\r\n")
    stage.connect("server 0", "server 0")
    stage.say("server 0", "SET", "last", 5)
    stage.until_told("server 0", "ROLE", reply=lambda reply: b"connected" in reply)
    stage.say("server 0", "ROLE")
    stage.until_told(
        "sentinel 0", "SENTINEL", "REPLICAS", SERVICE, reply=lambda reply: b"$2\r\nok\r\n" in reply
    )  # fmt: skip
    _describe(stage, "sentinel 0")


def _die(stage: Stage) -> None:
    stage.processes["server 1"].kill()
    stage.hear_end("server 1")
    stage.connect("nobody", "server 1")
    _wait_for(stage, "server 0")
    stage.hear_end("server 0")
    stage.connect("server 0", "server 0")
    stage.say("server 0", "SET", "last", 6)
    stage.until_told(
        "sentinel 0", "SENTINEL", "REPLICAS", SERVICE, reply=lambda reply: b"s_down,slave,disconnected" in reply
    )
    _describe(stage, "sentinel 0")
    stage.say("sentinel 0", "SENTINEL", "FAILOVER", SERVICE)
    stage.processes["server 1"].start()
    stage.until_told("server 1", "PING", reply=b"+PONG\r\n")
    stage.connect("server 1", "server 1")
    stage.say("server 1", "GET", "last")
    stage.hear_end("server 1")
    stage.until_told("server 1", "GET", "last", reply=b"$1\r\n6\r\n")


def _lose_sentinels(stage: Stage) -> None:
    stage.processes["sentinel 2"].kill()
    stage.hear_end("sentinel 2")
    stage.connect("nobody", "sentinel 2")
    stage.say("sentinel 1", *QUESTION)
    stage.say("sentinel 0", "SENTINEL", "REMOVE", SERVICE)
    stage.say("sentinel 0", *QUESTION)
    stage.say("sentinel 0", "SENTINEL", "MASTER", SERVICE)
    stage.say("sentinel 0", "SENTINEL", "REMOVE", SERVICE)
    stage.say("sentinel 0", "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", stage.port("server 0"), 2)
    stage.say("sentinel 0", *QUESTION)
    stage.say("sentinel 0", "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", stage.port("server 0"), 2)
    stage.processes["sentinel 1"].stop()
    stage.send("sentinel 1", *QUESTION)
    stage.hear_nothing("sentinel 1")
    stage.processes["sentinel 1"].go_on()
    stage.hear("sentinel 1")
