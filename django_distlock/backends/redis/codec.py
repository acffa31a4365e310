"""Reads what the scripts write into the key of a lock: format, token, state, fencing number, ``Holder.to_text()``."""

from __future__ import annotations

import re
from math import inf

from ...types import TOKEN_LENGTH, Holder, LockInfo

NOT_ASKED = -1  # instead of the ms that are left

# The state is h (held), c (handed to a waiter that has not taken it yet) or r (released, resting for its min_hold).
LEASE = re.compile(
    rb"1 (?P<token>[0-9a-f]{%d}) (?P<state>[hcr]) (?P<fence>\d{16,19}) (?P<holder>.*)" % TOKEN_LENGTH, re.DOTALL
)


def read_lease(alias: str, name: str, value: bytes, left: int) -> LockInfo | None:
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
    )


def read_holder(value: bytes | None) -> Holder | None:
    """None also for a value that no lock wrote."""
    if value is None or not (lease := LEASE.fullmatch(value)):
        return None
    try:
        return _holder(lease["holder"])
    except ValueError:
        return None


def read_remaining(left: int) -> float:
    """Seconds, from ms."""
    return inf if left == NOT_ASKED else max(0, left) / 1000


def _holder(text: bytes) -> Holder | None:
    """None: not taken yet."""
    return Holder.from_text(text.decode()) if text else None
