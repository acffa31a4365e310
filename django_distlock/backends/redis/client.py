"""Commands to one server and their replies, over connections of redis-py, once for threads and once for asyncio.

redis-py's clients repeat a command by themselves if its reply is lost. A lock must know this, because the lost command
may still be executed. So commands are sent here, and the caller learns of a repetition.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, RedisError

from ...types import NOT_WAITING
from ...utils import fork
from ...utils.clock import clock, sleep
from ..common.permits import Permit, TaskPermits, new_permits
from ..common.timing import Timing
from .attempts import ServerAttempts, longest_step
from .breaker import ServerBreaker
from .config import Location
from .connection import hang_up
from .errors import NotSent
from .replies import NOTHING, Reply, put_in, to_repeat
from .scripts import Command

_packed = attrgetter("packed")
Idle = tuple[Any, float]  # a connection, and since when nobody uses it


class _ServerClient:
    """The common parts of the clients of one server, for threads and for tasks."""

    retries_after_pause = True

    def __init__(
        self, location: Location, max_connections: int, timeout: float, timing: Timing, breaker: ServerBreaker
    ) -> None:
        self._location, self._timing, self._breaker = location, timing, breaker
        self._max_connections, self._timeout = max_connections, timeout
        self._new_attempts = partial(ServerAttempts, location, timing, timeout, pauses=self.retries_after_pause)

    def _check_breaker(self, attempts: ServerAttempts, *, despite_outage: bool) -> None:
        """Raise BreakerOpen for a call that has no attempt yet. Another one continues to its end."""
        if not (despite_outage or attempts.has_failed):
            self._breaker.check()

    def _seconds_to_queue(self, attempts: ServerAttempts) -> float:
        """How long to wait for a connection, without news. Raises if waiting is of no use."""
        breaker = self._breaker
        silent_since = breaker.failing_since + self._timeout if breaker.is_failing else inf
        return attempts.seconds_to_queue(self._max_connections, silent_since)

    def _note_failure(self, error: BaseException, began: float, *, was_idle: bool) -> bool:
        """Returns whether it is news; see ``CircuitBreaker.failed()``. An idle connection may have died by itself."""
        return not was_idle and self._breaker.note(began, error)


class Client(_ServerClient):
    """For threads. Opens at most ``max_connections``. No single step, such as a reply, lasts longer than ``timeout``.

    ``send`` sends all commands together. It retries a failed attempt, as ``ServerAttempts`` says, at least once on
    another connection, because an idle one may have died unnoticed. Then it raises InDoubt, or redis-py's error if
    nothing was executed. Its ``timeout`` is the ``limit`` there.

    While the breaker of the server is open it raises BreakerOpen, unless ``despite_outage``. It asks the breaker only
    if no idle connection was used in the last second, because there is none while the breaker is open.
    """

    def __init__(
        self, location: Location, max_connections: int, timeout: float, timing: Timing, breaker: ServerBreaker
    ) -> None:
        super().__init__(location, max_connections, timeout, timing, breaker)
        self._reset_after_fork()
        fork.in_child(self._reset_after_fork)

    def _reset_after_fork(self) -> None:
        self._idle: deque[Idle] = deque()
        weakref.finalize(self, _disconnect, self._idle).atexit = False
        self._permits = new_permits(self._max_connections)  # one per connection that may be in use

    def send(
        self,
        commands: Sequence[Command],
        deadline: float = NOT_WAITING,
        queue_for: float = 0.0,
        timeout: float | None = None,
        despite_outage: bool = False,
    ) -> Reply:
        if not commands:
            return NOTHING
        fork.notice()  # a child must not talk on its parent's connections
        number = len(commands)
        packed = commands[0].packed if number == 1 else b"".join(map(_packed, commands))
        permits, idle, began = self._permits, self._idle, clock()
        sent_at = began
        # Attempts count from the first failure on, or from a wait for a connection. The first attempt, made at once,
        # lasts as long as the socket waits, unless the call must be over before.
        attempts: ServerAttempts | None = None
        step: float | None = None
        if timeout is not None or NOT_WAITING < deadline < sent_at + self._timeout:
            step = self._given(longest_step(self._timing, self._timeout, timeout, deadline, sent_at))
        while True:
            try:
                permit = permits.get_nowait()
            except Empty:
                attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                permit = self._wait_for_permit(permits, attempts, despite_outage=despite_outage)
                sent_at = clock()
            try:
                if attempts:  # it has waited
                    self._check_not_forked(idle)
                while True:
                    connection, was_idle = None, False
                    try:
                        try:
                            free, since = idle.pop()
                        except IndexError:
                            free, since = None, -inf
                        if sent_at - since < self._timing.idle_trusted:
                            connection = free
                        else:
                            attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                            self._check_breaker(attempts, despite_outage=despite_outage)
                            connection = self._standing(free, since, sent_at)
                            was_idle = connection is not None
                            connection = connection or self._location.connected(timeout=attempts.connect_timeout())
                        if attempts:
                            step = self._given(attempts.step_timeout(was_idle=was_idle))
                        replies = connection.exchange(packed, number, step)
                        if (number > 1 or type(replies[0]) is not int) and NoScriptError in map(type, replies):
                            attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                            step = self._given(attempts.step_timeout(was_idle=was_idle))
                            self._repeat_forgotten(connection, commands, replies, step)
                    except BaseException as error:
                        if isinstance(error, Exception):
                            self._check_not_forked(idle)
                        attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                        self._after_failure(error, connection, attempts, sent_at, was_idle=was_idle)
                        if attempts.pause:
                            break
                        sent_at = clock()
                    else:
                        self._breaker.answered_at = now = clock()
                        idle.append((connection, now))
                        if len(idle) > 1:
                            self._close_old(now)
                        reply = Reply(replies, sent_at)
                        if attempts:
                            reply.in_doubt, reply.queued_for = attempts.in_doubt, attempts.queued_for
                        return reply
            finally:
                permits.put(permit)
                del permit  # a traceback may keep this frame, and with it the permit
            sleep(attempts.pause)
            sent_at = clock()

    def post(self, command: Command) -> bool:
        """Send a command whose reply nobody needs, on an idle connection. False: none was used lately, or it failed."""
        fork.notice()
        permits, idle = self._permits, self._idle
        try:
            permit = permits.get_nowait()
        except Empty:
            return False
        connection = None
        try:
            connection, since = idle.pop()
            was_in_use = clock() - since < self._timing.idle_trusted
            if was_in_use and not connection.post(command.packed):
                return False
            idle.append((connection, since))
            connection = None
            return was_in_use
        except IndexError:
            return False
        finally:
            if connection is not None:
                connection.disconnect()
            permits.put(permit)

    def _check_not_forked(self, idle: deque[Idle]) -> None:
        if idle is not self._idle:  # a fork has copied this greenlet; the parent's greenlet continues
            raise ConnectionError("the process was forked")

    def _wait_for_permit(
        self, permits: SimpleQueue[Permit], attempts: ServerAttempts, *, despite_outage: bool
    ) -> Permit:
        queued_at = clock()
        while True:
            self._check_breaker(attempts, despite_outage=despite_outage)
            seconds = self._seconds_to_queue(attempts)
            with suppress(Empty):
                permit = permits.get(timeout=min(seconds, self._timeout))
                attempts.extend_for_queueing(queued_at, clock())
                return permit

    @staticmethod
    def _repeat_forgotten(connection: Any, commands: Sequence[Command], replies: list[Any], step: float | None) -> None:
        forgotten, again = to_repeat(commands, replies)
        try:
            put_in(replies, forgotten, connection.exchange(b"".join(again), len(again), step))
        except NotSent as error:  # but other commands of the batch were
            raise ConnectionError(str(error)) from error

    def _after_failure(
        self, error: BaseException, connection: Any, attempts: ServerAttempts, sent_at: float, *, was_idle: bool
    ) -> None:
        """Decide on a pause before the next attempt. Raises the error of the call if no attempt follows."""
        if connection is not None:
            connection.disconnect()
        try:
            self._note_failure(error, sent_at, was_idle=was_idle)
            attempts.pause_before_retry(error, was_sent=connection is not None, was_idle=was_idle)
        finally:
            del error  # see ServerAttempts.pause_before_retry()
        self.close()  # the idle connections may be dead for the same reason

    def _standing(self, connection: Any, since: float, now: float) -> Any:
        """This connection or the next one, of those idle for so long that they may have died; None if none is open."""
        while connection is not None:
            if now - since < self._timing.idle_kept and not self._is_stale(connection):
                break
            connection.disconnect()
            try:
                connection, since = self._idle.pop()
            except IndexError:
                connection = None
        return connection

    @staticmethod
    def _is_stale(connection: Any) -> bool:
        try:
            return bool(connection.can_read(0))
        except RedisError:
            return True

    def _given(self, timeout: float) -> float | None:
        """None if the connection's own timeout will do."""
        return timeout if timeout < self._timeout else None

    def locate(self, key: str) -> None:
        """Find the node of the key. One server has all keys."""

    def nodes(self, known: object, *, despite_outage: bool = False) -> tuple[object, Sequence[Any]]:
        """Returns a map, and the nodes that together have all keys, for commands that ask for all keys.

        Call again with that map as ``known`` (at first None) until no nodes come, because slots may move meanwhile.
        """
        return self, () if known is self else (None,)

    def close(self) -> None:
        _disconnect(self._idle)

    def _close_old(self, now: float) -> None:
        try:
            while now - self._idle[0][1] > self._timing.idle_kept:
                self._idle.popleft()[0].disconnect()
        except IndexError:
            return  # others have taken the connections meanwhile


