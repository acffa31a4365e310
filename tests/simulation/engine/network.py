"""Sockets between simulated processes and servers. Bytes take time, come late, get lost, or meet nobody."""

from __future__ import annotations

import errno
import io
import select
import socket as real
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .scheduler import Process, Scheduler
from .threads import Waiters

if TYPE_CHECKING:
    from collections.abc import Sequence

Address = tuple[str, int]


class Session(Protocol):
    """The server's end of a connection."""

    def receive(self, data: bytes) -> None: ...
    def close(self) -> None:
        """The client has hung up."""


class Server(Protocol):
    """``is_up``: its process runs; else who connects is refused, or, without power, hears nothing."""

    is_up: bool
    has_power: bool

    def accept(self, socket: Socket) -> Session | None:
        """None: it takes in no connection just now, and the client waits."""


class Network:
    """``delay(process, address)``: seconds that bytes take one way; None: they and all later ones are lost."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.servers: dict[Address, Server] = {}
        self.delay: Callable[[Process, Address], float | None] = lambda process, address: self.usual_delay()
        self.passes: Callable[[Address, Address], float | None] = lambda one, other: self.usual_delay()
        self.connects: Callable[[Process, Address], object] = lambda process, address: None  # told of each attempt
        self.closes: Callable[[Socket], object] = lambda socket: None  # told before one is closed that works
        self.refuses: Callable[[Socket], object] = lambda socket: None  # told when a server refuses to connect one
        self.misuses: Callable[[Socket], object] = lambda socket: None  # told of a child that uses one of its parent
        self.sockets: list[Socket] = []  # that are open

    def usual_delay(self) -> float:
        return self.scheduler.random.uniform(0.0001, 0.005)


class Way:
    """The bytes of a connection in one direction, in order."""

    def __init__(self, socket: Socket, deliver: Callable[[bytes], object]) -> None:
        self._socket = socket
        self._deliver = deliver
        self._last_arrival = 0.0
        self.used_at = 0.0  # when bytes last arrived
        self.is_lost = False

    def stall(self, seconds: float) -> None:
        """What is sent from now on arrives after that time."""
        self._last_arrival = max(self._last_arrival, self._socket.network.scheduler.now + seconds)

    def carry(self, data: bytes) -> None:
        """``b""``: the end."""
        socket = self._socket
        assert socket.process
        delay = socket.network.delay(socket.process, socket.address)
        self.is_lost = self.is_lost or delay is None
        if self.is_lost:
            return
        scheduler = socket.network.scheduler
        self._last_arrival = self.used_at = max(self._last_arrival, scheduler.now + (delay or 0.0))
        scheduler.at(self._last_arrival - scheduler.now, lambda: self._deliver(data))


class Socket:
    """The client's end of a connection, as of the standard library as far as redis-py and asyncio use it."""

    by_descriptor: ClassVar[dict[int, Socket]] = {}
    _descriptors = count(1_000_000)

    family, type, proto = real.AF_INET, real.SOCK_STREAM, 6

    def __init__(self, network: Network) -> None:
        self.network = network
        self.address: Address = ("", 0)
        self.connected_at, self.connected_by = 0.0, ""  # when that began, and the name of the thread
        process = network.scheduler.process
        assert process
        self.process = process
        self.session: Session | None = None
        self.changed_for: list[Callable[[], object]] = []  # what to call once when there is something to read or write
        self._timeout: float | None = None
        self._received = bytearray()
        self._is_ended = self._is_closed = self._is_forgotten = False
        self._error: OSError | None = None
        self._waiters = Waiters(network.scheduler)
        self._descriptor = next(self._descriptors)
        self.by_descriptor[self._descriptor] = self
        self._requests = Way(self, self._request)
        self._replies = Way(self, self._reply)
        network.sockets.append(self)
        process.at_death.append(self._end)

    # Options

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        self._timeout = None if flag else 0.0

    def setsockopt(self, *option: Any) -> None: ...

    def getsockopt(self, level: int, option: int) -> int:
        error, self._error = self._error, None
        return error.errno or 0 if error else 0

    def fileno(self) -> int:
        return -1 if self._is_closed else self._descriptor

    def getsockname(self) -> Address:
        return "10.9.9.9", self._descriptor

    def getpeername(self) -> Address:
        if self.session is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return self.address

    # Connecting

    def connect(self, address: Address) -> None:
        self.address, self.connected_at = address[:2], self.network.scheduler.now
        self.connected_by = self.network.scheduler.current.name
        self.network.connects(self.process, self.address)
        delay = self.network.delay(self.process, self.address)
        if delay is not None:
            self.network.scheduler.at(delay, self._reach)
        if self._timeout == 0.0:
            raise BlockingIOError(errno.EINPROGRESS, "Operation now in progress")
        if not self._wait_until(lambda: self.is_writable):
            raise TimeoutError("timed out")
        self._raise_error()

    def _reach(self) -> None:
        server = self.network.servers.get(self.address)
        if self._is_closed or (server and not server.has_power):
            return
        if server is None or not server.is_up:
            self.network.refuses(self)
            self._fail(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
        else:
            self.session = server.accept(self)
            self._changed()

    # Bytes

    @property
    def is_readable(self) -> bool:
        return bool(self._received) or self._is_ended or self._error is not None or self._is_closed

    @property
    def is_writable(self) -> bool:
        return self.session is not None or self._error is not None or self._is_ended

    def sendall(self, data: bytes) -> None:
        self._check()
        if self._is_forgotten:
            return
        if self._is_ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._requests.carry(bytes(data))
        if self._timeout != 0.0:
            self.network.scheduler.sleep(0.0)

    def send(self, data: bytes) -> int:
        self.sendall(data)
        return len(data)

    def sendmsg(self, parts: Sequence[bytes]) -> int:
        return self.send(b"".join(parts))

    def recv(self, length: int) -> bytes:
        self._check()
        if not self._wait_until(lambda: self.is_readable):
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
            raise TimeoutError("timed out")
        self._check()
        if not self._received:
            self._raise_error()
        data = bytes(self._received[:length])
        del self._received[: len(data)]
        return data

    def recv_into(self, buffer: Any, length: int = 0) -> int:
        data = self.recv(length or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        self._check()
        if self._is_forgotten:
            return
        self._tell_of_end()
        self._is_ended = True
        self._requests.carry(b"")
        self._changed()

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(real.SocketIO(self, mode.removesuffix("b")))  # type: ignore[arg-type]

    def _decref_socketios(self) -> None:
        """What ``makefile`` gave is closed."""

    def detach(self) -> int:
        """Of a view, which ``SocketModule.socket(fileno=...)`` gives: the socket stays open."""
        return self._descriptor

    def forget(self) -> None:
        """A forked child leads its descriptor elsewhere: nothing comes from there, and what is sent goes nowhere."""
        self._is_forgotten = self._is_ended = True
        self._received.clear()

    def close(self) -> None:
        """Where a forked child does, its parent has it yet."""
        if self._is_closed:
            return
        self._tell_of_end()
        if not self.process.has_forked:
            self._end()
        self._is_closed = True
        self.by_descriptor.pop(self._descriptor, None)
        self._changed()

    def _end(self) -> None:
        """Nobody has it any more."""
        if self in self.network.sockets:
            self._is_closed = True
            self.network.sockets.remove(self)
            self._requests.carry(b"")

    def _tell_of_end(self) -> None:
        if self.session and self.process.is_alive and not (self._is_ended or self._error):
            self.network.closes(self)

    def _request(self, data: bytes) -> None:
        """Arrived at the server."""
        if self.session is None:
            return
        if data:
            self.session.receive(data)
        else:
            self.session.close()

    @property
    def idle_for(self) -> float:
        """Seconds since the last byte was on its way; 0: it does not stand."""
        used_at = max(self._requests.used_at, self._replies.used_at)
        return self.network.scheduler.now - used_at if self.session else 0.0

    def drop_all(self) -> None:
        """No byte of this connection gets through any more."""
        self._requests.is_lost = self._replies.is_lost = True

    def stall(self, seconds: float) -> None:
        """For so long, bytes of this connection alone do not get through."""
        self._requests.stall(seconds)
        self._replies.stall(seconds)

    # By the server

    def reply(self, data: bytes) -> None:
        self._replies.carry(data)

    def hang_up(self) -> None:
        self._replies.carry(b"")

    def reset(self) -> None:
        """What was sent met nobody who knows of this connection."""
        delay = self.network.delay(self.process, self.address)
        if delay is not None:
            self.network.scheduler.at(
                delay, lambda: self._fail(ConnectionResetError(errno.ECONNRESET, "reset by peer"))
            )

    def _reply(self, data: bytes) -> None:
        if self._is_closed or not self.process.is_alive:
            return
        self._received += data
        self._is_ended = self._is_ended or not data
        self._changed()

    def _fail(self, error: OSError) -> None:
        if not self._is_closed:
            self._error = error
            self._changed()

    # The inside

    def _check(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.process.has_forked and not self._is_forgotten:
            self.network.misuses(self)

    def _raise_error(self) -> None:
        if error := self._error:
            self._error = None
            self._is_ended = True
            raise error

    def _wait_until(self, is_so: Callable[[], bool]) -> bool:
        until = None if self._timeout is None else self.network.scheduler.now + self._timeout / self.process.host.rate
        while not is_so():
            left = None if until is None else until - self.network.scheduler.now
            if self._timeout == 0.0 or self._is_closed or (left is not None and left <= 0.0):
                return False
            self._waiters.wait(left)
        return True

    def _changed(self) -> None:
        self._waiters.wake()
        callbacks, self.changed_for = self.changed_for, []
        for callback in callbacks:
            callback()


class PairedSocket(Socket):
    """One end of a socketpair within a process."""

    other: PairedSocket

    def sendall(self, data: bytes) -> None:
        self._check()
        self.other._reply(data)


class SocketModule:
    """In the place of ``socket``. Names of hosts are their addresses."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, *kind: Any, fileno: int | None = None) -> Socket:
        if fileno is None:
            return Socket(self._network)
        if fileno not in Socket.by_descriptor:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return Socket.by_descriptor[fileno]

    def create_connection(self, address: Address, timeout: float | None = None) -> Socket:
        socket = Socket(self._network)
        socket.settimeout(timeout)
        try:
            socket.connect(address)
        except BaseException:
            socket.close()
            raise
        return socket

    def socketpair(self) -> tuple[Socket, Socket]:
        one, other = PairedSocket(self._network), PairedSocket(self._network)
        one.other, other.other = other, one
        return one, other

    def getaddrinfo(self, host: str, port: int, *rest: Any) -> list[Any]:
        return [(real.AF_INET, real.SOCK_STREAM, 6, "", (host, port))]

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


class Poll:
    """Of ``select.poll()``."""

    def __init__(self, network: Network) -> None:
        self._registered: dict[int, int] = {}
        self._waiters = Waiters(network.scheduler)

    def register(self, fileno: int, events: int = select.POLLIN) -> None:
        self._registered[fileno] = events

    def unregister(self, fileno: int) -> None:
        del self._registered[fileno]

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        if not (found := self._found()) and milliseconds != 0:
            for fileno in self._registered:
                if socket := Socket.by_descriptor.get(fileno):
                    socket.changed_for.append(self._waiters.wake)
            self._waiters.wait(None if milliseconds is None or milliseconds < 0 else milliseconds / 1000)
            found = self._found()
        return found

    def _found(self) -> list[tuple[int, int]]:
        found = []
        for fileno, events in self._registered.items():
            socket = Socket.by_descriptor.get(fileno)
            if socket is None:
                found.append((fileno, select.POLLNVAL))
            elif ready := (select.POLLIN * socket.is_readable + select.POLLOUT * socket.is_writable) & events:
                found.append((fileno, ready))
        return found
