"""What single nodes of a quorum have, of which a majority tells nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from django_distlock.backends.common.timing import Timing

if TYPE_CHECKING:
    from ..simulation import Simulation

UNOWNED = 3 * Timing.retry_delay  # seconds in which a node that answers is told of a release


class Copy(NamedTuple):
    """Of a lease, on one node."""

    node: str
    name: str
    token: str


class Node(NamedTuple):
    """When it failed last, and until when it last refused connections, and with them releases."""

    failed_at: float
    was_deaf_at: float


class CopyJudge:
    """S4: of a lease that was released, no node keeps a copy."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._unowned_since: dict[Copy, float] = {}

    def watch(self, copies: Mapping[Copy, Node]) -> None:
        """A node that did not hear of a release has it until it ends (docs/redlock.md, "Run the nodes")."""
        now, holders = self._simulation.scheduler.now, self._simulation.judges.holders
        for copy in self._unowned_since.keys() - copies.keys():
            del self._unowned_since[copy]
        for copy, node in copies.items():
            asker = self._simulation.asker(copy.token)
            is_kept = asker is None or not asker.process.is_alive or holders.outlasts_its_release(copy.token)
            if asker is None or is_kept or holders.owns(copy.name, copy.token, asker.at, asker.process):
                self._unowned_since.pop(copy, None)
                continue
            since = self._unowned_since.setdefault(copy, now)
            if node.was_deaf_at > since - UNOWNED:
                continue
            if now - max(since, node.failed_at, self._simulation.last_fault(asker.process)) > UNOWNED:
                self._simulation.judges.fail(
                    f"S4: nobody knows of the lease {copy.token[:6]} of {copy.name} at {copy.node} since {since:.3f} s"
                )
