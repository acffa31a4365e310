"""What a network does to those who connect: names that nobody resolves, addresses that swallow what is sent to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

GETADDRINFO = socket.getaddrinfo

Names = dict[str, list[str] | threading.Event]


def without_names_of_tests(host: Any, *arguments: Any, **options: Any) -> list[Any]:
    """As the system's, but a name in ``.test`` is unknown at once.

    A thread that outlives its test may ask for one, and a resolver of the network may take half a minute.
    """
    if str(host).endswith(".test"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return GETADDRINFO(host, *arguments, **options)


@contextmanager
def resolving() -> Iterator[tuple[Names, list[str]]]:
    """Names in ``.test`` with their addresses, or with an event until which nobody resolves them; and what was asked.

    At the end they become unknown, and stay so in this process.
    """
    names: Names = {}
    asked: list[str] = []

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> list[Any]:
        if host not in names:
            return without_names_of_tests(host, port, *arguments, **options)
        if len(arguments) > 3 and arguments[3] & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        asked.append(host)
        answer = names[host]
        if isinstance(answer, threading.Event):
            answer.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [found for address in answer for found in GETADDRINFO(address, port, *arguments)]

    socket.getaddrinfo = getaddrinfo
    try:
        yield names, asked
    finally:
        socket.getaddrinfo = without_names_of_tests
        for answer in names.values():
            if isinstance(answer, threading.Event):
                answer.set()


def lookups() -> list[str]:
    """Threads that resolve names for connections of ours."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("distlock-lookup-")]


@contextmanager
def swallowing(host: str, port: int) -> Iterator[None]:
    """Who connects there hears nothing, as where packets are dropped: the backlog of the listener is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(closing(socket.socket()))
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex((host, port))
        yield


@contextmanager
def silent_listener() -> Iterator[int]:
    """The port of one that takes everybody in and never says a word."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1000)
        yield listener.getsockname()[1]
