"""Fencing numbers grow over any two majorities: the real algorithm and scripts on real nodes, with messages lost.

Requests and replies are lost between the algorithm and the nodes, nodes lose their data and come back after the
longest TTL, and the clocks of clients differ.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import redis

from django_distlock import LockBackendError
from django_distlock.backends.redis.keys import Keys
from django_distlock.backends.redlock import algorithm
from django_distlock.backends.redlock.algorithm import Redlock, StaleConnections
from django_distlock.backends.redlock.messages import NOT_ASKED, SCRIPT_LOADS, Exchange
from django_distlock.types import Grant, LockInfo
from tests.support.tools import lock_request

pytestmark = pytest.mark.seconds(5)

SIZE = 5
TTL = 30_000_000  # µs of the made-up time
SKEW = 5_000_000  # µs by which the clocks of clients differ at most, and less than the TTL


class SkewedClock(algorithm.FenceClock):
    """Proposals by a clock that the test sets."""

    def __init__(self, world, skew):
        super().__init__()
        self._world, self._skew = world, skew

    def propose(self):
        self._last = max(self._last + 1, self._world.now + self._skew)
        return self._last


class World:
    """Five servers, and a network that loses what the dice say."""

    def __init__(self, servers, dice, request_lost=0.25, reply_lost=0.15):
        self.dice, self.request_lost, self.reply_lost = dice, request_lost, reply_lost
        self.now = 1_700_000_000_000_000
        self.away_until = [0] * SIZE
        self.fan_outs = 0
        self.restarts = 0
        self.connections = [redis.UnixDomainSocketConnection(path=str(server.socket)) for server in servers]
        for connection in self.connections:
            connection.connect()
            self.sent(connection, b"".join(SCRIPT_LOADS), len(SCRIPT_LOADS))

    def close(self):
        for connection in self.connections:
            connection.disconnect()

    @staticmethod
    def sent(connection, packed, replies):
        connection.send_packed_command([packed], check_health=False)
        return [connection.read_response(disable_decoding=True) for _ in range(replies)]

    def client(self):
        def explain(failures):
            return LockBackendError(f"{failures}")

        redlock = Redlock("default", Keys("lock"), SIZE, explain, lambda lock_request: False)
        redlock.fences = SkewedClock(self, self.dice.randint(-SKEW, SKEW))
        return redlock

    def restart(self, node):
        """Without data; it stays away for the longest TTL."""
        self.sent(self.connections[node], b"*1\r\n$8\r\nFLUSHALL\r\n", 1)
        self.away_until[node] = self.now + TTL
        self.restarts += 1

    def run(self, steps):
        try:
            fan_out = next(steps)
            while True:
                self.fan_outs += 1
                nodes = list(range(SIZE))
                self.dice.shuffle(nodes)
                exchanges = {node: self.exchange(node, fan_out.message(node, self.connections[node])) for node in nodes}
                fan_out = steps.send([exchanges[node] for node in range(SIZE)])
        except StopIteration as end:
            return end.value

    def exchange(self, node, request):
        if request is None:
            return NOT_ASKED
        exchange = Exchange(request.replies)
        if self.now < self.away_until[node] or self.dice.random() < self.request_lost:
            exchange.fail(redis.ConnectionError("the request was lost"))
            return exchange
        replies = self.sent(self.connections[node], *request)
        if self.dice.random() < self.reply_lost:
            exchange.fail(redis.ConnectionError("the reply was lost"))
        else:
            for reply in replies:
                exchange.take(reply)
        return exchange

    @staticmethod
    def refused():
        exchange = Exchange(1)
        exchange.fail(redis.ConnectionError("refused"))
        return exchange

    def free(self, name):
        """What is held is released, or runs out: nobody believes in it any more."""
        self.now += 1_000
        for connection in self.connections:
            self.sent(connection, b"*2\r\n$3\r\nDEL\r\n$%d\r\nlock:%s\r\n" % (5 + len(name), name.encode()), 1)


def numbers_of(world, grants, *, with_restarts):
    clients = [world.client() for _ in range(4)]
    numbers = []
    while len(numbers) < grants:
        world.now += world.dice.randint(0, 2_000_000 if with_restarts else 1_000)
        if with_restarts and world.dice.random() < 0.05 and not any(world.now < until for until in world.away_until):
            world.restart(world.dice.randrange(SIZE))
        mine = lock_request()
        try:
            answer = world.run(world.dice.choice(clients).acquire(mine, True))
        except LockBackendError:
            world.free(mine.name)
            continue
        except StaleConnections as error:  # pragma: no cover - only asked for while another try follows
            raise AssertionError from error
        if isinstance(answer, Grant):
            numbers.append(answer.fence)
            world.free(mine.name)
    return numbers


@pytest.fixture
def world(five_valkeys, request):
    seed = getattr(request, "param", random.randrange(10**9))
    print(f"seed {seed}")
    world = World(five_valkeys, random.Random(seed))
    yield world
    world.close()


def is_growing(numbers):
    return all(earlier < later for earlier, later in pairwise(numbers))


@pytest.mark.seconds(11)
@pytest.mark.parametrize("with_restarts", [False, True])
def test_numbers_grow_whatever_is_lost(world, with_restarts):
    """S12 on a quorum."""
    numbers = numbers_of(world, 600, with_restarts=with_restarts)
    assert is_growing(numbers)
    assert bool(world.restarts) is with_restarts
    print(f"{world.fan_outs / 600:.2f} fan-outs per grant, undoing included")


def test_without_a_majority_that_knows_the_number_they_go_back(world, monkeypatch):
    """The second round is needed, and this test would notice."""
    monkeypatch.setattr(algorithm, "is_known", lambda *_: True)
    assert not is_growing(numbers_of(world, 600, with_restarts=False))


def test_with_the_smallest_answer_they_go_back(world, monkeypatch):
    monkeypatch.setattr(algorithm, "fence_of", lambda numbers, majority: min(numbers))
    assert not is_growing(numbers_of(world, 600, with_restarts=False))


def test_a_number_that_no_majority_can_be_told_grants_nothing(five_valkeys):
    """Three nodes disagree about the number; before the second round somebody else has what they granted."""
    world = World(five_valkeys, random.Random(1), request_lost=0, reply_lost=0)
    try:
        mine, client, other = lock_request(), world.client(), lock_request()
        steps = client.acquire(mine, True)
        first = next(steps)
        exchanges = [world.exchange(node, first.message(node, None)) for node in range(3)]
        ahead = Exchange(1)
        ahead.take(exchanges[0].replies[0] + 1)
        told = steps.send([*exchanges[:2], ahead, *(world.refused() for _ in range(2))])
        for node in range(3):
            world.sent(world.connections[node], b"*2\r\n$3\r\nDEL\r\n$9\r\nlock:name\r\n", 1)
        assert isinstance(world.run(world.client().acquire(other, True)), Grant)
        exchanges = [world.exchange(node, told.message(node, None)) for node in range(5)]
        try:
            while True:
                given_back = steps.send(exchanges)
                exchanges = [world.exchange(node, given_back.message(node, None)) for node in range(5)]
        except StopIteration as end:
            busy = end.value
        assert isinstance(busy, LockInfo)
        assert busy.token == other.token
    finally:
        world.close()


def test_a_request_that_its_release_overtakes_gets_nothing(five_valkeys):
    """S4. On one connection it cannot be overtaken, so no token is retired there for nothing."""
    world = World(five_valkeys, random.Random(1), request_lost=0, reply_lost=0)
    try:
        mine, client = lock_request(), world.client()
        steps = client.acquire(mine, True)
        request = next(steps).message(0, None)
        on_its_way = Exchange(1, connection="first")
        with pytest.raises(StopIteration):
            steps.send([on_its_way, *(world.exchange(node, request) for node in range(1, 5))])
        given_back = next(client.release(mine, 0.0, True, False))
        for node in range(5):
            world.exchange(node, given_back.message(node, "second"))
        world.exchange(0, request)
        assert world.sent(world.connections[0], b"*2\r\n$3\r\nGET\r\n$9\r\nlock:name\r\n", 1) == [None]
        assert given_back.message(0, "first") == given_back.message(1, "second") != given_back.message(0, "second")
    finally:
        world.close()


def test_a_quiet_network_needs_one_fan_out(five_valkeys):
    world = World(five_valkeys, random.Random(1), request_lost=0, reply_lost=0)
    try:
        numbers = numbers_of(world, 200, with_restarts=False)
    finally:
        world.close()
    assert is_growing(numbers)
    assert world.fan_outs == 200
