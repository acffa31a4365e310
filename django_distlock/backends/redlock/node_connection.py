"""One connection to one node, as threads use it."""

from __future__ import annotations

from collections import deque
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from ...utils import fork
from ...utils.clock import clock
from ..redis.credentials import take_new_login
from .messages import MAX_PENDING, Exchange, Message, check_process


class NodeConnection:
    """A connection for one thread at a time. Replies come in the order of the messages.

    A late reply is read before the next one; ``pending`` remembers to which message it belongs.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._pid = fork.pid()
        self.fileno: int = connection.sock.fileno()
        self.pending: deque[Exchange] = deque()
        self.is_closed = False

    def is_ready(self, timeout: float, *, urgent: bool) -> bool:
        """Whether a reply can be expected; with ``urgent`` also if one is overdue."""
        if urgent:
            return len(self.pending) < 2 * MAX_PENDING  # so that everything acquired can be released
        return len(self.pending) < MAX_PENDING and self.unresponsive_for < timeout

    @property
    def unresponsive_for(self) -> float:
        """Seconds since the oldest message without a reply was sent."""
        return clock() - self.pending[0].sent_at if self.pending else 0.0

    @property
    def awaits_release(self) -> bool:
        return any(exchange.on_lost for exchange in self.pending.copy())

    def send(self, message: Message, sent_at: float) -> Exchange:
        check_process(self._pid)
        packed = [message.packed]
        if self._connection.new_login and (login := take_new_login(self._connection)):
            packed.insert(0, login.packed)
            self.pending.append(Exchange(1, sent_at, self))
        exchange = Exchange(message.replies, sent_at, self)
        self.pending.append(exchange)
        try:
            self._connection.send_packed_command(packed, check_health=False)
        except (RedisError, OSError) as error:
            self.close(error)
        return exchange

    def read(self) -> None:
        """Take the replies that have come. There must be at least one."""
        check_process(self._pid)
        if not self.pending:
            self.close(ConnectionError("the node closed the connection"))
        try:
            while self.pending:
                try:
                    reply = self._connection.read_response(disable_decoding=True)
                except NoScriptError:
                    raise  # the node forgot our scripts; a new connection brings them
                except ResponseError as error:
                    reply = error
                if self.pending[0].take(reply):
                    self.pending.popleft()
                if self.pending and not self._connection.can_read(0):
                    return
        except (RedisError, OSError) as error:
            self.close(error)

    def close_with_undo(self, error: Exception) -> None:
        """Send commands that undo the pending messages, behind them, in case the node wakes up and executes these."""
        for undo in [exchange.undo_message() for exchange in self.pending if exchange.undo_message]:
            self.send(undo, clock())
        self.close(error)

    def close(self, error: Exception) -> None:
        self.is_closed = True
        self._connection.disconnect()
        while self.pending:
            self.pending.popleft().lose(error)
