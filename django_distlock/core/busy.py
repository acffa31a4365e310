"""What is said of a lock that somebody else has."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

from ..types import LockInfo


def described(busy: LockInfo) -> str:
    if not busy.holder:
        return "it is being handed over"
    since = f"{datetime.fromtimestamp(busy.holder.since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    left = f"{busy.remaining:.1f} s left"
    if busy.resting:
        return f"it rests for the min_hold of {busy.holder}{_on_nodes(busy)}, which took it at {since}; {left}"
    ends = f", {left} unless renewed" if busy.remaining < inf else ""
    return f"held by {busy.holder}{_on_nodes(busy)} since {since}{ends}"


def _on_nodes(busy: LockInfo) -> str:
    if busy.nodes is None:
        return ""
    failed = f" while {busy.failed_nodes} failed" if busy.failed_nodes else ""
    return f" on {busy.nodes} node{'' if busy.nodes == 1 else 's'}{failed}"
