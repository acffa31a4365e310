"""The models of servers answer as real servers do, word for word."""

from __future__ import annotations

import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from django_distlock.backends.redis.scripts import pack
from example_project.valkey import Valkey
from tests.support.cluster import Cluster as RealCluster
from tests.support.sentinel import SERVICE, Watched

from .engine.network import Network
from .engine.scheduler import Scheduler
from .scenarios.cluster import one_cluster
from .scenarios.one_redis import one_redis
from .scenarios.sentinel import one_primary
from .scenarios.stages import ModelProcess, ModelStage, RealStage, assert_same
from .scenarios.wires import RealWire, exchanged
from .servers.redis_cluster import Cluster
from .servers.replication import ReplicatedServer
from .servers.sentinels import watched

LOADING = 1.0  # seconds, as are all here
DOWN_AFTER = 3.0
NODE_TIMEOUT = 4.0


class RealRedis:
    def __init__(self, folder: Path) -> None:
        self._data = folder / "data"
        self._data.mkdir()
        self._arguments = (
            "--dir",
            str(self._data),
            "--busy-reply-threshold",
            "20",
            "--enable-protected-configs",
            "yes",
        )
        self.server = Valkey(*self._arguments, folder=folder)
        self._forgets = self._is_slow = False

    def _wire(self) -> RealWire:
        return RealWire(self.server.socket)

    def start(self) -> None:
        if self._forgets:
            (self._data / "dump.rdb").unlink(missing_ok=True)
        slow = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        self.server._arguments = (*self._arguments, *(slow if self._is_slow else ()))
        self._is_slow = False
        self.server.start()

    def kill(self) -> None:
        with self._wire() as wire:
            if self._is_slow:
                for number in range(int(LOADING / 0.02)):
                    exchanged(wire, "SET", f"filler{number}", secrets.token_hex(1024))
            exchanged(wire, "SAVE")
        self.server.process.kill()
        self.server.process.wait()

    def stop(self) -> None:
        self.server.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.server.process.send_signal(signal.SIGCONT)

    def forget_data(self) -> None:
        self._forgets = True

    def load_slowly(self) -> None:
        self._is_slow = True

    def be_busy(self) -> None:
        with self._wire() as busy, self._wire() as wire:
            busy.send(pack("EVAL", "while true do end", 0))
            while not exchanged(wire, "ECHO", "").startswith(b"-BUSY"):
                time.sleep(0.01)

    def lose_disk(self) -> None:
        shutil.rmtree(self._data)
        with self._wire() as wire:
            exchanged(wire, "CONFIG", "SET", "save", "3600 1")
            exchanged(wire, "BGSAVE")
            while not exchanged(wire, "PING").startswith(b"-MISCONF"):
                time.sleep(0.01)

    def mend_disk(self) -> None:
        self._data.mkdir()
        with self._wire() as wire:
            exchanged(wire, "CONFIG", "SET", "save", "")
            exchanged(wire, "CONFIG", "SET", "dir", str(self._data))


class ModelRedis(ModelProcess):
    def __init__(self, server: ReplicatedServer) -> None:
        super().__init__(server)
        self._forgets = self._is_slow = False

    def start(self) -> None:
        self.server.start(keeps_data=not self._forgets)
        if self._is_slow:
            self.server.load(LOADING)
        self._is_slow = False

    def forget_data(self) -> None:
        self._forgets = True

    def load_slowly(self) -> None:
        self._is_slow = True

    def be_busy(self) -> None:
        self.server.states.add("BUSY")

    def lose_disk(self) -> None:
        self.server.states.add("MISCONF")

    def mend_disk(self) -> None:
        self.server.states.discard("MISCONF")


def test_one_redis(tmp_path: Path) -> None:
    process = RealRedis(tmp_path)
    real = RealStage({"redis": process}, {"redis": process.server.socket})
    process.start()
    try:
        one_redis(real, process)
    finally:
        real.close()
        process.server.stop()
    scheduler = Scheduler(1)
    server = ReplicatedServer(Network(scheduler), ("127.0.0.1", 6379))
    model = ModelStage(scheduler, {"redis": server})
    one_redis(model, ModelRedis(server))
    assert_same(real, model, at_least=200)


@pytest.mark.seconds(35)
@pytest.mark.slow
def test_replication_and_sentinels() -> None:
    # A busy machine must not make them take anybody for dead.
    with Watched(sentinel=[f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER * 1000:.0f}"]) as given:
        processes = {f"server {number}": server for number, server in enumerate(given.servers)}
        processes |= {f"sentinel {number}": sentinel for number, sentinel in enumerate(given.sentinels)}
        real = RealStage(processes, {name: process.port for name, process in processes.items()})
        try:
            one_primary(real)
        finally:
            real.close()
    model = _model_of_sentinels({name: process.port for name, process in processes.items()})
    one_primary(model)
    assert_same(real, model, at_least=100)


def _model_of_sentinels(ports: Mapping[str, int]) -> ModelStage:
    scheduler = Scheduler(1)
    network = Network(scheduler)
    places = {name: ("127.0.0.1", port) for name, port in ports.items()}
    servers = {name: ReplicatedServer(network, place) for name, place in places.items() if name.startswith("server")}
    primary, replica = servers.values()
    replica.follow(primary.address)
    others = [place for name, place in places.items() if name.startswith("sentinel")]
    sentinels = watched(network, SERVICE, [primary, replica], others, down_after=DOWN_AFTER, failover_timeout=2.0)
    scheduler.run(5.0)
    named = {f"sentinel {number}": sentinel for number, sentinel in enumerate(sentinels)}
    return ModelStage(scheduler, {**servers, **named})


@pytest.mark.seconds(22)
@pytest.mark.slow
def test_cluster() -> None:
    with RealCluster() as given:
        for node in given.nodes:
            node.client.config_set("cluster-node-timeout", int(NODE_TIMEOUT * 1000))
        # Those that follow the first primary, the second and the third, in this order.
        replicas = [given.replica_of(primary) for primary in given.nodes[:3]]
        nodes = {f"node {number}": node for number, node in enumerate([*given.nodes[:3], *replicas])}
        real = RealStage(nodes, {name: node.port for name, node in nodes.items()})
        try:
            one_cluster(real)
        finally:
            real.close()
    scheduler = Scheduler(1)
    places = [("127.0.0.1", node.port) for node in nodes.values()]
    cluster = Cluster(Network(scheduler), places, node_timeout=NODE_TIMEOUT)
    scheduler.run(5.0)
    model = ModelStage(scheduler, dict(zip(nodes, cluster.nodes, strict=True)))
    one_cluster(model)
    assert_same(real, model, at_least=200)
