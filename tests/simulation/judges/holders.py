"""What holders may believe of their leases, and what they are told when one is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from redis.exceptions import MaxConnectionsError

from django_distlock import Lease, LockBackendError, State, locks, signals
from django_distlock.backends.common.timing import Timing
from django_distlock.core.handed_lease import HandedLease

if TYPE_CHECKING:
    from ..engine.scheduler import Host, Process
    from ..simulation import Simulation
    from .calls import Judges


def is_about_connections(error: LockBackendError) -> bool:
    """Whether all that the process may have were in use."""
    return isinstance(error.__cause__, MaxConnectionsError)


class Passed(NamedTuple):
    """A lease that was detached, on its way to whoever adopts it. ``until``: its end by the clock of the world."""

    name: str
    asked_at: float
    at: float
    until: float
    host: Host
    about: Mapping[str, Any]
    tries: int = 0


class HolderJudge:
    """S1 at the store, S2 of texts, S5, S14."""

    def __init__(self, judges: Judges, simulation: Simulation) -> None:
        self._judges = judges
        self._simulation = simulation
        self._leases: list[ref[Lease]] = []  # that callers were given
        self._asked_at: dict[str, float] = {}  # by token
        self._abouts: dict[str, Mapping[str, Any]] = {}  # by token
        self._adopted_at: dict[str, float] = {}  # by text
        self._detached: set[str] = set()  # tokens
        self.passed: dict[str, Passed] = {}  # by text
        self._told: list[ref[Lease]] = []  # of whose loss the signal was sent
        self._told_tokens: set[tuple[str, str]] = set()  # of them, by process
        self._raised: set[tuple[str, str]] = set()  # by process and token
        self._left: set[tuple[str, str]] = set()  # by process and token: released without an error
        self._failed_to_release: set[tuple[str, str]] = set()
        self._without_connection: set[tuple[str, str]] = set()  # those among them that were never sent
        self._told_released: set[tuple[str, str]] = set()
        signals.lock_lost.connect(self._lost, weak=False)
        signals.lock_released.connect(self._released, weak=False)
        signals.lock_released.asend_robust = self._areleased  # type: ignore[method-assign] - of this signal alone

    @property
    def _now(self) -> float:
        return self._simulation.scheduler.now

    # Told of calls

    def granted(self, lease: Lease, about: Mapping[str, Any], asked_at: float) -> None:
        if lease not in self.leases():
            self._leases.append(ref(lease))
        self._asked_at.setdefault(lease.token, asked_at)
        self._abouts.setdefault(lease.token, about)
        self._simulation.world.promised(lease.name, lease.token, about)

    def adopted(self, text: str, asked_at: float) -> None:
        """S2: once. The store remembers it, while it has its data."""
        if text in self._adopted_at and not self._has_lost_data_since(self._adopted_at[text]):
            self._judges.fail(f"S2: a text was adopted at {self._adopted_at[text]:.3f} s and again")
        self._adopted_at[text] = asked_at

    def detaching(self, lease: Lease) -> Passed:
        self._detached.add(lease.token)
        about = self._abouts.get(lease.token, {})
        host = self._simulation.processes[lease.using].host
        return Passed(lease.name, self._asked_at[lease.token], self._now, self._now + lease.remaining, host, about)

    def is_queued(self, token: str) -> None:
        """Held by a message, and by nobody's lease."""
        self._detached.add(token)

    def passes_on(self, lease: Lease) -> None:
        """To a message: nobody is told of its end."""
        self._detached.add(lease.token)

    def was_detached(self, token: str) -> bool:
        """So that whoever adopts it asks with it."""
        return token in self._detached

    def raised_lost(self, lease: Lease) -> None:
        """LockLost."""
        self._raised.add((lease.using, lease.token))

    def commits(self, lease: Lease) -> None:
        """S14: at the end of the transaction, its lock is still held."""
        if lease.state is State.RELEASED and lease.token not in self._detached:
            self._judges.fail(f"S14: {lease!r} was released before COMMIT")

    def freed(self, lease: Lease, after: str) -> None:
        """S14, S15: it is free when what held it is over."""
        if lease.state in (State.HELD, State.UNKNOWN):
            self._judges.fail(f"{after}: {lease!r} is held")
        if lease.state is State.LOST:
            return  # which its renewer ends, if the store has it yet
        holders = self._simulation.world.holders()
        is_held = holders is not None and lease.token in holders.get(lease.name, ())
        # What found no connection is released in the background.
        is_excused = lease.token in self._detached or (lease.using, lease.token) in self._without_connection
        is_excused = is_excused or self._judges.may_fail(self._asked_at[lease.token])
        if is_held and not is_excused:
            self._judges.fail(f"{after}: the store has {lease!r}")

    def left(self, lease: Lease) -> None:
        """By its caller, who was told of no error: it is released, unless it is entered or kept elsewhere."""
        if lease.state is State.RELEASED and lease.token not in self._detached:
            self._left.add((lease.using, lease.token))

    def release_failed(self, process: Process, token: str, error: LockBackendError) -> None:
        """Its caller is told so, or, at the end of a transaction, the log: the signal is not sent."""
        self._failed_to_release.add((process.name, token))
        if is_about_connections(error):
            self._without_connection.add((process.name, token))

    def _released(self, lease: Lease, **about: Any) -> None:
        """Told once."""
        if (lease.using, lease.token) in self._told_released:
            self._judges.fail(f"the release of {lease!r} was told again")
        self._told_released.add((lease.using, lease.token))

    async def _areleased(self, sender: type, **about: Any) -> None:
        """For tasks: Django would call the receiver in a thread of the system."""
        self._released(**about)

    def _lost(self, lease: Lease, reason: str, **about: Any) -> None:
        """S5: told once."""
        self._simulation.tell(f"{lease.using} is told that {lease.name} {lease.token[:6]} is lost: {reason}")
        asker = self._simulation.asker(lease.token)
        if asker and asker.process.has_forked and not self.was_detached(lease.token):
            self._judges.fail(f"S8: a child is told that {lease!r} of its parent is lost")
        if any(told() is lease for told in self._told):
            self._judges.fail(f"S5: the loss of {lease!r} was told again")
        self._told.append(ref(lease))
        self._told_tokens.add((lease.using, lease.token))

    # As time passes

    def leases(self) -> list[Lease]:
        """Those that callers were given. One that is being adopted may turn out to be over."""
        return [lease for reference in self._leases if (lease := reference())]

    def owns(self, name: str, token: str, asked_at: float, by: Process | None) -> bool:
        """Whether somebody knows of a lease that a store has: its holder, a text, or a call that is under way.

        ``asked_at``: when the store was first asked for it, ``by`` whom.
        """
        if token in self._detached or self._abouts.get(token, {}).get("forgets"):
            return True
        return any(lease.token == token for lease in locks.leases()) or self._judges.is_called_for(name, asked_at, by)

    def outlasts_its_release(self, token: str) -> bool:
        """Whether nodes that do not hear of its end keep it: one that rests, or that an operator ended."""
        return bool(self._abouts.get(token, {}).get("min_hold")) or self._judges.is_freed(token)

    def watch(self) -> None:
        """S1: a lease that is believed is in the store; before it is confirmed, others are kept away for as long."""
        if (holders := self._simulation.world.holders()) is None:
            return
        for lease in self.leases():
            if lease.token in holders.get(lease.name, ()) or not (left := self._judges.believed_for(lease)):
                continue
            is_kept = (
                isinstance(lease, HandedLease)
                and left < Timing.grant_ttl  # it is not confirmed yet
                and self._simulation.world.is_kept_for(lease.name, lease.token, left)
            )
            if not is_kept and not self._has_lost_data_since(self._asked_at[lease.token]):
                self._judges.fail(f"S1: {lease!r} {lease.token[:6]} is believed, and the store has it no more")

    def untold(self) -> list[str]:
        """S5: every loss is told by the signal, and so is every release. Those that were not.

        The thread that sends signals belongs to the module, and dies with the simulated process that began it.
        """
        if not all(process.is_alive for process in self._simulation.processes.values()):
            return []
        missing = {
            "loss": self._raised - self._told_tokens,
            "release": self._left - self._told_released - self._failed_to_release,
        }
        return [
            f"{what} of {token[:6]} of {using}" for what, found in missing.items() for using, token in sorted(found)
        ]

    def _has_lost_data_since(self, moment: float) -> bool:
        return self._simulation.world.has_lost_data_since(moment)
