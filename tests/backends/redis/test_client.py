"""Commands on their way when faults meet in an order that no server can be made to show at will."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from redis.exceptions import ConnectionError, NoScriptError, ResponseError, TimeoutError

from django_distlock.backends.common.attempts import Attempts, InDoubt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.breaker import ServerBreaker
from django_distlock.backends.redis.client import AsyncClient, Client
from django_distlock.backends.redis.config import Location
from django_distlock.backends.redis.connection import TcpConnection
from django_distlock.backends.redis.errors import NotSent
from django_distlock.backends.redis.replies import Reply
from django_distlock.backends.redis.scripts import Command, pack
from django_distlock.utils.clock import clock
from tests.support.inside import make_silent, permits_of
from tests.support.tools import PATIENCE, lock_request

COMMAND = Command(pack("PING"))


class Connection:
    """Its replies are lost."""

    def exchange(self, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        raise ConnectionError("the reply was lost")

    def can_read(self, timeout: float = 0) -> bool:
        return True

    def disconnect(self) -> None: ...


class AsyncConnection:
    _writer = None

    async def exchange(self, *_: Any) -> None:
        raise ConnectionError("the reply was lost")

    async def disconnect(self, nowait: bool = False) -> None: ...


class Interrupted(AsyncConnection):
    """Where a cancellation meets a broken connection, asyncio's wait_for on Python 3.11 tells of the second alone."""

    async def exchange(self, *_: Any) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise ConnectionError("reset") from None


class Service:
    """A place where another server may take over."""

    failover_timeout, credentials = 30.0, None

    def __init__(self, connection: Any, at_first: Callable[[], Any] = lambda: None) -> None:
        self.arguments = {"socket_timeout": 0.3, "socket_connect_timeout": 0.3}
        self._connection, self._at_first = connection, at_first
        self.asked = 0

    def connected(self, **_: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            self._at_first()
        return self._connection

    async def aconnected(self, **_: Any) -> Any:
        return self.connected()


def parts(service: Service, connections: int = 1) -> tuple[Any, ...]:
    """Of its client, whose calls have no more than that many connections."""
    location = Location("redis://service", TcpConnection, service.arguments)
    return service, connections, 0.3, Timing(), ServerBreaker("default", location, 0.3, Timing(), 30.0)


class TestNoConnectionIsFree:
    """S3, S4: what was sent before is not forgotten."""

    def test_for_the_repetition_of_what_went_unanswered(self):
        taken = []
        thread = threading.Thread(target=lambda: taken.append(permits_of(client).get()), daemon=True)
        client = Client(*parts(Service(Connection(), thread.start)))
        with pytest.raises(InDoubt) as caught:
            client.send([COMMAND], deadline=clock() + 1)
        assert "all 1 connections wait for an answer" in str(caught.value)
        thread.join()

    def test_for_the_repetition_by_a_task(self):
        async def main():
            others = []

            def wait_for_permit():
                others.append(asyncio.create_task(permits_of(client).wait(None)))

            client = AsyncClient(*parts(Service(AsyncConnection(), wait_for_permit)))
            with pytest.raises(InDoubt) as caught:
                await client.asend([COMMAND], deadline=clock() + 1)
            assert "all 1 connections wait for an answer" in str(caught.value)
            await others[0]

        asyncio.run(main())

    def test_for_a_first_attempt_it_is_waited_for_as_long_as_for_another_server(self):
        client = Client(*parts(Service(Connection())))
        taken = permits_of(client).get()
        make_silent(client, clock())
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="all 1 connections wait for an answer"):
            client.send([COMMAND], deadline=clock() + 0.9)
        assert 0.85 < time.monotonic() - began < PATIENCE
        permits_of(client).put(taken)

    def test_for_a_task_it_is_waited_for_as_long_as_for_another_server(self):
        async def main():
            client = AsyncClient(*parts(Service(AsyncConnection())))
            assert permits_of(client).take()
            make_silent(client, clock())
            began = time.monotonic()
            with pytest.raises(TimeoutError, match="all 1 connections wait for an answer"):
                await client.asend([COMMAND], deadline=clock() + 0.9)
            assert 0.85 < time.monotonic() - began < PATIENCE

        asyncio.run(main())

    @pytest.mark.parametrize("is_cancelled_first", [True, False])
    def test_what_comes_to_a_task_that_is_cancelled_is_not_lost(self, is_cancelled_first):
        async def main():
            permits = permits_of(AsyncClient(*parts(Service(AsyncConnection()))))
            assert permits.take()
            waiting = asyncio.create_task(permits.wait(None))
            await asyncio.sleep(0)
            steps = [waiting.cancel, permits.put]
            for step in steps if is_cancelled_first else reversed(steps):
                step()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert permits.take()

        asyncio.run(main())


