"""The same for a Cluster: each primary, and the number of shards that all processes must share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from django.core.checks import CheckMessage
from redis.exceptions import ConnectionError, RedisError

from ....options import Terms
from ....types import CheckResult, Level
from .. import diagnostics
from ..config import Location
from ..diagnostics import Diagnostics
from ..errors import reason
from ..keys import ClusterKeys
from ..scripts import Command, pack
from .routing import Address


class ClusterDiagnostics(Diagnostics):
    def __init__(
        self, location: Location, seeds: Sequence[Address], keys: ClusterKeys, terms: Terms, options: str
    ) -> None:
        super().__init__(location, keys.prefix, terms, options)
        self._seeds, self._keys = seeds, keys

    def questions(self, nodes: Sequence[Address]) -> list[Command]:
        agreed, shards = self._keys.agreed, self._keys.shards
        compare = [Command(pack("SET", agreed, shards, "NX"), key=agreed), Command(pack("GET", agreed), key=agreed)]
        return super().questions(nodes) + compare

    def results(self, nodes: Sequence[Address], replies: Sequence[Any], asked_at: float) -> list[CheckResult]:
        grouped: dict[tuple[Level, str, str], dict[Address, str]] = defaultdict(dict)
        for node, info, server_time in zip(nodes, replies[::2], replies[1::2], strict=False):
            for one in self._primary_results(node, info, server_time, asked_at):
                grouped[one.level, one.about, one.hint][node] = one.message
        found = [CheckResult(level, about, _message(of, nodes), hint) for (level, about, hint), of in grouped.items()]
        return [*found, self._shards_result(*replies[-2:])]

    def _primary_results(self, node: Address, info: Any, server_time: Any, asked_at: float) -> list[CheckResult]:
        if isinstance(info, ConnectionError):
            hint = "Its locks wait until it answers or a replica takes over."
            return [CheckResult(Level.ERROR, "primary", f"does not answer: {info}", hint)]
        location = self._location.at(*node)
        return [
            _in_cluster(one) for one in diagnostics.server_results(info, server_time, asked_at, self._terms, location)
        ]

    def _shards_result(self, written: Any, kept: Any) -> CheckResult:
        shards, agreed = self._keys.shards, self._keys.agreed
        if kept is None and isinstance(written, RedisError):
            kept = written
        if isinstance(kept, RedisError):
            hint = "Check again when the Cluster takes new keys."
            if reason(kept) == "NOPERM":
                hint = f"Allow the user to use the key {agreed}, with GET and SET."
            return CheckResult(Level.WARNING, "shards", f"The number of shards cannot be compared: {kept}", hint)
        if kept in (None, str(shards).encode()):  # None: it was deleted since it was written, a moment ago
            return CheckResult(Level.OK, "shards", f"{shards}, as wherever this was checked.")
        return CheckResult(
            Level.ERROR,
            "shards",
            f"{self._options}['shards'] is {shards} here, and was {kept.decode(errors='replace')} where this was first"
            " checked. Processes that disagree about it do not exclude each other.",
            f"Set the same number everywhere. After a change, stop all processes, delete the key {agreed}, and start.",
        )

    def setting_warnings(self, socket_timeout: float, where: str) -> list[CheckMessage]:
        found: dict[str, CheckMessage] = {}
        for seed in self._seeds:
            messages = diagnostics.check_settings(self._location.at(*seed), self._terms, socket_timeout, where)
            found.update({str(message): message for message in messages})
        return list(found.values())

    @property
    def keyspace(self) -> Hashable:
        seeds = frozenset(self._location.at(*seed).server for seed in self._seeds)
        return seeds, self._prefix, self._keys.shards


def _in_cluster(finding: CheckResult) -> CheckResult:
    if finding.about == "replicas" and finding.level is Level.OK:
        hint = "Give each primary a replica; until it is back, its locks are out of reach."
        return CheckResult(Level.WARNING, "replicas", "No replica takes over if this primary fails.", hint)
    return finding


def _message(messages: Mapping[Address, str], nodes: Sequence[Address]) -> str:
    """Each message with its nodes; only once if it is the same for all primaries."""
    different = set(messages.values())
    if len(messages) == len(nodes) and len(different) == 1:
        return f"All {len(nodes)} primaries: {different.pop()}"
    return " ".join(f"{node}: {message}" for node, message in messages.items())
