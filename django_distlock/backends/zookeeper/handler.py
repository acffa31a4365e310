"""What kazoo asks of its surroundings: threads, sockets, and waiting for these."""

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
    """One connection, as kazoo uses its socket. ``timeout``: of the session in seconds, once the server said it.

    Kazoo itself tells nobody to which timeout the server agreed.
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
        """Kazoo finds that the connection is broken, and opens another one."""
        with suppress(OSError):  # broken already
            self._connection.shutdown(socket.SHUT_RDWR)


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """One thread, with a name: that of the connection, which also makes the callbacks. None in a forked child.

    ``connect_timeout``: seconds for the connection to one server, and for its first answer. For the one kazoo has the
    whole timeout of the session, for the other much of it; a server that hangs would cost leases by that.
    ``on_failure``: told of an error by which kazoo's thread ends, as where a server mixes up its answers.
    """

    def __init__(self, alias: str, connect_timeout: float, on_failure: Callable[[Exception], object]) -> None:
        super().__init__()
        self._alias, self._on_failure = alias, on_failure
        self._pid = fork.pid()
        self._connect_timeout = connect_timeout
        self.connection: Connection | None = None  # of the last connection
        self.failure = ""  # why the last one could not be opened
        self.left: tuple[str, int] | None = None  # the address of a server that did not answer; others come first

    def start(self) -> None:
        """Without its threads for callbacks, and without what it registers with atexit to join them.

        A child that leaves by ``sys.exit()`` would do that, too, with locks that another thread held at the fork.
        """

    def stop(self) -> None:
        """Nothing was started."""

    def dispatch_callback(self, callback: Any) -> None:
        """At once, so that an event is known before the answer that comes after it. None of ours takes long."""
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
            raise ConnectionDropped(f"{address} did not answer just now")  # kazoo takes the next one at once
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
        for number, _ in poll.poll(None if timeout is None else timeout * 1000):  # also where it is broken
            ready, one = waiting[number]
            ready.append(one)
        return can_read, can_write, []

    def _end_in_child(self) -> None:
        """A greenlet that a fork has copied must not use what is the parent's."""
        if fork.is_copy(self._pid):
            raise SystemExit


def _close_left_open(error: BaseException) -> None:
    """Kazoo closes no socket on which TLS was refused, and keeps it in the frames of the error alone."""
    for frame, _ in walk_tb(error.__traceback__):
        if isinstance(connection := frame.f_locals.get("conn"), ssl.SSLSocket):
            connection.close()
