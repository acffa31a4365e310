"""Commands to a Cluster and their replies: the same as ``Client`` and ``AsyncClient`` for one server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from math import inf

from redis.exceptions import ClusterDownError

from ..client import NOTHING, Answer, AsyncClient, Client
from ..config import Location
from ..scripts import Command
from ..timeouts import Call
from .routing import Address, NodeBatch, Outcome, Pause, Result, RoutedRequest, SlotMap, Steps, refresh, slot_of_key


class NodeClient(Client):
    waits = False  # a node that does not serve may have a successor, so the errand goes on


class AsyncNodeClient(AsyncClient):
    waits = False


class _ClusterClient:
    def __init__(self, location: Location, slots: SlotMap, most: int, timeout: float) -> None:
        self._location, self._slots = location, slots
        self._most, self._timeout = most, timeout

    def _errand(
        self, commands: Sequence[Command], within: float | None, until: float | None, queues_until: float
    ) -> RoutedRequest:
        call = Call(self._location, self._timeout, within, until)
        return RoutedRequest(
            commands, self._slots, call.step, call.seconds, max(queues_until, inf if until is None else until)
        )

    def _further(self, known: object) -> tuple[object, Sequence[Address]]:
        owners = self._slots.owners
        return owners, () if owners is known else _complete(self._slots)


class ClusterClient(_ClusterClient):
    """For threads. ``send`` finds the nodes by the keys of the commands and asks all of them at once.

    Opens at most ``most`` connections to each node. While a slot is between nodes, or its primary does not serve and
    may be replaced, it goes on for as long as ``Call`` says.
    """

    def __init__(self, location: Location, slots: SlotMap, most: int, timeout: float) -> None:
        super().__init__(location, slots, most, timeout)
        self._wires: dict[Address, NodeClient] = {}

    def send(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        if not commands:
            return NOTHING
        return self._take(self._errand(commands, within, until, queues_until).steps())

    def nodes(self, known: object) -> tuple[object, Sequence[Address]]:
        """All primaries with keys; none if the owners of slots are the ``known`` ones."""
        self.refresh()
        return self._further(known)

    def locate(self, key: str) -> None:
        if slot_of_key(key) not in self._slots.owners:
            self.refresh()

    def refresh(self) -> None:
        """Raises redis-py's error if no node tells who owns what."""
        if failure := self._take(refresh(self._slots, self._timeout)):
            raise failure

    def _take(self, steps: Steps[Result]) -> Result:
        outcomes: list[Outcome] = []
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    outcomes = self._travel(step)
                step = steps.send(outcomes)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _travel(self, trips: Sequence[NodeBatch]) -> list[Outcome]:
        if len(trips) == 1:
            return [self._go(trips[0])]
        outcomes: dict[int, Outcome] = {}

        def go(number: int) -> None:
            outcomes[number] = self._go(trips[number])

        # A node that hangs must not delay what is meant for the others, so each is read in a thread.
        others = {
            n: threading.Thread(target=go, args=(n,), name=f"distlock-node-{trips[n].to}", daemon=True)
            for n in range(1, len(trips))
        }
        started = {number: thread for number, thread in others.items() if _is_started(thread)}
        for number in range(len(trips)):
            if number not in started:
                go(number)
        for thread in started.values():
            thread.join()
        return [outcomes[number] for number in range(len(trips))]

    def _go(self, trip: NodeBatch) -> Outcome:
        try:
            return self._to(trip.to).send(*trip.commands, within=trip.within, queues_until=trip.queues_until)
        except Exception as error:
            return error

    def _to(self, address: Address) -> NodeClient:
        wire = self._wires.get(address)
        if wire is None:
            self._forget()
            wire = NodeClient(self._location.at(*address), self._most, self._timeout)
            wire = self._wires.setdefault(address, wire)
        return wire

    def _forget(self) -> None:
        """Nodes that have left the Cluster."""
        for address in list(self._wires):
            if not self._slots.knows(address) and (wire := self._wires.pop(address, None)):
                wire.close()

    def close(self) -> None:
        for wire in list(self._wires.values()):
            wire.close()


class AsyncClusterClient(_ClusterClient):
    """The same for the tasks of one event loop."""

    ending: AsyncIterator[None]

    def __init__(self, location: Location, slots: SlotMap, most: int, timeout: float) -> None:
        super().__init__(location, slots, most, timeout)
        self._wires: dict[Address, AsyncNodeClient] = {}
        self._is_closed = False

    async def asend(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        if not commands:
            return NOTHING
        return await self._take(self._errand(commands, within, until, queues_until).steps())

    async def alocate(self, key: str) -> None:
        if slot_of_key(key) not in self._slots.owners:
            await self.refresh()

    async def anodes(self, known: object) -> tuple[object, Sequence[Address]]:
        await self.refresh()
        return self._further(known)

    async def refresh(self) -> None:
        if failure := await self._take(refresh(self._slots, self._timeout)):
            raise failure

    async def _take(self, steps: Steps[Result]) -> Result:
        outcomes: list[Outcome] = []
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif len(step) == 1:
                    outcomes = [await self._go(step[0])]
                else:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(self._go(trip)) for trip in step]
                    outcomes = [task.result() for task in tasks]
                step = steps.send(outcomes)
        except StopIteration as end:
            result: Result = end.value
            return result

    async def _go(self, trip: NodeBatch) -> Outcome:
        try:
            return await (await self._to(trip.to)).asend(
                *trip.commands, within=trip.within, queues_until=trip.queues_until
            )
        except Exception as error:
            return error

    async def _to(self, address: Address) -> AsyncNodeClient:
        if address not in self._wires:
            await self._forget()
        wire = self._wires.get(address)
        if wire is None:
            wire = self._wires[address] = AsyncNodeClient(self._location.at(*address), self._most, self._timeout)
            if self._is_closed:
                await wire.aclose()
        return wire

    async def _forget(self) -> None:
        for address in list(self._wires):
            if not self._slots.knows(address) and (wire := self._wires.pop(address, None)):
                await wire.aclose()

    async def aclose(self) -> None:
        """The loop ends. What is still sent by others that end with it goes over connections of its own."""
        self._is_closed = True
        for wire in list(self._wires.values()):
            await wire.aclose()


def _complete(slots: SlotMap) -> list[Address]:
    if slots.unowned:
        raise ClusterDownError(f"{slots.unowned} of the slots that locks use have no primary")
    return slots.primaries


def _is_started(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError:  # no more threads here, or the interpreter exits: then one after another
        return False
    return True