class AsyncClient(_ServerClient):
    """The same for the tasks of one event loop."""

    ending: AsyncIterator[None]  # the generator that is closed when the loop ends; set by PerLoop

    def __init__(
        self, location: Location, max_connections: int, timeout: float, timing: Timing, breaker: ServerBreaker
    ) -> None:
        super().__init__(location, max_connections, timeout, timing, breaker)
        self._idle: deque[Idle] = deque()
        self._permits, self._loop = TaskPermits(max_connections), asyncio.get_running_loop()
        self._keeps = True  # connections for the next call

    async def asend(
        self,
        commands: Sequence[Command],
        deadline: float = NOT_WAITING,
        queue_for: float = 0.0,
        timeout: float | None = None,
        despite_outage: bool = False,
    ) -> Reply:
        if not commands:
            return NOTHING  # asyncio never closes a transport that was given an empty chunk
        number = len(commands)
        packed = commands[0].packed if number == 1 else b"".join(map(_packed, commands))
        idle, began, task = self._idle, clock(), asyncio.current_task(self._loop)
        sent_at = began
        attempts: ServerAttempts | None = None
        step = longest_step(self._timing, self._timeout, timeout, deadline, sent_at)
        while True:
            if not self._permits.take():
                attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                await self._wait_for_permit(attempts, despite_outage=despite_outage)
                sent_at = clock()
            try:
                cancelled = task.cancelling() if task else 0
                while True:
                    connection: Any = None
                    was_idle = False
                    try:
                        free, since = idle.pop() if idle else (None, -inf)
                        if sent_at - since < self._timing.idle_trusted:
                            connection = free
                        else:
                            attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                            self._check_breaker(attempts, despite_outage=despite_outage)
                            connection = await self._standing(free, since, sent_at)
                            was_idle = connection is not None
                            if connection is None:
                                connection = await self._location.aconnected(timeout=attempts.connect_timeout())
                        if attempts:
                            step = attempts.step_timeout(was_idle=was_idle)
                        replies = await connection.exchange(packed, number, step)
                        if (number > 1 or type(replies[0]) is not int) and NoScriptError in map(type, replies):
                            attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                            step = attempts.step_timeout(was_idle=was_idle)
                            await self._repeat_forgotten(connection, commands, replies, step)
                    except BaseException as error:
                        if connection is not None:
                            await hang_up(connection)
                        _check_cancelled(task, cancelled)
                        attempts = attempts or self._new_attempts(timeout, deadline, began, queue_for)
                        self._after_failure(error, connection, attempts, sent_at, was_idle=was_idle)
                        await self._close_idle()
                        if attempts.pause:
                            break
                        sent_at = clock()
                    else:
                        self._breaker.answered_at = now = clock()
                        if self._keeps:
                            idle.append((connection, now))
                            if len(idle) > 1:
                                await self._close_old(now)
                        else:
                            await hang_up(connection)
                        _check_cancelled(task, cancelled)
                        reply = Reply(replies, sent_at)
                        if attempts:
                            reply.in_doubt, reply.queued_for = attempts.in_doubt, attempts.queued_for
                        return reply
            finally:
                self._permits.put()
            await asyncio.sleep(attempts.pause)
            sent_at = clock()

    def post(self, command: Command) -> bool:
        idle = self._idle
        if not idle or clock() - idle[-1][1] >= self._timing.idle_trusted:
            return False
        posted: bool = idle[-1][0].post(command.packed)
        return posted

    async def _wait_for_permit(self, attempts: ServerAttempts, *, despite_outage: bool) -> None:
        queued_at = clock()
        while not self._permits.take():  # one may have come back after wake()
            self._check_breaker(attempts, despite_outage=despite_outage)
            seconds = self._seconds_to_queue(attempts)
            if await self._permits.wait(None if seconds == inf else seconds):
                break
        attempts.extend_for_queueing(queued_at, clock())

    @staticmethod
    async def _repeat_forgotten(connection: Any, commands: Sequence[Command], replies: list[Any], step: float) -> None:
        forgotten, again = to_repeat(commands, replies)
        try:
            put_in(replies, forgotten, await connection.exchange(b"".join(again), len(again), step))
        except NotSent as error:
            raise ConnectionError(str(error)) from error

    def _after_failure(
        self, error: BaseException, connection: Any, attempts: ServerAttempts, sent_at: float, *, was_idle: bool
    ) -> None:
        try:
            if self._note_failure(error, sent_at, was_idle=was_idle):
                self._permits.wake()
            attempts.pause_before_retry(error, was_sent=connection is not None, was_idle=was_idle)
        finally:
            del error  # see ServerAttempts.pause_before_retry()

    async def _standing(self, connection: Any, since: float, now: float) -> Any:
        while connection is not None:
            if now - since < self._timing.idle_kept and not await self._is_stale(connection):
                break
            await hang_up(connection)
            connection, since = self._idle.pop() if self._idle else (None, -inf)
        return connection

    @staticmethod
    async def _is_stale(connection: Any) -> bool:
        try:
            stale: bool = await connection.is_stale()
            return stale
        except RedisError:
            return True
        except BaseException:
            await hang_up(connection)
            raise

    async def alocate(self, key: str) -> None: ...

    async def anodes(self, known: object, *, despite_outage: bool = False) -> tuple[object, Sequence[Any]]:
        return self, () if known is self else (None,)

    async def aclose(self) -> None:
        """The loop ends. Tasks that end with it and still send something use new connections."""
        self._keeps = False
        await self._close_idle()

    async def _close_old(self, now: float) -> None:
        while self._idle and now - self._idle[0][1] > self._timing.idle_kept:
            await hang_up(self._idle.popleft()[0])

    async def _close_idle(self) -> None:
        while self._idle:
            await hang_up(self._idle.pop()[0])


def _disconnect(idle: deque[Idle]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop()[0].disconnect()


def _check_cancelled(task: asyncio.Task[Any] | None, before: int) -> None:
    """Raise the cancellation if the task was cancelled while another error was in flight."""
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
