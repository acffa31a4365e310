"""Problems of the nodes of a quorum, for ``check()``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from django.core.checks import CheckMessage, Warning

from ...types import CheckResult, Level
from ..redis.config import Location
from ..redis.diagnostics import cache_warnings, read_info
from .messages import Exchange


def setting_warnings(setting: str, locations: Sequence[Location]) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    if not (count := len(locations)) % 2:
        message = f"{setting} names {count} nodes. With {count - 1} as many may fail; an even number adds one."
        found.append(Warning(message, hint="Name 3, 5 or 7.", id="distlock.W030"))
    for index, location in enumerate(locations):
        found += cache_warnings(location, f"{setting}[{index}]")
    return found


def examine(locations: Sequence[Location], exchanges: Sequence[Exchange], longest_ttl: float) -> list[CheckResult]:
    """Results from the replies to INFO."""
    return list(_examined(locations, exchanges, longest_ttl))


def _examined(
    locations: Sequence[Location], exchanges: Sequence[Exchange], longest_ttl: float
) -> Iterator[CheckResult]:
    by_server: dict[str, list[str]] = defaultdict(list)
    for location, exchange in zip(locations, exchanges, strict=True):
        reply = exchange.replies[0] if exchange.is_answered else exchange.failure
        if not isinstance(reply, bytes):
            hint = "Locks are granted while a majority of the nodes answers."
            yield CheckResult(Level.ERROR, "nodes", f"{location.text} does not answer: {reply}", hint)
            continue
        about = read_info(reply)
        by_server[about.get("run_id", location.text)].append(location.text)
        yield from _of_node(location.text, about, longest_ttl)
    for names in by_server.values():
        if len(names) > 1:
            message = f"{' and '.join(names)} are one server, which then has {len(names)} votes."
            yield CheckResult(Level.ERROR, "nodes", message, "Name each server once.")


def _of_node(name: str, about: dict[str, str], longest_ttl: float) -> Iterator[CheckResult]:
    uptime = int(about.get("uptime_in_seconds", 0))
    if uptime < longest_ttl:
        yield CheckResult(
            Level.WARNING,
            "uptime",
            f"{name} runs for {uptime} s, less than the longest TTL of {longest_ttl:g} s. If it lost its locks when it"
            " was restarted, it can now help to grant them a second time.",
            "A node must stay away for the longest TTL before it starts again.",
        )
    if about.get("role", "master") != "master":
        message = f"{name} is a replica. Nodes of a quorum are masters that know nothing of each other."
        yield CheckResult(Level.ERROR, "replicas", message, "Name its master, or make it one.")
    elif int(about.get("connected_slaves", 0)):
        yield CheckResult(
            Level.WARNING,
            "replicas",
            f"{name} has replicas. A replica that takes over may not know the latest locks.",
            "Let the node be down instead, which is what the other nodes are for.",
        )
    if int(about.get("maxmemory", 0)) and about.get("maxmemory_policy") != "noeviction":
        yield CheckResult(
            Level.ERROR,
            "eviction",
            f"{name} may evict locks when its memory is full (maxmemory-policy {about.get('maxmemory_policy')}).",
            "Set maxmemory-policy to noeviction.",
        )
