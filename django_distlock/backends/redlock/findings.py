"""What ``check()`` finds doubtful or wrong with the nodes of a quorum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..redis.location import Location
from .asking import Asked


class Finding(NamedTuple):
    """``is_error``: locks are not safe like this. Otherwise a warning. ``text`` says what to do."""

    is_error: bool
    text: str


def of_settings(setting: str, nodes: int) -> list[Finding]:
    if nodes % 2 == 0:
        return [
            Finding(
                False,
                f"{setting} names {nodes} nodes. With {nodes - 1} as many may fail; an even number only adds one more"
                " that can. Name 3, 5 or 7.",
            )
        ]
    return []


def examine(locations: Sequence[Location], asked: Sequence[Asked], longest_ttl: float) -> list[Finding]:
    """From the replies to INFO."""
    return list(_examined(locations, asked, longest_ttl))


def _examined(locations: Sequence[Location], asked: Sequence[Asked], longest_ttl: float) -> Iterator[Finding]:
    by_server: dict[str, list[str]] = defaultdict(list)
    for location, one in zip(locations, asked, strict=True):
        reply = one.replies[0] if one.is_answered else one.failure
        if not isinstance(reply, bytes):
            yield Finding(True, f"{location.text} does not answer: {reply}")
            continue
        about = _fields(reply)
        by_server[about.get("run_id", location.text)].append(location.text)
        yield from _of_node(location.text, about, longest_ttl)
    for names in by_server.values():
        if len(names) > 1:
            yield Finding(True, f"{' and '.join(names)} are one server, which then has {len(names)} votes.")


def _of_node(name: str, about: dict[str, str], longest_ttl: float) -> Iterator[Finding]:
    uptime = int(about.get("uptime_in_seconds", 0))
    if uptime < longest_ttl:
        yield Finding(
            False,
            f"{name} runs for {uptime} s, less than the longest TTL of {longest_ttl:g} s. If it lost its locks when it"
            " was restarted, it can now help to grant them a second time: a node must stay away for the longest TTL"
            " before it starts again.",
        )
    if about.get("role", "master") != "master":
        yield Finding(True, f"{name} is a replica. Nodes of a quorum are masters that know nothing of each other.")
    elif int(about.get("connected_slaves", 0)):
        yield Finding(
            False,
            f"{name} has replicas. A replica that takes over may not know the latest locks: let the node be down"
            " instead, which is what the other nodes are for.",
        )
    if int(about.get("maxmemory", 0)) and about.get("maxmemory_policy") != "noeviction":
        yield Finding(
            True,
            f"{name} may evict locks when its memory is full (maxmemory-policy {about.get('maxmemory_policy')}). Set"
            " maxmemory-policy to noeviction.",
        )


def _fields(reply: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in reply.decode().splitlines() if ":" in line]
    return {key: value for key, _, value in lines}
