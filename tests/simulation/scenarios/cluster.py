"""A Cluster of three primaries with a replica each: redirections, slots that move, failover, and too few nodes."""

from __future__ import annotations

from django_distlock.backends.redis.keys import ClusterKeys, slot_of
from django_distlock.backends.redis.scripts import Command, pack

from .package import SCRIPTS, operations, request
from .stages import Stage

KEYS = ClusterKeys("lock", 64)
SHARE = 16384 // 3 + 1
NODES = [f"node {number}" for number in range(6)]  # three primaries, then the replica of each


def one_cluster(stage: Stage) -> None:
    for name in NODES:
        stage.connect(name, name)
        stage.load(name, *SCRIPTS)
    _ask(stage)
    _lock(stage)
    _read_at_replica(stage)
    _move_slot(stage)
    _fail_over_by_command(stage)
    _lose_primary(stage)
    _lose_majority(stage)


def name_on(node: int, number: int = 0) -> str:
    """The name of a lock whose slot that primary owns at first; each number has another slot."""
    names = (f"n{index}" for index in range(1000))
    found: dict[int, str] = {}
    for name in names:
        slot = slot_of(KEYS.lease(name))
        if slot // SHARE == node:
            found.setdefault(slot, name)
    return list(found.values())[number]


def _ask(stage: Stage) -> None:
    stage.say("node 0", "HELLO", 2)
    stage.say("node 3", "HELLO", 2)
    stage.say("node 0", "SELECT", 1)
    stage.say("node 0", "CLUSTER", "WHAT")
    stage.say("node 0", "CLUSTER", "KEYSLOT", KEYS.lease("name"))
    stage.say("node 0", "CLUSTER", "KEYSLOT", "{}name")
    for name in ("node 0", "node 3"):
        for words in (("CLUSTER", "SLOTS"), ("CLUSTER", "NODES"), ("CLUSTER", "INFO"), ("INFO",), ("ROLE",)):
            stage.say(name, *words)
    stage.say("node 0", "REPLICAOF", "NO", "ONE")


def _lock(stage: Stage) -> None:
    package = operations(KEYS)
    mine, far = name_on(0), name_on(1)
    stage.call("node 0", package.acquire(request(mine, "a"), queue=False))
    stage.call("node 0", package.acquire(request(far, "a"), queue=False))
    stage.call("node 0", Command(pack("EVALSHA", "0" * 40, 5, *KEYS.of_lock(far), "x")))
    for command in (*package.look([[mine], [far]]), *package.holders([[mine], [far], [mine, far]])):
        stage.say("node 0", *command.packed.decode().split("\r\n")[2::2])
    stage.say("node 0", "SPUBLISH", _inbox(mine), "?")
    stage.say("node 0", "SPUBLISH", _inbox(far), "?")
    stage.say("node 0", "PUBLISH", "news", "?")
    stage.connect("ears", "node 0")
    stage.say("ears", "SSUBSCRIBE", _inbox(mine))
    stage.say("ears", "SSUBSCRIBE", _inbox(far))
    stage.say("node 0", "SPUBLISH", _inbox(mine), "?")
    stage.hear("ears")
    for number, keys in ((0, (KEYS.lease(far),)), (1, (KEYS.lease(mine), KEYS.lease(far)))):
        text = "return redis.call('GET', KEYS[2] or ARGV[1] or KEYS[1])"
        stage.say("node 0", "EVAL", text, number, *keys)
    others = [KEYS.lease(name_on(0, number)) for number in range(2)]
    stage.say("node 0", "EVAL", "redis.call('GET', ARGV[1]) return redis.call('GET', ARGV[2])", 0, *others)
    stage.say("node 0", "EVAL", "return redis.call('GET', ARGV[1])", 1, *others)
    stage.say("node 0", "EVAL", "return redis.call('SPUBLISH', ARGV[1], '?')", 0, _inbox(far))


def _inbox(name: str) -> str:
    return KEYS.shard_inbox("process", KEYS.shard_of(name))


