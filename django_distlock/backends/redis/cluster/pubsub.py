"""How waiters wake in a Cluster: one subscription per primary with waiters, to the inboxes of all its shards.

With sharded pub/sub, a message is published at the primary that owns the slot of its channel, and its reply counts the
subscribers there. A lock and the inbox of its waiters are in one slot, so a hand-off knows whether it was heard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from redis.exceptions import AskError, ClusterDownError, ConnectionError, MovedError, ResponseError

from ....types import LockRequest
from ....utils import fork
from ....utils.clock import clock
from ....utils.events import about_event
from ....utils.wakeup import WakeEvent
from ...common.timing import Timing
from ...common.wakeup_listener import Waiters
from ..codec import new_process
from ..config import Location
from ..keys import ClusterKeys, slot_of
from ..pubsub import KINDS, RedisListener
from ..scripts import pack
from .client import ClusterClient
from .routing import Address, SlotMap

logger = logging.getLogger("django_distlock")


class ClusterListener:
    """The same as ``RedisListener``, for all primaries."""

    gives_leases = False  # its waiters look

    def __init__(
        self,
        client: ClusterClient,
        slots: SlotMap,
        keys: ClusterKeys,
        location: Location,
        hand_back: Callable[[str, str], None],
        name: str,
        timing: Timing,
    ) -> None:
        self.client, self.slots, self.keys = client, slots, keys
        self.location, self.name, self.timing = location, name, timing
        self.hand_back = hand_back
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)
        self.waiters = Waiters()
        self.kind = KINDS[0][1]
        self._nodes: dict[Address, NodeListener] = {}

    def _reset_after_fork(self) -> None:
        self.process = new_process()  # in the names of its inboxes

    def hears(self, name: str) -> bool:
        node = self._find(name)
        return node is not None and node.is_ready and self._inbox(name) in node.channels

    def start(self, name: str, timeout: float) -> None:
        for event, seconds in self._starts(name, timeout):
            event.wait(seconds)

    async def astart(self, name: str, timeout: float) -> None:
        for event, seconds in self._starts(name, timeout):
            await event.await_set(seconds)

    def _starts(self, name: str, timeout: float) -> Iterator[tuple[WakeEvent, float]]:
        """Until the subscription is ready: what to wait for, and for how long."""
        deadline = clock() + timeout
        while not self.hears(name):
            if (node := self._find(name)) is None:
                raise ClusterDownError(f"no primary serves the slot of lock {name!r}")
            with node.starter() as event:
                if node.is_ready and not self.hears(name):
                    node.begin_anew()  # the slot came to this node meanwhile
                yield event, min(self.timing.listener_nap, deadline - clock())  # it may come to another node
            if not self.hears(name):
                node.raise_failure(deadline, timeout)

    def is_counted(self, name: str) -> bool:
        node = self._find(name)
        return node is not None and node.is_counted(name)

    def is_deaf(self, name: str) -> bool:
        node = self._find(name)
        return node is not None and node.is_deaf(name)

    def inbox(self, name: str) -> str:
        return self.kind + self._inbox(name)

    def note_count(self, name: str, counts: bool | None) -> None:
        if node := self._find(name):
            node.note_count(name, counts)

    def expect(self, request: LockRequest) -> None:
        request.inbox = request.inbox or self.inbox(request.name)
        self.waiters.add(request)
        if node := self._find(request.name):
            node.touch()

    def forget(self, request: LockRequest) -> None:
        self.waiters.discard(request)

    def wait(self, request: LockRequest, timeout: float) -> None:
        if node := self._find(request.name):
            node.wait(request, timeout)
        else:
            request.event.wait(timeout)

    async def await_wake(self, request: LockRequest, timeout: float) -> None:
        if node := self._find(request.name):
            await node.await_wake(request, timeout)
        else:
            await request.event.await_set(timeout)

    def will_look(self, request: LockRequest) -> bool:
        if node := self._find(request.name):
            node.will_look(request)
        return True  # a node hears several inboxes, and loses one of them with its slot

    def looked(self, request: LockRequest, ears: int, sent_at: float) -> None:
        if node := self._find(request.name):
            if ears == 0:
                node.touch()  # the slot may just have come to a node where nobody listened yet
            node.looked(request, ears, sent_at)

    def stop(self) -> None:
        for node in list(self._nodes.values()):
            node.stop()

    def channels_at(self, address: Address) -> list[str]:
        """The inboxes of this process whose slots that node owns."""
        owners, keys = self.slots.owners, self.keys
        shards = (shard for shard in range(keys.shards) if owners.get(keys.slot_of_shard(shard)) == address)
        return [keys.shard_inbox(self.process, shard) for shard in shards]

    def owns(self, address: Address, key: str) -> bool:
        return self.slots.owners.get(slot_of(key)) == address

    def _owner(self, shard: int) -> Address | None:
        return self.slots.owners.get(self.keys.slot_of_shard(shard))

    def _inbox(self, name: str) -> str:
        return self.keys.shard_inbox(self.process, self.keys.shard_of(name))

    def _find(self, name: str) -> NodeListener | None:
        address = self._owner(self.keys.shard_of(name))
        if address is None:
            return None
        node = self._nodes.get(address)
        if node is None:
            self._forget()
            node = self._nodes.setdefault(address, NodeListener(self, address))
        return node

    def _forget(self) -> None:
        """Forget nodes that have left the Cluster."""
        for address in list(self._nodes):
            if not self.slots.knows(address) and (node := self._nodes.pop(address, None)):
                node.stop()


class NodeListener(RedisListener):
    """The subscription at one primary."""

    in_cluster = True

    def __init__(self, cluster: ClusterListener, address: Address) -> None:
        self._cluster, self._address = cluster, address
        self.channels: frozenset[str] = frozenset()
        location, name = cluster.location.at(*address), f"{cluster.name}-{address}"
        super().__init__(location, str, self._hand_back_owned, name, cluster.timing, cluster.waiters)

    def begin_anew(self) -> None:
        """Subscribe again, to the channels that this node owns now."""
        self._resubscribe = True

    def _hand_back_owned(self, token: str, key: str) -> None:
        """A former primary still delivers what its successor publishes. The listener at the successor hears it, too."""
        if self._cluster.owns(self._address, key):
            self._cluster.hand_back(token, key)

    # In the thread

    def connect(self) -> Any:
        if self._failure is not None:
            self._refresh()
        return super().connect()

    def _refresh(self) -> None:
        """Another node may have succeeded this one."""
        try:
            self._cluster.client.refresh()
        except Exception as unknown:  # the thread must continue
            about = about_event("successor-unknown", alias=self._name)
            logger.debug("Who succeeds %s is not known: %s", self._address, unknown, extra=about)
        self._wanted_channels()

    def _wanted_channels(self) -> list[str]:
        """The inboxes to subscribe to. If there are none, it raises ConnectionError, and ends the thread."""
        channels = self._cluster.channels_at(self._address)
        if not channels:
            self.stop()
            raise ConnectionError(f"{self._address} owns no slot any more that locks use")
        return channels

    def subscribe(self, connection: Any) -> None:
        wanted = self._wanted_channels()
        for verb, kind in KINDS:
            connection.send_packed_command([b"".join(pack(verb, channel) for channel in wanted)], check_health=False)
            refused = self._acknowledged(connection, wanted)
            if refused is None:
                self._cluster.kind = kind
                break
            if (verb, kind) == KINDS[-1]:
                raise refused
        self._mark_ready()

    def _acknowledged(self, connection: Any, wanted: list[str]) -> ResponseError | None:
        """Read as many answers as there are wanted channels. Published messages may come between them."""
        heard, refused, awaited = set(), None, len(wanted)
        while awaited:
            try:
                message = self.next_message(connection)
            except MovedError as error:
                if (owner := self._cluster.slots.follow(error, self._address)) is None:
                    raise
                self._cluster.slots.moved(error.slot_id, owner)
                awaited -= 1
            except (AskError, ClusterDownError):
                awaited -= 1  # the waiter for that inbox subscribes again
            except ResponseError as error:
                refused = error
                awaited -= 1
            else:
                if message[0] in (b"ssubscribe", b"subscribe"):
                    heard.add(message[1].decode())
                    awaited -= 1
                else:
                    self._receive(message)
        self.channels = frozenset(heard)
        return refused

    def _receive(self, message: Any) -> None:
        super()._receive(message)
        if message[0] == b"sunsubscribe":  # the slot has gone to another node
            channel = message[1].decode()
            self.channels -= {channel}
            self._wake({channel})

    def _wake_all(self) -> None:
        self._wake_starters()
        self._wake(self.channels)

    def _wake(self, channels: frozenset[str] | set[str]) -> None:
        self._let_look(request for request in self._waiters if request.inbox[1:] in channels)

    def _note_failure(self, error: Exception) -> None:
        super()._note_failure(error)
        self.channels = frozenset()
