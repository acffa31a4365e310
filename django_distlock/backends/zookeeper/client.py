"""The session of this process with the servers: kazoo's client, and the state of its connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Protocol

from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.exceptions import AuthFailedError, KazooException  # type: ignore[import-untyped]
from kazoo.protocol.states import KazooState, KeeperState  # type: ignore[import-untyped]

from ...utils import fork
from ...utils.clock import clock, sleep
from ...utils.events import about_event
from ...utils.guards import new_guard
from ...utils.threads import start_thread
from ...utils.wakeup import WakeEvent
from .config import Config
from .confirmations import ZooKeeperSession
from .errors import ANSWERS, INTERRUPTIONS, Interrupted, NotConnected, refused
from .handler import Handler
from .requests import Answers

# Kazoo's own pauses grow up to an hour.
RETRY = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}
SERVER_CLOCK_KEPT = 60.0  # seconds for which an answer counts as the servers' clock

logger = logging.getLogger("django_distlock")

_inherited: list[Any] = []  # clients of parents, which a forked child must neither use nor collect


class Sendable(Protocol):
    """A Request or a Multi."""

    @property
    def commits(self) -> bool: ...
    def send(self, client: Any) -> Any: ...


class Client:
    """Opened by the first request, and again in a forked child.

    Kazoo has the connection, its thread, and the search for a server that answers. It reopens a lost connection by
    itself. ``on_change`` is called in its thread when the connection or the session came or went.
    """

    def __init__(self, alias: str, config: Config, on_change: Callable[[], object]) -> None:
        self._alias, self._config, self._on_change = alias, config, on_change
        self.request_timeout = config.request_timeout
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        if inherited := getattr(self, "_opened", None):
            _inherited.append(inherited)
        self._opened: dict[str, Any] = {}  # kazoo's client, put in by a single step
        self._ending = new_guard()  # by which it is taken out; a signal handler may do that, too
        self._handler: Handler | None = None
        self._arrivals: set[WakeEvent] = set()  # of callers that wait for a connection
        self._refusal: Exception | None = None  # the reason why kazoo has given up
        self._server_ahead = -inf, -inf  # seconds ahead of clock(), at least; and until when this counts
        self.session: ZooKeeperSession | None = None
        self.down_since: float | None = None  # on clock(): since when there is no connection; None: there is one
        self.used_at = clock()

    @property
    def is_open(self) -> bool:
        return bool(self._opened)

    @property
    def is_connected(self) -> bool:
        session = self.session
        return session is not None and not session.is_suspended and not session.is_over

    @property
    def connected_to(self) -> tuple[str, int] | None:
        """Address and port of the server."""
        connection = self._handler and self._handler.connection
        return connection.address if connection and self.is_connected else None

    # Requests

    def ask(self, requests: Sequence[Sendable], deadline: float) -> Answers:
        """Send them together, and return all answers.

        ``deadline``: on ``clock()``. Raises Interrupted; LockBackendError if the servers refuse.
        """
        session, kazoo = self._connected() or self._await_connection(deadline)
        sent_at = self.used_at = clock()
        results = [request.send(kazoo) for request in requests]
        for result in results:
            if not result.wait(max(0.0, deadline - clock())):
                raise self._took_too_long(sent_at)
        return self._answers(requests, results, session, sent_at)

    async def aask(self, requests: Sequence[Sendable], deadline: float) -> Answers:
        session, kazoo = self._connected() or await self._aawait_connection(deadline)
        sent_at = self.used_at = clock()
        results = [request.send(kazoo) for request in requests]
        is_answered, missing = WakeEvent(), [None] * len(results)

        def note_answer(result: Any) -> None:
            missing.pop()
            if not missing:
                is_answered.set()

        for result in results:
            result.rawlink(note_answer)
        if missing and not await is_answered.await_set(max(0.0, deadline - clock())):
            raise self._took_too_long(sent_at)
        return self._answers(requests, results, session, sent_at)

    def post(self, request: Sendable, on_answer: Callable[[float, Any], object]) -> bool:
        """Send a request without waiting. ``on_answer`` gets the moment before it was sent, and the value or the error.

        False if there is no connection.
        """
        if (connected := self._connected()) is None:
            return False
        session, kazoo = connected
        sent_at = clock()

        def note_answer(result: Any) -> None:
            value = result.value if result.exception is None else result.exception
            if request.commits and not isinstance(value, INTERRUPTIONS) and self.session is session:
                session.answered(sent_at, clock())
            on_answer(sent_at, value)

        request.send(kazoo).rawlink(note_answer)
        return True

    def _answers(
        self, requests: Sequence[Sendable], results: Sequence[Any], session: ZooKeeperSession, sent_at: float
    ) -> Answers:
        values = [result.value if result.exception is None else result.exception for result in results]
        for value in values:
            if isinstance(value, INTERRUPTIONS):
                raise Interrupted(f"the connection was lost ({type(value).__name__})") from value
            if isinstance(value, KazooException) and not isinstance(value, ANSWERS):
                raise refused(value, self._config.text)
            if isinstance(value, Exception) and not isinstance(value, ANSWERS):
                raise value
        if self.session is not session or session.is_over:
            raise Interrupted("the session ended meanwhile")
        if any(request.commits for request in requests):
            session.answered(sent_at, clock())
        return Answers(session, sent_at, values)

    def _took_too_long(self, sent_at: float) -> Interrupted:
        return Interrupted(f"the answer took longer than {clock() - sent_at:.1f} s")

    def pause(self, seconds: float) -> None:
        sleep(seconds)

    async def apause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    # The connection

    def _connected(self) -> tuple[ZooKeeperSession, Any] | None:
        session, kazoo = self.session, self._opened.get("client")
        if session is None or kazoo is None or session.is_suspended or session.is_over:
            return None
        return session, kazoo

    def _await_connection(self, deadline: float) -> tuple[ZooKeeperSession, Any]:
        while (connected := self._connected()) is None:
            self.open()
            self._raise_if_absent(deadline)
            with self._arrival() as arrival:
                arrival.wait(deadline - clock())
        return connected

    async def _aawait_connection(self, deadline: float) -> tuple[ZooKeeperSession, Any]:
        while (connected := self._connected()) is None:
            self.open()
            self._raise_if_absent(deadline)
            with self._arrival() as arrival:
                await arrival.await_set(deadline - clock())
        return connected

    @contextmanager
    def _arrival(self) -> Iterator[WakeEvent]:
        """Set when there is a connection."""
        arrival = WakeEvent()
        self._arrivals.add(arrival)
        try:
            if self._connected():
                arrival.set()
            yield arrival
        finally:
            self._arrivals.discard(arrival)

    def _raise_if_absent(self, deadline: float) -> None:
        """Kazoo continues to look for a server. If none was there for long, nobody waits for one."""
        if refusal := self._refusal:
            self.close()
            raise refused(refusal, self._config.text)
        since = self.absent_since
        if (since is not None or clock() >= deadline) and self._connected() is None:
            raise NotConnected(self.failure, since)

    @property
    def absent_since(self) -> float | None:
        """Since when there is no server, on ``clock()``, if it is so long that nobody waits for one."""
        since = self.down_since
        return since if since is not None and clock() - since >= self.request_timeout else None

    @property
    def failure(self) -> str:
        """Why there is no connection."""
        return (self._handler and self._handler.failure) or "there is no connection"

    def open(self) -> None:
        """Begin to look for a server, if this has not begun."""
        if self._opened:
            return
        config = self._config
        handler = Handler(
            self._alias, config.timeout / (2 * len(config.hosts) + 2), lambda error: self._fail(made, error)
        )
        made: Any = KazooClient(
            hosts=config.addresses,
            timeout=config.timeout,
            handler=handler,
            default_acl=config.acl,
            auth_data=[("digest", config.auth)] if config.auth else None,
            connection_retry=RETRY,
            **config.tls,
        )
        if self._opened.setdefault("client", made) is not made:
            return  # another thread, or a signal handler, came first
        self.used_at = clock()
        self._handler, self.down_since, self._refusal = handler, self.used_at, None
        made.add_listener(partial(self._on_state, made, handler))
        made.start_async()

    def _on_state(self, kazoo: Any, handler: Handler, state: str) -> None:
        """In kazoo's thread, before anything is sent or read on a new connection."""
        if kazoo not in self._opened.values():  # it was closed
            return
        session = self.session
        if state == KazooState.CONNECTED:
            number, connection = kazoo.client_id[0], handler.connection
            assert connection
            if session is None or session.number != number:
                if session:
                    session.is_over = True
                session = self.session = ZooKeeperSession(number, connection.timeout)
            session.connected(connection.sent_at, connection.timeout)
            session.is_suspended, self.down_since, handler.failure = False, None, ""
        else:
            self.down_since = clock()
            if session and state == KazooState.SUSPENDED:
                session.is_suspended = True
            elif session:
                session.is_over = True
            if kazoo.client_state == KeeperState.AUTH_FAILED:
                self._refusal = AuthFailedError()
        self._tell()

    def _tell(self) -> None:
        for arrival in list(self._arrivals):
            arrival.set()
        self._on_change()

    def _fail(self, kazoo: Any, error: Exception) -> None:
        """Kazoo's thread has ended by an error, and no other serves the session. The next request begins another."""
        with self._ending:
            if kazoo not in self._opened.values():
                return
            if self.session:
                self.session.is_over = True
            del self._opened["client"]
        about = about_event("session-given-up", alias=self._alias)
        logger.error("The session with ZooKeeper at %s is given up: %r", self._config.text, error, extra=about)
        kazoo.close()
        self._tell()

    def reconnect(self) -> None:
        """The servers do not answer over this connection, or it does not show for how long the session lasts."""
        if (handler := self._handler) and (connection := handler.connection):
            handler.left = connection.address
            connection.drop()

    def close(self) -> None:
        """End the session and with it all of its nodes. The next request begins another one."""
        with self._ending:
            kazoo = self._opened.pop("client", None)
            session, self.session, self.down_since = self.session, None, None
            if session:
                session.is_over = True
        if kazoo:
            start_thread(f"distlock-closing-{self._alias}", _close, kazoo)

    # The clock of the servers

    def note_server_time(self, milliseconds: int, answered_at: float) -> None:
        """Note the time of the servers from a stat, whose answer came at this moment on ``clock()``."""
        ahead = milliseconds / 1000 - answered_at
        known, until = self._server_ahead
        if ahead > known or answered_at > until:
            self._server_ahead = ahead, answered_at + SERVER_CLOCK_KEPT

    @property
    def server_time(self) -> float | None:
        """Unix time by the clock of the servers; not later than there, except that their clocks may differ."""
        known, _ = self._server_ahead
        return None if known == -inf else clock() + known


def _close(kazoo: Any) -> None:
    try:
        kazoo.stop()
        kazoo.close()
    except Exception as error:  # the servers end the session after its timeout
        logger.debug("A session with ZooKeeper was not closed: %s", error, extra=about_event("session-left"))
