"""Commands to a Cluster and their replies: the same as ``Client`` and ``AsyncClient`` for one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from redis.exceptions import ClusterDownError

from ....types import NOT_WAITING
from ....utils.clock import clock, sleep
from ....utils.drive import adrive, drive
from ....utils.threads import start_thread
from ...common.timing import Timing
from ..attempts import ServerAttempts
from ..breaker import ServerBreaker
from ..client import AsyncClient, Client
from ..config import Location
from ..replies import NOTHING, Reply
from ..scripts import Command
from .routing import Address, NodeBatch, NodeResult, RoutedRequest, SlotMap, refresh, slot_of_key


class NodeClient(Client):
    retries_after_pause = False  # the routed request looks for a successor of a node that does not serve


class AsyncNodeClient(AsyncClient):
    retries_after_pause = False


class NodeBreakers(dict[Address, ServerBreaker]):
    """A breaker for each node that is asked, shared by threads and all event loops."""

    def __init__(self, alias: str, location: Location, timeout: float, slots: SlotMap) -> None:
        self._alias, self._location, self._timeout, self._slots = alias, location, timeout, slots

    def __missing__(self, node: Address) -> ServerBreaker:
        where, timing, failover_timeout = self._location.at(*node), self._slots.timing, self._location.failover_timeout
        return self.setdefault(node, ServerBreaker(self._alias, where, self._timeout, timing, failover_timeout))

    def drop_removed(self) -> None:
        """Drop the breakers of nodes that have left the Cluster."""
        for node in list(self):
            if not self._slots.knows(node) and (breaker := self.pop(node, None)):
                breaker.close()


class _ClusterClient:
    def __init__(
        self, location: Location, slots: SlotMap, max_connections: int, timeout: float, breakers: NodeBreakers
    ) -> None:
        self._location, self._slots, self._breakers = location, slots, breakers
        self._max_connections, self._timeout = max_connections, timeout

    def _request(
        self,
        commands: Sequence[Command],
        deadline: float,
        queue_for: float,
        timeout: float | None,
        despite_outage: bool,
    ) -> RoutedRequest:
        began = clock()
        attempts = ServerAttempts(self._location, self._slots.timing, self._timeout, timeout, deadline, began)
        latest = max(began + queue_for, deadline)
        return RoutedRequest(commands, self._slots, attempts, latest, despite_outage=despite_outage)

    def _parts(self, node: Address) -> tuple[Location, int, float, Timing, ServerBreaker]:
        """The arguments for the client of a node."""
        timing, breaker = self._slots.timing, self._breakers[node]
        return self._location.at(*node), self._max_connections, self._timeout, timing, breaker

    def _further(self, known: object) -> tuple[object, Sequence[Address]]:
        owners = self._slots.owners
        return owners, () if owners is known else _complete(self._slots)


class ClusterClient(_ClusterClient):
    """For threads. ``send`` finds the nodes by the keys of the commands and asks all of them at once.

    Opens at most ``max_connections`` to each node. While a slot is between nodes, or its primary does not serve and
    may be replaced, it tries for as long as ``ServerAttempts`` says.
    """

    def __init__(
        self, location: Location, slots: SlotMap, max_connections: int, timeout: float, breakers: NodeBreakers
    ) -> None:
        super().__init__(location, slots, max_connections, timeout, breakers)
        self._clients: dict[Address, NodeClient] = {}

    def send(
        self,
        commands: Sequence[Command],
        deadline: float = NOT_WAITING,
        queue_for: float = 0.0,
        timeout: float | None = None,
        despite_outage: bool = False,
    ) -> Reply:
        if not commands:
            return NOTHING
        return drive(self._request(commands, deadline, queue_for, timeout, despite_outage).steps(), self)

    def nodes(self, known: object, *, despite_outage: bool = False) -> tuple[object, Sequence[Address]]:
        """All primaries with keys; none if the owners of slots are still the ``known`` ones."""
        self.refresh(despite_outage=despite_outage)
        return self._further(known)

    def locate(self, key: str) -> None:
        if slot_of_key(key) not in self._slots.owners:
            self.refresh()

    def refresh(self, *, despite_outage: bool = False) -> None:
        """Update the slot map. Raises redis-py's error if no node answers."""
        if failure := drive(refresh(self._slots, self._timeout, despite_outage=despite_outage), self):
            raise failure

    # The steps of a request call these

    def pause(self, seconds: float) -> None:
        sleep(seconds)

    def send_batches(self, batches: Sequence[NodeBatch]) -> list[NodeResult]:
        if len(batches) == 1:
            return [self._send_batch(batches[0])]
        results: dict[int, NodeResult] = {}

        def send(number: int) -> None:
            results[number] = self._send_batch(batches[number])

        # A node that hangs must not delay the other batches, so a thread reads each node.
        others = [start_thread(f"distlock-node-{batch.node}", send, n) for n, batch in enumerate(batches[1:], 1)]
        for number, thread in enumerate([None, *others]):
            if thread is None:
                send(number)
        for thread in filter(None, others):
            thread.join()
        return [results[number] for number in range(len(batches))]

    def _send_batch(self, batch: NodeBatch) -> NodeResult:
        try:
            return self._client_of(batch.node).send(batch.commands, **batch.limits)
        except Exception as error:
            return error

    def _client_of(self, node: Address) -> NodeClient:
        client = self._clients.get(node)
        if client is None:
            self._close_removed()
            client = self._clients.setdefault(node, NodeClient(*self._parts(node)))
        return client

    def _close_removed(self) -> None:
        """Close the clients of nodes that have left the Cluster."""
        self._breakers.drop_removed()
        for node in list(self._clients):
            if not self._slots.knows(node) and (client := self._clients.pop(node, None)):
                client.close()

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.close()


