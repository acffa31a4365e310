"""The server's end of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .resp import Replies, encoded, next_command

if TYPE_CHECKING:
    from ..engine.network import Socket
    from .redis_server import Server


class Session:
    """The server's end of a connection. ``channels``: (kind, channel), in the order of the subscriptions."""

    def __init__(self, server: Server, socket: Socket, number: int) -> None:
        self.server, self.socket, self.number = server, socket, number
        self.channels: dict[tuple[str, str], None] = {}
        self.version = 2
        self.name = ""
        self.is_authenticated = not server.password
        self.is_asking = self.is_readonly = False  # at a node of a Cluster
        self.is_open = True
        self._buffer = b""
        self._is_waiting = False  # for its turn at a slow server
        self._is_left = False

    @property
    def kind(self) -> str:
        return "pubsub" if self.channels else "normal"

    def listens_to(self, kind: str) -> int:
        return sum(one == kind for one, _ in self.channels)

    # For the network

    def receive(self, data: bytes) -> None:
        if self.is_open:
            self._buffer += data
            self.go_on()
        elif self.server.has_power:
            self.socket.reset()

    def close(self) -> None:
        """The client has hung up. The server learns of it behind what the client had sent before, and executes that."""
        self._is_left = True
        self.go_on()

    # For the server

    def go_on(self) -> None:
        """Execute what has come, as far as it is complete."""
        while not self._is_waiting and self._has_command:
            if self.server.must_wait(self):
                self._is_waiting = True
                return
            self._execute()
        if self._is_left and not (self._is_waiting or self.server.is_hanging):
            self._forget()

    def _forget(self) -> None:
        self.is_open = False
        if self in self.server.sessions:
            self.server.sessions.remove(self)

    @property
    def _has_command(self) -> bool:
        """That can be executed now."""
        if not self.is_open or self.server.is_hanging or (found := next_command(self._buffer)) is None:
            return False
        return not self.server.holds(found[0])

    def execute_late(self) -> None:
        self._is_waiting = False
        if self._has_command:
            self._execute()
        self.go_on()

    def _execute(self) -> None:
        if (found := next_command(self._buffer)) is None:
            return
        command, self._buffer = found
        if self.server.watch_before:
            self.server.watch_before(self, command)
        reply = self.server.execute(self, command)
        if self.server.watch:
            self.server.watch(self, command, reply)
        for one in reply if isinstance(reply, Replies) else [reply]:
            self.send(one)

    def send(self, reply: Any) -> None:
        if self.is_open:
            self.socket.reply(encoded(reply, self.version))

    tell = send

    def end(self) -> None:
        """By the server."""
        if self.is_open:
            self._forget()
            self.socket.hang_up()
