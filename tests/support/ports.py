"""Ports for servers of tests."""

from __future__ import annotations

import socket
import sys
from contextlib import closing, suppress
from random import SystemRandom

# Below those that the kernel gives to connections, and to servers that name none: such a port may be taken before the
# server of a test takes it. The ports of a Cluster's bus are 10,000 above.
FIRST, LAST = 11_000, 20_999
BUS = 10_000

_random = SystemRandom()  # the other one may begin alike in all processes of a run


def free_ports(number: int, *, with_bus: bool = False) -> list[int]:
    """``with_bus``: the port of the bus is free, too."""
    found: dict[int, None] = {}
    while len(found) < number:
        port = _random.randint(FIRST, LAST)
        if _is_free(port) and (not with_bus or _is_free(port + BUS)):
            found[port] = None
    return [*found]


def free_port() -> int:
    [port] = free_ports(1)
    return port


def kept_port() -> tuple[int, socket.socket]:
    """A free port, which no other test is given until the socket is closed, also while the server is away.

    Servers can have it that set SO_REUSEADDR, on Linux; on other systems it is not kept.
    """
    while True:
        keeper, port = socket.socket(), free_port()
        if sys.platform != "linux":
            keeper.close()
            return port, keeper
        try:
            keeper.bind(("127.0.0.1", port))
        except OSError:
            keeper.close()
            continue
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not before: two could have the same
        return port, keeper


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