def _read_at_replica(stage: Stage) -> None:
    package, mine = operations(KEYS), name_on(0)
    lease = KEYS.lease(mine)
    stage.until(lambda: mine.encode() in stage.ask("node 3", ["READONLY"], ["SCAN", 0]))
    stage.say("node 3", "GET", lease)
    stage.call("node 3", package.renew([(request(mine, "a"), 60.0)])[0])
    stage.connect("ears of replica", "node 3")
    stage.say("ears of replica", "SSUBSCRIBE", _inbox(mine))
    stage.say("node 0", "SPUBLISH", _inbox(mine), "?")
    stage.hear("ears of replica")
    stage.hear("ears")
    stage.say("node 3", "READONLY")
    stage.say("node 3", "PTTL", lease)
    stage.say("node 3", "SET", lease, "value")
    stage.call("node 3", package.renew([(request(mine, "z"), 60.0)])[0])
    stage.call("node 3", package.renew([(request(mine, "a"), 90.0)])[0])
    stage.say("node 3", "READWRITE")
    stage.say("node 3", "GET", lease)


def _move_slot(stage: Stage) -> None:
    package, mine = operations(KEYS), name_on(0)
    lease, queue, _, counter, _ = KEYS.of_lock(mine)
    slot = slot_of(lease)
    ids = [stage.ask(name, ["CLUSTER", "MYID"]).split(b"\r\n")[1] for name in NODES]
    stage.say("node 1", "CLUSTER", "SETSLOT", slot, "IMPORTING", "0" * 40)
    stage.say("node 0", "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[1])
    stage.say("node 1", "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[0])
    stage.say("node 0", "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[3])
    stage.say("node 3", "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    stage.say("node 1", "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    stage.say("node 0", "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    stage.say("node 0", "CLUSTER", "NODES")
    stage.say("node 1", "CLUSTER", "NODES")
    stage.say("node 0", "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    for name in ("node 0", "node 1"):
        for is_asking in (False, True):
            _use(stage, name, mine, is_asking=is_asking)
    for key in (lease, counter):
        stage.say("node 0", "MIGRATE", "127.0.0.1", stage.port("node 1"), "", 0, 5000, "KEYS", key)
        _use(stage, "node 0", mine, is_asking=False)
        _use(stage, "node 1", mine, is_asking=True)
    stage.say("node 0", "MIGRATE", "127.0.0.1", stage.port("node 1"), "", 0, 5000, "KEYS", lease)
    stage.say("node 0", "CLUSTER", "COUNTKEYSINSLOT", slot)
    stage.say("node 1", "CLUSTER", "COUNTKEYSINSLOT", slot)
    for name in ("node 1", "node 0", "node 2"):
        stage.say(name, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
    stage.hear("ears")
    _wait_for_owner(stage, mine, "node 1")
    stage.hear("ears of replica")
    for name in NODES:
        stage.say(name, "GET", lease)
        stage.call(name, package.renew([(request(mine, "a"), 90.0)])[0])
    stage.say("node 0", "CLUSTER", "SLOTS")
    stage.say("node 1", "EXISTS", queue)


def _use(stage: Stage, name: str, lock: str, *, is_asking: bool) -> None:
    """What the package sends for a lock whose slot is between two nodes."""
    package = operations(KEYS)
    lease, queue, *_ = KEYS.of_lock(lock)
    commands = [
        package.renew([(request(lock, "a"), 60.0)])[0],
        package.acquire(request(lock, "b"), queue=False),
        *package.release(request(lock, "b"), cooldown=0.0, force=False),
    ]
    for command in commands:
        if is_asking:
            stage.say(name, "ASKING")
        stage.call(name, command)
    for words in (("GET", lease), ("ZCARD", queue), ("MGET", lease, queue), ("SPUBLISH", _inbox(lock), "?")):
        if is_asking:
            stage.say(name, "ASKING")
        stage.say(name, *words)
    stage.say(name, "GET", lease)


def _fail_over_by_command(stage: Stage) -> None:
    """The replica takes over without a loss."""
    package, name = operations(KEYS), name_on(2)
    stage.call("node 2", package.acquire(request(name, "a"), queue=False))
    stage.connect("ears", "node 2")
    stage.say("ears", "SSUBSCRIBE", _inbox(name))
    stage.say("node 2", "CLUSTER", "FAILOVER")
    stage.say("node 5", "CLUSTER", "FAILOVER", "WHAT")
    stage.say("node 5", "CLUSTER", "FAILOVER")
    stage.until_told("node 5", "ROLE", reply=lambda reply: b"master" in reply)
    stage.hear("ears")
    _wait_for_owner(stage, name, "node 5")
    stage.until_told("node 2", "ROLE", reply=lambda reply: b"connected" in reply)
    _show(stage, name)
    stage.say("node 2", "ROLE")


def _wait_for_owner(stage: Stage, name: str, owner: str) -> None:
    """Until all nodes that run know it."""
    lease = KEYS.lease(name)
    moved = b"-MOVED %d 127.0.0.1:%d\r\n" % (slot_of(lease), stage.port(owner))
    for node in NODES:
        if stage.is_running(node):
            stage.until_told(node, "GET", lease, reply=lambda reply: reply.startswith(b"$") or reply == moved)


def _show(stage: Stage, name: str) -> None:
    running = [node for node in NODES if stage.is_running(node)]
    stage.until(lambda: all(b":%d" % stage.port(node) in stage.ask("node 0", ["CLUSTER", "SLOTS"]) for node in running))
    for node in running:
        stage.say(node, "GET", KEYS.lease(name))
    stage.say("node 0", "CLUSTER", "SLOTS")
    stage.say("node 0", "CLUSTER", "NODES")
    stage.say("node 0", "CLUSTER", "INFO")


def _lose_primary(stage: Stage) -> None:
    name = name_on(2)
    stage.processes["node 5"].kill()
    stage.hear_end("node 5")
    stage.connect("nobody", "node 5")
    stage.until_told("node 2", "ROLE", reply=lambda reply: b"master" in reply)
    _wait_for_owner(stage, name, "node 2")
    stage.until_told("node 0", "CLUSTER", "NODES", reply=lambda reply: b"master,fail -" in reply)
    _show(stage, name)
    stage.call("node 2", operations(KEYS).renew([(request(name, "a"), 60.0)])[0])
    stage.processes["node 5"].start()
    stage.until_told("node 5", "ROLE", reply=lambda reply: b"connected" in reply)
    stage.connect("node 5", "node 5")
    stage.say("node 5", "ROLE")
    _show(stage, name)


def _lose_majority(stage: Stage) -> None:
    """A primary that sees none of the others serves nobody."""
    name, far = name_on(0, 1), name_on(1)
    lease = KEYS.lease(name)
    for node in ("node 1", "node 2", "node 4", "node 5"):
        stage.processes[node].stop()
    stage.until_told("node 0", "GET", lease, reply=lambda reply: reply.startswith(b"-CLUSTERDOWN"))
    for command in operations(KEYS).renew([(request(each, "a"), 60.0) for each in (name, far)]):
        stage.call("node 0", command)
    stage.say("node 0", "MGET", lease, KEYS.lease(far))
    for each in (name, far):
        stage.say("node 0", "SPUBLISH", _inbox(each), "?")
    stage.connect("ears", "node 0")
    for each in (name, far):
        stage.say("ears", "SSUBSCRIBE", _inbox(each))
    stage.say("node 0", "EVAL", "return redis.call('GET', ARGV[1])", 0, lease)
    stage.say("node 0", "CLUSTER", "INFO")
    stage.say("node 0", "PING")
    for node in ("node 1", "node 2", "node 4", "node 5"):
        stage.processes[node].go_on()
    stage.until_told("node 0", "GET", lease, reply=b"$-1\r\n")
    stage.call("node 0", operations(KEYS).acquire(request(name, "a"), queue=False))
