"""What a node of a Cluster does with commands of clients: it serves them, sends them elsewhere, or refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .cluster_bus import SLOTS, ClusterBus, View, slot_of
from .commands import SPECS, Spec
from .redis_server import Server
from .resp import OK, ServerError, Status

if TYPE_CHECKING:
    from ..engine.network import Address
    from .sessions import Session

OTHER_SLOTS = "CROSSSLOT Keys in request don't hash to the same slot"
IN_PARTS = "TRYAGAIN Multiple keys request during rehashing of slot"
UNSERVED = "CLUSTERDOWN Hash slot not served"
NO_KEY = Status("NOKEY")
DOWN = "CLUSTERDOWN The cluster is down"

# What a script is told.
NOT_LOCAL = "ERR Attempted to access a non local key in a cluster node"


class ClusterCommands(ClusterBus):
    _known_runs: list[tuple[int, int, View]]
    _runs_at = -1

    # Where commands belong

    def _route(self, session: Session, spec: Spec, command: list[str]) -> None:
        if keys := spec.keys(command):
            self._check_place(session, spec, keys)

    def _check_place(self, session: Session, spec: Spec, keys: Sequence[str]) -> None:
        """Raise what a server says to a command for these keys, unless it can execute it."""
        slots = [slot_of(key) for key in keys]
        slot = slots[0]
        if (owner := self.nodes.get(self.owners.get(slot, ""))) is None:
            raise ServerError(UNSERVED)
        if len(set(slots)) > 1:
            raise ServerError(OTHER_SLOTS)
        is_channel = "channel" in spec.flags
        there = [is_channel or self.store.peek(key) is not None for key in keys]
        if not self.is_well and not is_channel:
            raise ServerError(DOWN)
        is_migrating = owner is self.me and slot in self.migrating
        is_open = is_migrating or slot in self.importing
        if spec.name == "migrate" and is_open:
            return
        if is_migrating and not all(there):
            to = self.nodes[self.migrating[slot]]
            raise ServerError(IN_PARTS if any(there) else f"ASK {slot} {_place(to)}")
        if not is_migrating and slot in self.importing and session.is_asking:
            if len(set(keys)) > 1 and not all(there):
                raise ServerError(IN_PARTS)
            return
        reads_here = (session.is_readonly and "write" not in spec.flags) or is_channel
        if owner is not self.me and not (reads_here and self.me.primary == owner.id):
            raise ServerError(f"MOVED {slot} {_place(owner)}")

    def check_in_script(self, name: str, words: list[str]) -> None:
        """Also what a script asks for must belong here; it may be in several slots."""
        spec = SPECS[name]
        if self._running is not None and (keys := spec.keys([name, *words])):
            try:
                self._check_place(self._running, spec, keys)
            except ServerError as error:
                raise ServerError(_for_script(str(error), name)) from None
        super().check_in_script(name, words)

    # Channels: messages go over the bus of the Cluster, not with the data

    def publish(self, kind: str, channel: str, text: str) -> int:
        shard = {self.id, self.me.primary, *(view.id for view in self.others if self._is_of_shard(view))}
        for view in self.others:
            node = self.node_at(view)
            if node is not None and (kind == "P" or view.id in shard):
                self.tell(node, self._passed_on(node, kind, channel, text))
        return Server.publish(self, kind, channel, text)

    def _is_of_shard(self, view: View) -> bool:
        return view.primary == (self.me.primary or self.id)

    @staticmethod
    def _passed_on(node: ClusterBus, kind: str, channel: str, text: str) -> Any:
        return lambda: Server.publish(node, kind, channel, text)

    # Commands

    def _do_asking(self, session: Session) -> Any:
        return OK

    def _do_readonly(self, session: Session) -> Any:
        session.is_readonly = True
        return OK

    def _do_readwrite(self, session: Session) -> Any:
        session.is_readonly = False
        return OK

    def _do_cluster_myid(self, session: Session) -> Any:
        return self.id

    def _do_cluster_keyslot(self, session: Session, key: str) -> Any:
        return slot_of(key)

    def _do_cluster_slots(self, session: Session) -> Any:
        runs: list[Any] = []
        for first, last, view in self._runs():
            replicas = [node for node in self._replicas_of(view) if not node.is_failed]
            runs.append([first, last, *([*node.address, node.id, []] for node in (view, *replicas))])
        return runs

    def _runs(self) -> list[tuple[int, int, View]]:
        """Slots that follow each other and have one owner."""
        if self._runs_at != self.changes:
            grouped = ((owner, list(run)) for owner, run in groupby(range(SLOTS), self.owners.get))
            self._known_runs = [(slots[0], slots[-1], self.nodes[owner]) for owner, slots in grouped if owner]
            self._runs_at = self.changes
        return self._known_runs

    def _replicas_of(self, view: View) -> list[View]:
        return sorted((node for node in self.nodes.values() if node.primary == view.id), key=lambda node: node.id)

    def _do_cluster_nodes(self, session: Session) -> str:
        return "".join(f"{self._line(view)}\n" for view in self.nodes.values())

    def _line(self, view: View) -> str:
        host, port = view.address
        flags = [
            *(["myself"] if view is self.me else []),
            "slave" if view.primary else "master",
            *(["fail"] if view.is_failed else ["fail?"] if view.is_suspected else []),
        ]
        link = "connected" if view.is_connected else "disconnected"
        epoch = self.nodes[view.primary].config_epoch if view.primary else view.config_epoch
        runs = [(first, last) for first, last, owner in self._runs() if owner is view]
        words = [
            view.id, f"{host}:{port}@{port + 10000}", ",".join(flags), view.primary or "-",
            f"{(view.pinged_at or 0) * 1000:.0f}", f"{view.heard_at * 1000:.0f}", str(epoch), link,
            *(f"{first}-{last}" if first < last else str(first) for first, last in runs),
        ]  # fmt: skip
        if view is self.me:
            words += [f"[{slot}->-{to}]" for slot, to in self.migrating.items()]
            words += [f"[{slot}-<-{source}]" for slot, source in self.importing.items()]
        return " ".join(words)

    def _do_cluster_info(self, session: Session) -> str:
        failed = sum(len(view.slots) for view in self.voters if view.is_failed)
        suspected = sum(len(view.slots) for view in self.voters if view.is_suspected and not view.is_failed)
        me = self.me if self.me.primary is None else self.nodes[self.me.primary]
        lines = {
            "cluster_state": "ok" if self.is_well else "fail",
            "cluster_slots_assigned": len(self.owners),
            "cluster_slots_ok": len(self.owners) - failed - suspected,
            "cluster_slots_pfail": suspected,
            "cluster_slots_fail": failed,
            "cluster_known_nodes": len(self.nodes),
            "cluster_size": len(self.voters),
            "cluster_current_epoch": self.current_epoch,
            "cluster_my_epoch": me.config_epoch,
        }
        return "".join(f"{key}:{value}\r\n" for key, value in lines.items())

    def _do_cluster_countkeysinslot(self, session: Session, slot: str) -> Any:
        return len(self.keys_in(_slot(slot)))

    def _do_cluster_getkeysinslot(self, session: Session, slot: str, count: str) -> Any:
        return self.keys_in(_slot(slot))[: int(count)]

    def keys_in(self, slot: int) -> list[str]:
        return [key for key in sorted(self.store.keys()) if slot_of(key) == slot]

    def _do_cluster_setslot(self, session: Session, number: str, verb: str, *node_id: str) -> Any:
        slot = _slot(number)
        if self.me.primary is not None:
            raise ServerError("ERR Please use SETSLOT only with masters.")
        if verb.upper() == "STABLE":
            self.migrating.pop(slot, None)
            self.importing.pop(slot, None)
            return OK
        if not node_id or (view := self.nodes.get(node_id[0])) is None:
            unknown = "Unknown node" if verb.upper() == "NODE" else "I don't know about node"
            raise ServerError(f"ERR {unknown} {(*node_id, '')[0]}")
        if view.primary is not None:
            raise ServerError("ERR Target node is not a master")
        is_mine = self.owners.get(slot) == self.id
        match verb.upper():
            case "MIGRATING":
                if not is_mine:
                    raise ServerError(f"ERR I'm not the owner of hash slot {slot}")
                if view is self.me:
                    raise ServerError("ERR Target node is myself")
                self.migrating[slot] = view.id
            case "IMPORTING":
                if is_mine:
                    raise ServerError(f"ERR I'm already the owner of hash slot {slot}")
                self.importing[slot] = view.id
            case "NODE":
                self.settle_slot(slot, view)
            case _:
                raise ServerError("ERR Invalid CLUSTER SETSLOT action or number of arguments. Try CLUSTER HELP")
        return OK

    def settle_slot(self, slot: int, view: View) -> None:
        is_mine = self.owners.get(slot) == self.id
        if is_mine and view is not self.me and self.keys_in(slot):
            raise ServerError(
                f"ERR Can't assign hashslot {slot} to a different node while I still hold keys for this hash slot."
            )
        self.migrating.pop(slot, None)
        if view is self.me and self.importing.pop(slot, None) is not None:
            self.bump_epoch()
        self.give({slot}, view)
        self.say()

    def _do_migrate(self, session: Session, host: str, port: str, key: str, *rest: str) -> Any:
        keys = [key] if key else rest[[word.upper() for word in rest].index("KEYS") + 1 :]
        return self.migrate((host, int(port)), keys)

    def migrate(self, to: Address, keys: Sequence[str]) -> Status:
        """Keys go in one step: neither node serves anybody meanwhile. Raises ServerError."""
        target = self.network.servers.get(to)
        if not isinstance(target, ClusterBus) or not target.is_up or not self._reaches(target):
            raise ServerError("IOERR error or timeout connecting to the client")
        known = [key for key in keys if self.store.peek(key) is not None]
        if not known:
            return NO_KEY
        target.store.apply({key: entry for key, entry in self.store.snapshot().items() if key in known})
        target.settle()
        self.store.execute("del", *known)
        self.settle()
        return OK

    def _reaches(self, other: Server) -> bool:
        there, back = (self.address, other.address), (other.address, self.address)
        return all(self.network.passes(*way) is not None for way in (there, back))

    def _do_cluster_failover(self, session: Session, *how: str) -> Any:
        if self.me.primary is None:
            raise ServerError("ERR You should send CLUSTER FAILOVER to a replica")
        match [word.upper() for word in how]:
            case []:
                self.fail_over()
            case ["FORCE"]:
                self.force_failover()
            case ["TAKEOVER"]:
                self.take_over()
            case _:
                raise ServerError("ERR syntax error")
        return OK


def _place(view: View) -> str:
    host, port = view.address
    return f"{host}:{port}"


def _slot(text: str) -> int:
    if not text.isdecimal() or int(text) >= SLOTS:
        raise ServerError("ERR Invalid or out of range slot")
    return int(text)


def _for_script(refusal: str, name: str) -> str:
    return f"ERR Can not execute a command '{name}' while the cluster is down" if refusal == DOWN else NOT_LOCAL