def test_a_cancellation_that_became_an_error_is_one_all_the_same():
    async def main():
        service = Service(Interrupted())
        task = asyncio.create_task(AsyncClient(*parts(service, 5)).asend([COMMAND], deadline=inf))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        assert service.asked == 1

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_no_time_at_all_is_time_for_a_server_nearby(timeout):
    """Renewal has a third of what a lease has left."""
    given = []

    class Noting(Connection):
        def exchange(self, packed: bytes, number: int, timeout: float | None) -> list[Any]:
            given.append(timeout)
            return [1] * number

    client = Client(*parts(Service(Noting())))
    for _ in range(2):  # the second over a connection that stands
        client.send([COMMAND], timeout=timeout)
    assert given == [0.01, 0.01]


@pytest.mark.parametrize(
    ("wait", "lasts"), [(-3.0, Timing.shortest_call), (0.0, Timing.shortest_call), (2.0, 2.0), (60.0, 10.0)]
)
def test_a_call_lasts_as_long_as_its_caller_waits_but_never_so_briefly_that_nothing_is_tried_again(wait, lasts):
    attempts = Attempts(Timing(), step=5.0, longest=10.0, caller_deadline=1000.0 + wait, began=1000.0)
    assert attempts.deadline == 1000.0 + lasts


def test_a_limit_that_is_not_shorter_than_the_sockets_own_changes_nothing():
    """So the first part of the replies may take as long as the rest."""
    given: list[float | None] = []

    class Noting(Connection):
        def exchange(self, packed: bytes, number: int, timeout: float | None) -> list[Any]:
            given.append(timeout)
            return [1]

    client = Client(*parts(Service(Noting())))
    for _ in range(2):
        client.send([COMMAND], timeout=7.0)
    assert given[1] is None


class Forgetful(Connection):
    """Of the two commands it has done one when it finds that its server is of no use any more."""

    def __init__(self) -> None:
        self.exchanges = 0

    def exchange(self, packed: bytes, number: int, timeout: float | None) -> list[Any]:
        self.exchanges += 1
        if self.exchanges == 1:
            return [1, NoScriptError("No matching script.")]
        if self.exchanges == 2:
            raise NotSent("there is another master")
        return [1] * number


class AsyncForgetful(AsyncConnection, Forgetful):
    async def exchange(self, packed: bytes, number: int, timeout: float) -> list[Any]:
        return Forgetful.exchange(self, packed, number, timeout)


def test_a_repetition_that_was_not_sent_leaves_doubt_about_the_rest():
    client = Client(*parts(Service(Forgetful())))
    assert client.send([COMMAND, COMMAND]).in_doubt

    async def main():
        client = AsyncClient(*parts(Service(AsyncForgetful())))
        assert (await client.asend([COMMAND, COMMAND])).in_doubt

    asyncio.run(main())


def test_a_release_that_is_refused_after_it_went_unanswered_is_in_doubt(valkey_locks, monkeypatch):
    """As in a Cluster, where the second attempt may go to another node."""
    refused = Reply([ResponseError("not today")], 0.0)
    refused.in_doubt = True

    async def asend(*_: Any, **__: Any) -> Reply:
        return refused

    monkeypatch.setattr(Client, "send", lambda *_, **__: refused)
    with pytest.raises(InDoubt, match="not today"):
        valkey_locks.release(lock_request())
    monkeypatch.setattr(AsyncClient, "asend", asend)
    with pytest.raises(InDoubt, match="not today"):
        asyncio.run(valkey_locks.arelease(lock_request()))
