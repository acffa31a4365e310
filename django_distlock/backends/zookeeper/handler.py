"""The environment that kazoo requires: threads, sockets, and waiting for these."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from traceback import walk_tb
from typing import Any

from kazoo.exceptions import ConnectionDropped  # type: ignore[import-untyped]
from kazoo.handlers.threading import SequentialThreadingHandler  # type: ignore[import-untyped]

from ...utils import fork
from ...utils.clock import clock
from ...utils.events import about_event
from ...utils.threads import new_thread

logger = logging.getLogger("django_distlock")

HEAD = 12  # bytes of the first answer on a connection: its length, the version of the protocol, the timeout


class Connection:
    """One connection, which kazoo uses as a socket. ``timeout``: of the session, in seconds, once the server sent it.

    Kazoo itself does not report which timeout the server agreed to.
    """

    timeout = 0.0

    def __init__(self, connection: Any, address: tuple[str, int], sent_at: float) -> None:
        self.address = address
        self.sent_at = sent_at  # nothing was sent before
        self._connection = connection
        self._head = b""
        self.fileno, self.send, self.close = connection.fileno, connection.send, connection.close
        self.setblocking = connection.setblocking
        if hasattr(connection, "pending"):  # TLS
            self.pending = connection.pending

    def recv(self, size: int) -> bytes:
        data: bytes = self._connection.recv(size)
        self._head += data
        if len(self._head) >= HEAD:
            self.timeout = int.from_bytes(self._head[HEAD - 4 : HEAD], "big", signed=True) / 1000
            self.recv = self._connection.recv  # type: ignore[method-assign]
        return data

    def drop(self) -> None:
        """Break the connection, so that kazoo notices it and opens another one."""
        with suppress(OSError):  # broken already
            self._connection.shutdown(socket.SHUT_RDWR)


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """One thread with a name, for the connection, which also runs the callbacks. None in a forked child.

    ``connect_timeout``: seconds for the connection to one server, and for its first answer. Kazoo itself allows the
    whole timeout of the session for the connection, and much of it for the answer, so a server that hangs would cost
    leases. ``on_failure``: gets the error that ends kazoo's thread, for example if a server mixes up its answers.
    """

    def __init__(self, alias: str, connect_timeout: float, on_failure: Callable[[Exception], object]) -> None:
        super().__init__()
        self._alias, self._on_failure = alias, on_failure
        self._pid = fork.pid()
        self._connect_timeout = connect_timeout
        self.connection: Connection | None = None  # the last connection
        self.failure = ""  # the reason why the last one could not be opened
        self.left: tuple[str, int] | None = None  # the address of a server that did not answer; others come first

    def start(self) -> None:
        """Without kazoo's threads for callbacks, and without its atexit handler, which joins them.

        A child that exits by ``sys.exit()`` would call that handler, too, with locks that another thread held at the
        fork.
        """

    def stop(self) -> None:
        """Nothing to do: nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        """Run it at once, so that an event is known before the answer after it. Our callbacks do not take long."""
        try:
            callback.func(*callback.args)
        except Exception:
            about = about_event("watch-failed", alias=self._alias)
            logger.exception("An event of ZooKeeper could not be handled", extra=about)

    def spawn(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                func(*args, **kwargs)
            except Exception as error:
                self._on_failure(error)

        thread = new_thread(f"distlock-zookeeper-{self._alias}", run)
        thread.start()
        return thread

    def create_connection(self, address: tuple[str, int], timeout: float = inf, **kwargs: Any) -> Connection:
        self._end_in_child()
        left, self.left = self.left, None
        if address == left:
            raise ConnectionDropped(f"{address} did not answer just now")  # kazoo tries the next one at once
        sent_at = clock()
        try:
            connection = super().create_connection(address, timeout=min(timeout, self._connect_timeout), **kwargs)
        except Exception as error:
            self.failure = str(error)
            _close_left_open(error)
            raise
        self.connection = Connection(connection, address, sent_at)
        return self.connection

    def select(
        self, readable: Sequence[Any], writable: Sequence[Any], other: Sequence[Any], timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Without a new epoll object for each call."""
        self._end_in_child()
        if timeout is not None and self.connection and not self.connection.timeout:
            timeout = min(timeout, self._connect_timeout)
        if not hasattr(select, "poll"):  # Windows
            found: tuple[list[Any], list[Any], list[Any]] = super().select(readable, writable, other, timeout)
            return found
        poll = select.poll()
        waiting: dict[int, tuple[list[Any], Any]] = {}
        can_read: list[Any] = []
        can_write: list[Any] = []
        for ready, those, event in ((can_read, readable, select.POLLIN), (can_write, writable, select.POLLOUT)):
            for one in those:
                number = one.fileno()
                waiting[number] = ready, one
                poll.register(number, event)
        for number, _ in poll.poll(None if timeout is None else timeout * 1000):  # also if it is broken
            ready, one = waiting[number]
            ready.append(one)
        return can_read, can_write, []

    def _end_in_child(self) -> None:
        """A greenlet that a fork has copied must not use the parent's connection."""
        if fork.is_copy(self._pid):
            raise SystemExit


def _close_left_open(error: BaseException) -> None:
    """If TLS is refused, kazoo does not close the socket; only the frames of the error refer to it."""
    for frame, _ in walk_tb(error.__traceback__):
        if isinstance(connection := frame.f_locals.get("conn"), ssl.SSLSocket):
            connection.close()