class AsyncClusterClient(_ClusterClient):
    """The same for the tasks of one event loop."""

    ending: AsyncIterator[None]

    def __init__(
        self, location: Location, slots: SlotMap, max_connections: int, timeout: float, breakers: NodeBreakers
    ) -> None:
        super().__init__(location, slots, max_connections, timeout, breakers)
        self._clients: dict[Address, AsyncNodeClient] = {}
        self._is_closed = False

    async def asend(
        self,
        commands: Sequence[Command],
        deadline: float = NOT_WAITING,
        queue_for: float = 0.0,
        timeout: float | None = None,
        despite_outage: bool = False,
    ) -> Reply:
        if not commands:
            return NOTHING
        return await adrive(self._request(commands, deadline, queue_for, timeout, despite_outage).steps(), self)

    async def alocate(self, key: str) -> None:
        if slot_of_key(key) not in self._slots.owners:
            await self.refresh()

    async def anodes(self, known: object, *, despite_outage: bool = False) -> tuple[object, Sequence[Address]]:
        await self.refresh(despite_outage=despite_outage)
        return self._further(known)

    async def refresh(self, *, despite_outage: bool = False) -> None:
        if failure := await adrive(refresh(self._slots, self._timeout, despite_outage=despite_outage), self):
            raise failure

    async def apause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def asend_batches(self, batches: Sequence[NodeBatch]) -> list[NodeResult]:
        if len(batches) == 1:
            return [await self._send_batch(batches[0])]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send_batch(batch)) for batch in batches]
        return [task.result() for task in tasks]

    async def _send_batch(self, batch: NodeBatch) -> NodeResult:
        try:
            client = await self._client_of(batch.node)
            return await client.asend(batch.commands, **batch.limits)
        except Exception as error:
            return error

    async def _client_of(self, node: Address) -> AsyncNodeClient:
        if node not in self._clients:
            await self._close_removed()
        client = self._clients.get(node)
        if client is None:
            client = self._clients[node] = AsyncNodeClient(*self._parts(node))
            if self._is_closed:
                await client.aclose()
        return client

    async def _close_removed(self) -> None:
        self._breakers.drop_removed()
        for node in list(self._clients):
            if not self._slots.knows(node) and (client := self._clients.pop(node, None)):
                await client.aclose()

    async def aclose(self) -> None:
        """The loop ends. Tasks that end with it and still send something use new connections."""
        self._is_closed = True
        for client in list(self._clients.values()):
            await client.aclose()


def _complete(slots: SlotMap) -> list[Address]:
    if slots.unowned:
        raise ClusterDownError(f"{slots.unowned} of the slots that locks use have no primary")
    return slots.primaries
