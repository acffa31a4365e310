"""Reads the leases that the scripts write: format, token, state, fencing number, slot, ``Holder.to_text()``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Any

from ...types import TOKEN_LENGTH, Holder, LockInfo

NOT_ASKED = -1  # instead of the ms that are left

# The state is h (held), c (handed to a waiter that has not taken it yet) or r (released, resting for its min_hold).
LEASE = re.compile(
    rb"1 (?P<token>[0-9a-f]{%d}) (?P<state>[hcr]) (?P<fence>\d{16,19}) " % TOKEN_LENGTH
    + rb"((?P<slot>\d{4}) )?(?P<holder>.*)",  # the first slot is not told
    re.DOTALL,
)


def read_lease(alias: str, name: str, value: bytes, left: float) -> LockInfo | None:
    """``left`` in ms. None for a value that no lock wrote."""
    if not (lease := LEASE.fullmatch(value)):
        return None
    try:
        holder = _holder(lease["holder"])
    except ValueError:
        return None
    return LockInfo(
        name,
        alias,
        holder,
        int(lease["fence"]),
        read_remaining(left),
        resting=lease["state"] == b"r",
        token=lease["token"].decode(),
        slot=int(lease["slot"] or 1),
    )


def with_ends(values: Sequence[Any], left: int) -> list[tuple[bytes, float]]:
    """Leases in other slots than the first, and the ms that each has left.

    ``values``: leases, and their ends on the clock of the server. ``left``: the ms that the last of them has.
    """
    if values and not isinstance(values[0], list):  # RESP2 has them in one list
        values = list(zip(values[::2], values[1::2], strict=True))
    ends = [float(end) for _, end in values]
    return [(value, end - ends[-1] + left) for (value, _), end in zip(values, ends, strict=True)]


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
