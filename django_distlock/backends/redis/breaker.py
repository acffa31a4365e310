"""The circuit breaker of a Redis server, and the thread that asks the server while nobody else gets an answer."""

from __future__ import annotations

import logging
import os
from math import inf
from weakref import ref

from redis.exceptions import RedisError

from ...types import Outage
from ...utils import fork
from ...utils.clock import clock, wall_clock
from ...utils.events import about_event
from ...utils.text import printable
from ...utils.threads import Worker
from ..common.breaker import CircuitBreaker
from ..common.timing import Timing
from .config import Location
from .errors import BreakerOpen, NoCredentials, is_about_leaving, is_answer, is_refused, is_silence, without_traceback
from .scripts import pack

logger = logging.getLogger("django_distlock")

_PING = pack("PING")


class ServerBreaker(CircuitBreaker):
    """Counts the errors of redis-py; a prober asks the server while it is open. ``alias``: of the backend."""

    def __init__(
        self, alias: str, location: Location, timeout: float, timing: Timing, failover_timeout: float = 0.0
    ) -> None:
        super().__init__(timeout, failover_timeout, timing)
        self.server = location.text
        self._prober = Prober(alias, location, self)

    def note(self, began: float, error: BaseException) -> bool:
        """An attempt that began then failed. Returns whether that is news; see ``failed()``.

        Some failures do not count. A server that says why it refuses (LOADING, READONLY, a wrong password) is there. A
        server that ends a connection costs nobody any time. A server is not asked if the provider gave no password.
        """
        if is_answer(error):
            self.answered_at = clock()
        if not isinstance(error, Exception) or not is_silence(error):
            return False
        refused = is_refused(error)
        if isinstance(error, BreakerOpen | NoCredentials) or (is_about_leaving(error) and not refused):
            return False
        return self.failed(began, without_traceback(error), refused=refused)

    def check(self) -> None:
        """Raise BreakerOpen if it is open."""
        if self.turns_away():
            raise self.error()

    def outage(self) -> Outage | None:
        if not self.is_open:
            return None
        return Outage(self.server, wall_clock() - self.open_for, printable(str(self.failure)))

    def error(self) -> BreakerOpen:
        error = BreakerOpen(f"{self.failure}; it is asked in the background until it answers")
        error.__cause__ = self.failure
        return error

    def close(self) -> None:
        was_failing = self.is_failing
        super().close()
        if was_failing:
            self._prober.wake()  # it has nothing to do any more, and ends

    def _ask(self) -> None:
        self._prober.wake()


class Prober:
    """Asks a server whose breaker is open, or that did not answer impatient callers.

    It asks after a random pause, each time over a new connection, until the server answers. It logs a line when the
    breaker has opened, and another one when the server answers again.
    """

    def __init__(self, alias: str, location: Location, breaker: ServerBreaker) -> None:
        self._alias, self._location = alias, location
        self._breaker = ref(breaker)  # the thread must not keep a breaker that nobody uses any more
        name = f"distlock-probe-{location.text}"
        self._worker = Worker(name, self._probe, on_refusal=self._on_refusal, idle_timeout=0.0)
        self._reset()
        fork.in_child(self._reset)

    def _reset(self) -> None:
        self._has_told = False
        self._asks_at = inf

    def wake(self) -> None:
        self._worker.nudge()

    def _on_refusal(self, error: RuntimeError) -> None:
        """While no thread can be started, each caller asks."""
        if breaker := self._breaker():
            breaker.close()

    def _probe(self) -> float | None:
        breaker = self._breaker()
        if breaker is None:
            return None
        if clock() - breaker.wanted_at > breaker.timing.probe_idle:
            breaker.close()  # the next caller finds out by itself
        if breaker.is_failing and clock() >= self._asks_at:
            self._ask(breaker)
            self._asks_at = inf
        if not breaker.is_failing:
            if self._has_told and breaker.open_for < inf:  # else it was closed for another reason
                logger.warning(
                    "Lock backend %r: %s answers again.", self._alias, self._location.text,
                    extra=about_event("server-up", alias=self._alias),
                )  # fmt: skip
            self._reset()
            return None
        if breaker.is_tripped and not self._has_told:
            self._has_told = True
            logger.warning(
                "Lock backend %r: %s does not answer (%s). Until it answers, requests for its locks fail at once,"
                " without asking it. Leases are still renewed, and releases are sent when it answers.",
                self._alias, self._location.text, breaker.failure, extra=about_event("server-down", alias=self._alias),
            )  # fmt: skip
        if self._asks_at == inf:
            timing = breaker.timing
            # Not from ``random``: a program that has seeded it does not expect a thread to change its state.
            chance = os.urandom(1)[0] / 255
            shortest, longest = timing.probe_pause_shortest, timing.probe_pause_longest
            self._asks_at = clock() + shortest + chance * (longest - shortest)
            breaker.keep_open(self._asks_at)
        return self._asks_at

    def _ask(self, breaker: ServerBreaker) -> None:
        connection, timeout, began = None, max(breaker.timeout, breaker.timing.shortest_call), clock()
        deadline = began + timeout
        try:
            connection = self._location.connected(timeout=timeout)
            connection.exchange(_PING, 1, max(0.01, deadline - clock()))
        except (RedisError, OSError) as error:
            if is_silence(error):
                breaker.count(began, without_traceback(error), refused=is_refused(error))
                return
        finally:
            if connection is not None:
                connection.disconnect()
        breaker.answered_at = clock()
