"""Servers, or proxies before them, whose scripts are not told who receives a message."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn
from zlib import crc32

from .redis_server import Server
from .resp import ServerError


def _refuse(channel: str, publish: Callable[[], int]) -> NoReturn:
    raise ServerError("ERR Unknown command called from script")


# What stands for the number of those who heard: "of some" is the truth of every other channel
TOLD: Mapping[str, Callable[[str, Callable[[], int]], int]] = {
    "none": lambda channel, publish: publish() * 0,
    "one": lambda channel, publish: publish() * 0 + 1,
    "of some": lambda channel, publish: publish() * (crc32(channel.encode()) % 2),
    "refused": _refuse,
}


SHARE = 0.1  # of the runs of worlds that are about something else


def mislead_some(servers: Iterable[Server], chance: random.Random) -> bool:
    """In few runs. Returns whether it did."""
    is_misled = chance.random() < SHARE
    if is_misled:
        mislead(servers, chance)
    return is_misled


def mislead(servers: Iterable[Server], chance: random.Random) -> bool:
    """All alike, in one of these ways. Returns whether messages are to be lost, too."""
    way = chance.choice([*TOLD])
    for server in servers:
        server.told = TOLD[way]
    return way != "of some" and chance.random() < 0.5
