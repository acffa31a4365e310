"""What sentinels answer to clients."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from .commands import SPECS
from .redis_server import Server
from .resp import OK, NoArray, ServerError, Status
from .watching import Known, Other, Service, Watching

if TYPE_CHECKING:
    from ..engine.network import Address
    from .sessions import Session

COMMANDS = {"ping", "info", "role", "hello", "auth", "quit", "reset", "publish"}
FAMILIES = ("sentinel|", "client|", "subscribe", "unsubscribe")


class SentinelCommands(Watching):
    mode = "sentinel"
    id: str
    failover_timeout: float

    def new_service(self, name: str, primary: Address, quorum: int, replicas: Sequence[Address] = ()) -> Service:
        raise NotImplementedError

    def best_replica(self, service: Service) -> Known | None:
        raise NotImplementedError

    def force_failover(self, service: Service) -> None:
        raise NotImplementedError

    def _knows(self, name: str) -> bool:
        is_ours = name in COMMANDS or name.startswith(FAMILIES)
        return is_ours and name in SPECS and hasattr(self, "_do_" + name.replace("|", "_").replace("-", "_"))

    def _named(self, name: str) -> Service:
        if self.service is None or self.service.name != name:
            raise ServerError("ERR No such master with that name")
        return self.service

    def _do_sentinel_get_master_addr_by_name(self, session: Session, name: str) -> Any:
        if self.service is None or self.service.name != name:
            return NoArray()
        host, port = self.service.current_primary
        return [host, str(port)]

    def _do_sentinel_master(self, session: Session, name: str) -> Any:
        return self._described_service(self._named(name))

    def _do_sentinel_masters(self, session: Session) -> Any:
        return [self._described_service(self.service)] if self.service else []

    def _do_sentinel_replicas(self, session: Session, name: str) -> Any:
        return [self._described(known, **_as_replica(known)) for known in self._named(name).replicas.values()]

    _do_sentinel_slaves = _do_sentinel_replicas

    def _do_sentinel_sentinels(self, session: Session, name: str) -> Any:
        self._named(name)
        return [self._described_sentinel(other_id, other) for other_id, other in self.others.items()]

    def _do_sentinel_myid(self, session: Session) -> Any:
        return self.id

    def _do_sentinel_failover(self, session: Session, name: str) -> Any:
        service = self._named(name)
        if service.failover_state:
            raise ServerError("INPROG Failover already in progress")
        if self.best_replica(service) is None:
            raise ServerError("NOGOODSLAVE No suitable replica to promote")
        self.force_failover(service)
        return OK

    def _do_sentinel_ckquorum(self, session: Session, name: str) -> Any:
        service = self._named(name)
        usable = 1 + sum(not other.is_down for other in self.others.values())
        has_quorum, has_majority = usable >= service.quorum, usable >= (len(self.others) + 1) // 2 + 1
        if has_quorum and has_majority:
            text = "usable Sentinels. Quorum and failover authorization can be reached"
            return Status(f"OK {usable} {text}")
        problems = (
            [] if has_quorum else ["Not enough available Sentinels to reach the specified quorum for this master"]
        )
        if not has_majority:
            problems.append("Not enough available Sentinels to reach the majority and authorize a failover")
        raise ServerError(f"NOQUORUM {usable} usable Sentinels. {'. '.join(problems)}")

    def _do_sentinel_remove(self, session: Session, name: str) -> Any:
        self._named(name)
        self.service = None
        return OK

    def _do_sentinel_monitor(self, session: Session, name: str, host: str, port: str, quorum: str) -> Any:
        if self.service is not None and self.service.name == name:
            raise ServerError("ERR Duplicate master name.")
        self.service = self.new_service(name, (host, int(port)), int(quorum))
        return OK

    def _do_role(self, session: Session) -> Any:
        return ["sentinel", [self.service.name] if self.service else []]

    # What it tells of what it knows

    def _described_service(self, service: Service) -> dict[str, Any]:
        about = {
            "config-epoch": service.config_epoch,
            "num-slaves": len(service.replicas),
            "num-other-sentinels": len(self.others),
            "quorum": service.quorum,
            "failover-timeout": self.failover_timeout * 1000,
            "parallel-syncs": 1,
        }
        return self._described(service.primary, name=service.name, **about)

    def _described_sentinel(self, other_id: str, other: Other) -> dict[str, Any]:
        about = {"last-hello-message": self._since(other.hello_at), "voted-leader": other.vote or "?"}
        return self._described(other, name=other_id, **about, **{"voted-leader-epoch": other.vote_epoch})

    def _described(self, known: Known, *, name: str = "", **more: Any) -> dict[str, Any]:
        """In the order in which real ones tell it."""
        service = self.service
        is_primary = service is not None and known is service.primary
        server = self.network.servers.get(known.address)
        run_id = server.run_id if isinstance(server, Server) and known.info_at > -inf else ""
        host, port = known.address
        lines: dict[str, Any] = {"name": name or f"{host}:{port}", "ip": host, "port": port}
        lines["runid"] = name if isinstance(known, Other) else run_id
        lines["flags"] = ",".join(self._flags(known))
        lines |= {"link-pending-commands": 0, "link-refcount": 1}
        if is_primary and service is not None and service.failover_state:
            lines["failover-state"] = service.failover_state
        lines["last-ping-sent"] = self._since(known.pinged_at)
        lines |= {"last-ok-ping-reply": self._since(known.seen_at), "last-ping-reply": self._since(known.seen_at)}
        if known.is_down:
            lines["s-down-time"] = self._since(known.down_since)
        if is_primary and service is not None and service.objectively_down_since is not None:
            lines["o-down-time"] = self._since(service.objectively_down_since)
        lines["down-after-milliseconds"] = self.down_after * 1000
        if not isinstance(known, Other):
            lines |= {"info-refresh": self._since(known.info_at), "role-reported": known.role}
            lines["role-reported-time"] = self._since(known.role_since)
        return {key: _as_text(value) for key, value in (lines | more).items()}

    def _flags(self, known: Known) -> list[str]:
        service = self.service
        is_primary = service is not None and known is service.primary
        is_other = isinstance(known, Other)
        flags = {
            "s_down": known.is_down,
            "o_down": is_primary and service is not None and service.objectively_down_since is not None,
            "master": is_primary,
            "slave": not is_primary and not is_other,
            "sentinel": is_other,
            "disconnected": not known.is_connected,
            "master_down": isinstance(known, Other) and known.says_down_at > -inf,
            "failover_in_progress": is_primary and service is not None and bool(service.failover_state),
            "promoted": service is not None and known is service.promoted,
            "reconf_sent": known.reconfigured == "sent",
            "reconf_done": known.reconfigured == "done",
        }
        return [flag for flag, is_set in flags.items() if is_set]

    def _since(self, moment: float | None) -> float:
        """In milliseconds."""
        return 0 if moment is None or moment == -inf else (self.scheduler.now - moment) * 1000


def _as_replica(known: Known) -> dict[str, Any]:
    report = known.report
    host, port = (report and report.primary) or ("?", 0)
    return {
        "master-link-down-time": 0,
        "master-link-status": "ok" if report and report.is_linked else "err",
        "master-host": host,
        "master-port": port,
        "slave-priority": 100,
        "slave-repl-offset": report.offset if report else 0,
        "replica-announced": 1,
    }


def _as_text(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)
