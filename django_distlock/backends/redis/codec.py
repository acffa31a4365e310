"""Reads the leases that the scripts write: format, token, state, fencing number, slot, ``Holder.to_text()``."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from math import inf
from typing import Any

from ...journal import QueuedWaiter
from ...types import TOKEN_LENGTH, Holder, LockInfo, digest, new_token

# The entry of a waiter: token, slots, inbox, thread. An inbox has one bar, and the name of the process at its end.
ENTRY = re.compile(
    rb"1 (?P<token>[0-9a-f]{%d}) \d{4} (?:polls|[SPTQ][^|]*\|in:(?:\{\d+\}:)?(?P<process>[^|]*))\|.*" % TOKEN_LENGTH,
    re.DOTALL,
)
LONGEST_HOST = 64  # characters

NOT_ASKED = -1  # instead of the ms that are left

# The state is h (held), c (handed to a waiter that has not taken it yet) or r (released, resting for its min_hold).
LEASE = re.compile(
    rb"1 (?P<token>[0-9a-f]{%d}) (?P<state>[hcr]) (?P<fence>\d{16,19}) " % TOKEN_LENGTH
    + rb"(?:(?P<slot>\d{4}) )?(?P<holder>.*)",  # the first slot has no number
    re.DOTALL,
)


def read_lease(alias: str, name: str, value: bytes, left: float) -> LockInfo | None:
    """``left`` in ms. None for a value that no lock wrote."""
    if not (lease := LEASE.fullmatch(value)):
        return None
    token, state, fence, slot, holder = lease.groups()
    try:
        found = _holder(holder)
    except ValueError:
        return None
    return LockInfo(
        name, alias, found, int(fence), read_remaining(left), state == b"r", token.decode(), slot=int(slot or 1)
    )


def is_in_another_slot(value: bytes) -> bool:
    """Whether scripts read it as a lease in another slot than the first: it has a number before the holder."""
    return value[48:52].isdigit() and value[52:53] == b" "


def with_ends(values: Sequence[Any], time: Sequence[Any]) -> list[tuple[bytes, float]]:
    """Leases in other slots than the first, and the ms that each has left.

    ``values``: leases, and their ends on the clock of the server. ``time``: the reply to TIME.
    """
    if values and not isinstance(values[0], list):  # RESP2 returns one list
        values = list(zip(values[::2], values[1::2], strict=True))
    now = int(time[0]) * 1000 + int(time[1]) / 1000
    return [(value, float(end) - now) for value, end in values]


def read_holder(value: bytes | None) -> Holder | None:
    """None also for a value that no lock wrote."""
    if value is None or not (lease := LEASE.fullmatch(value)):
        return None
    try:
        return _holder(lease["holder"])
    except ValueError:
        return None


def read_remaining(left: float) -> float:
    """Seconds, from ms."""
    return inf if left == NOT_ASKED else max(0, left) / 1000


def _holder(text: bytes) -> Holder | None:
    """None: not taken yet."""
    return Holder.from_text(text.decode()) if text else None


def new_process() -> str:
    """The name of the inboxes of this process: host and number, for people, and a token."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:LONGEST_HOST]
    return f"{host}!{os.getpid()}!{new_token()}"  # not by fork.pid(): a child asks when it begins anew


def read_queue(found: Sequence[Any]) -> list[QueuedWaiter]:
    """The waiters from entries and places, which alternate or, with RESP3, are in pairs.

    Leaves out entries that no waiter of this format wrote.
    """
    pairs = found if found and isinstance(found[0], list) else zip(found[::2], found[1::2], strict=True)
    return [waiter for entry, place in pairs if (waiter := _waiter(entry, place))]


def _waiter(entry: bytes, place: bytes | float) -> QueuedWaiter | None:
    if not (match := ENTRY.fullmatch(entry)):
        return None
    since, process = float(place) / 1e6, (match["process"] or b"").decode(errors="replace")
    host, number, _ = [*process.split("!"), "", ""][:3]
    holder = Holder(host, int(number), "", "", since) if number.isdecimal() else None
    return QueuedWaiter(digest(match["token"].decode()), since, holder)
