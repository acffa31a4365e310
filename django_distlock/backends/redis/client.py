"""Commands to one server and their replies, over connections of redis-py, once for threads and once for asyncio.

redis-py's clients repeat a command by themselves when its reply is lost. A lock must know that, because
the lost command may still be executed, so commands are sent here with the repetition in sight.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from redis.exceptions import BusyLoadingError, ConnectionError, NoScriptError, RedisError, ResponseError, TimeoutError

from ...utils import fork
from ...utils.clock import clock, sleep
from ..common.permits import Permit, TaskPermits, permits
from .config import Location
from .connection import RunningFor, hang_up
from .errors import is_silence, is_transient
from .scripts import Command, pack
from .timeouts import Call

IDLE_TRUSTED = 1.0  # seconds for which an idle connection is used again without a look at its socket
IDLE_KEPT = 60.0  # seconds after which it is closed, before something between here and the server forgets it


class Answer(NamedTuple):
    """``replies``: one per command, errors of the server among them. ``sent_at``: before the answered attempt.

    ``repeated``: an earlier attempt went unanswered; the server may execute it yet.
    """

    replies: list[Any]
    sent_at: float
    repeated: bool


NOTHING = Answer([], sent_at=0.0, repeated=False)


class Idle(NamedTuple):
    connection: Any
    since: float


def _to_repeat(commands: Sequence[Command], replies: Sequence[Any]) -> tuple[list[int], list[bytes]]:
    """After a server forgot its scripts: which commands to send again, and what to send for that."""
    forgotten = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    scripts = {script.sha: script for index in forgotten if (script := commands[index].script)}
    loads = [pack("SCRIPT", "LOAD", script.text) for script in scripts.values()]
    return forgotten, loads + [commands[index].packed for index in forgotten]


class Client:
    """For threads. Opens at most ``most`` connections and waits nowhere longer than ``timeout`` seconds.

    ``send`` puts all commands on the wire at once and returns their replies. What fails it tries again as ``Call``
    says, at least once on another connection, because an idle one may have died unnoticed. Then it raises InDoubt,
    or redis-py's error when nothing was executed. ``within`` and ``until``: see ``Call``.
    """

    waits = True  # tries again also after a pause

    def __init__(self, location: Location, most: int, timeout: float) -> None:
        self._location = location
        self._most, self._timeout = most, timeout
        self._start()
        fork.in_child(self._start)

    def _start(self) -> None:
        self._idle: deque[Idle] = deque()
        self._answered_at, self._silent_since = 0.0, inf  # see Call.queued
        weakref.finalize(self, _disconnect, self._idle).atexit = False
        self._permits = permits(self._most)  # one per connection that may be in use

    def send(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        if not commands:
            return NOTHING
        if os.getpid() != fork.known_pid:
            fork.notice()  # a child must not talk on its parent's connections
        began, vacant, idle = clock(), self._permits, self._idle

        def new_call() -> Call:
            waits = self.waits
            return Call(self._location, self._timeout, within, until, began, queues_until=queues_until, waits=waits)

        # Where nothing fails and there is time, what the connection itself waits for a reply is all it takes.
        call = new_call() if within is not None or (until and until - began < self._timeout) else None
        while True:
            try:
                permit = vacant.get_nowait()
            except Empty:
                call = call or new_call()
                permit = self._permit(vacant, call)
            try:
                outcome = self._attempt(commands, call, new_call, idle)
            finally:
                vacant.put(permit)
                del permit  # a traceback may keep this frame
            if isinstance(outcome, Answer):
                return outcome
            call = outcome
            sleep(call.pause)

    def _permit(self, vacant: SimpleQueue[Permit], call: Call) -> Permit:
        queued_at = clock()
        while True:
            seconds = call.queued(self._most, self._silent_since)
            with suppress(Empty):
                permit = vacant.get(timeout=min(seconds, self._timeout))
                call.admitted(queued_at)
                return permit

    def _attempt(
        self, commands: Sequence[Command], call: Call | None, new_call: Callable[[], Call], idle: deque[Idle]
    ) -> Answer | Call:
        """The replies, or the call where there is to be a pause before the next attempt."""
        while True:
            if idle is not self._idle:  # this is a greenlet that a fork has copied; the parent's asks on
                raise ConnectionError("the process was forked")
            sent_at, connection, was_idle = clock(), None, False
            try:
                connection, was_idle = self._idle_connection()
                if connection is None or was_idle:
                    call = call or new_call()
                    connection = connection or self._location.connected(within=call.to_connect())
                timeout = None if call is None else call.left(was_idle=was_idle)
                replies = self._exchange(connection, [command.packed for command in commands], timeout)
                if NoScriptError in map(type, replies):
                    forgotten, again = _to_repeat(commands, replies)
                    call = call or new_call()
                    fresh = self._exchange(connection, again, call.left(was_idle=was_idle))[-len(forgotten) :]
                    for index, reply in zip(forgotten, fresh, strict=True):
                        replies[index] = reply
            except BaseException as error:
                if idle is not self._idle and isinstance(error, Exception):
                    raise ConnectionError("the process was forked") from error
                if connection is not None:
                    connection.disconnect()
                call, pause = call or new_call(), None
                try:
                    pause = call.failed(error, was_sent=connection is not None, was_idle=was_idle)
                finally:
                    if pause != 0 and self._answered_at < sent_at and is_silence(error):
                        self._silent_since = min(self._silent_since, clock())
                self.close()  # what killed this connection may have killed the idle ones
                if pause:
                    return call
            else:
                self._answered_at = now = clock()
                self._silent_since = inf
                idle.append(Idle(connection, now))
                if len(idle) > 1:
                    self._close_old(now)
                return Answer(replies, sent_at, repeated=call is not None and call.is_in_doubt)

    def _idle_connection(self) -> tuple[Any, bool]:
        """One that stands, or None, and whether it stood idle for so long that it may have died."""
        while self._idle:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                break  # another thread took the last one
            age = clock() - since
            if age < IDLE_TRUSTED:
                return connection, False
            if age < IDLE_KEPT and not self._is_stale(connection):
                return connection, True
            connection.disconnect()
        return None, False

    @staticmethod
    def _is_stale(connection: Any) -> bool:
        try:
            return bool(connection.can_read(0))
        except RedisError:
            return True

    def _exchange(self, connection: Any, packed: list[bytes], timeout: float | None) -> list[Any]:
        """``timeout``: None is the one that the connection has."""
        connection.send_packed_command([b"".join(packed)], check_health=False)
        read_by, replies = None if timeout is None or timeout >= self._timeout else clock() + timeout, []
        for _ in packed:
            # Not by an argument of read_response, which redis-py 6 and 7 do not know.
            if read_by is not None and not connection.can_read(max(0.0, read_by - clock())):
                raise TimeoutError("Timeout reading from socket")
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except (ResponseError, BusyLoadingError) as reply:
                replies.append(unless_transient(reply))
        return replies

    def locate(self, key: str) -> None:
        """Learn where the key is. One server has all keys."""

    def nodes(self, known: object) -> tuple[object, Sequence[Any]]:
        """Where to send commands ``at`` that ask for all keys, because together they have them all.

        To be asked again with the first part of the answer, as ``known``, until there are no further ones: where slots
        moved meanwhile, a key may have passed by. At first it is None.
        """
        return self, () if known is self else (None,)

    def close(self) -> None:
        _disconnect(self._idle)

    def _close_old(self, now: float) -> None:
        with suppress(IndexError):  # others take them meanwhile
            while now - self._idle[0].since > IDLE_KEPT:
                self._idle.popleft().connection.disconnect()


class AsyncClient:
    """The same for the tasks of one event loop."""

    ending: AsyncIterator[None]  # held here because the loop itself keeps no more than a weak reference
    waits = True

    def __init__(self, location: Location, most: int, timeout: float) -> None:
        self._location = location
        self._most, self._timeout = most, timeout
        self._idle: deque[Idle] = deque()
        self._answered_at, self._silent_since = 0.0, inf
        self._permits = TaskPermits(most)
        self._keeps = True  # connections for the next call

    async def asend(
        self,
        *commands: Command,
        within: float | None = None,
        until: float | None = 0.0,
        queues_until: float = 0.0,
    ) -> Answer:
        if not commands:
            return NOTHING  # asyncio's transports choke on an empty chunk: such a one is never closed
        began = clock()

        def new_call() -> Call:
            waits = self.waits
            return Call(self._location, self._timeout, within, until, began, queues_until=queues_until, waits=waits)

        call = new_call() if within is not None or (until and until - began < self._timeout) else None
        while True:
            if not self._permits.take():
                call = call or new_call()
                await self._wait_for_permit(call)
            try:
                outcome = await self._attempt(commands, call, new_call)
            finally:
                self._permits.put()
            if isinstance(outcome, Answer):
                return outcome
            call = outcome
            await asyncio.sleep(call.pause)

    async def _wait_for_permit(self, call: Call) -> None:
        queued_at = clock()
        while not self._permits.take():  # one may be free that came back after wake()
            seconds = call.queued(self._most, self._silent_since)
            if await self._permits.wait(None if seconds == inf else seconds):
                break
        call.admitted(queued_at)

    async def _attempt(
        self, commands: Sequence[Command], call: Call | None, new_call: Callable[[], Call]
    ) -> Answer | Call:
        cancelled = _cancellations()
        while True:
            sent_at, connection, was_idle = clock(), None, False
            try:
                connection, was_idle = await self._idle_connection()
                if connection is None or was_idle:
                    call = call or new_call()
                    connection = connection or await self._location.aconnected(within=call.to_connect())
                timeout = self._timeout if call is None else call.left(was_idle=was_idle)
                replies = await self._exchange(connection, [command.packed for command in commands], timeout)
                if NoScriptError in map(type, replies):
                    forgotten, again = _to_repeat(commands, replies)
                    call = call or new_call()
                    fresh = (await self._exchange(connection, again, call.left(was_idle=was_idle)))[-len(forgotten) :]
                    for index, reply in zip(forgotten, fresh, strict=True):
                        replies[index] = reply
            except BaseException as error:
                if connection is not None:
                    await hang_up(connection)
                _check_cancelled(cancelled)
                call, pause = call or new_call(), None
                try:
                    pause = call.failed(error, was_sent=connection is not None, was_idle=was_idle)
                finally:
                    if pause != 0 and self._answered_at < sent_at and is_silence(error) and self._silent_since == inf:
                        self._silent_since = clock()
                        self._permits.wake()
                await self._close_idle()
                if pause:
                    return call
            else:
                self._answered_at = now = clock()
                self._silent_since = inf
                if self._keeps:
                    self._idle.append(Idle(connection, now))
                    while now - self._idle[0].since > IDLE_KEPT:
                        await hang_up(self._idle.popleft().connection)
                else:
                    await hang_up(connection)
                _check_cancelled(cancelled)
                return Answer(replies, sent_at, repeated=call is not None and call.is_in_doubt)

    async def _idle_connection(self) -> tuple[Any, bool]:
        while self._idle:
            connection, since = self._idle.pop()
            age = clock() - since
            if age < IDLE_TRUSTED:
                return connection, False
            if age < IDLE_KEPT and not await self._is_stale(connection):
                return connection, True
            await hang_up(connection)
        return None, False

    @staticmethod
    async def _is_stale(connection: Any) -> bool:
        can_read = getattr(connection, "can_read", None) or connection.can_read_destructive  # until redis-py 7
        try:
            return bool(await can_read())
        except RedisError:
            return True
        except BaseException:
            await hang_up(connection)
            raise

    async def _exchange(self, connection: Any, packed: list[bytes], timeout: float) -> list[Any]:
        async with RunningFor(timeout, "Timeout reading from socket"):
            await connection.send_packed_command([b"".join(packed)], check_health=False)
            return [await self._read(connection) for _ in packed]

    @staticmethod
    async def _read(connection: Any) -> Any:
        try:
            return await connection.read_response(disable_decoding=True)
        except (ResponseError, BusyLoadingError) as reply:
            return unless_transient(reply)

    async def alocate(self, key: str) -> None: ...

    async def anodes(self, known: object) -> tuple[object, Sequence[Any]]:
        return self, () if known is self else (None,)

    async def aclose(self) -> None:
        """The loop ends. What is still sent by others that end with it goes over connections of its own."""
        self._keeps = False
        await self._close_idle()

    async def _close_idle(self) -> None:
        while self._idle:
            await hang_up(self._idle.pop().connection)


def _disconnect(idle: deque[Idle]) -> None:
    with suppress(IndexError):
        while True:
            idle.pop().connection.disconnect()


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _check_cancelled(before: int) -> None:
    """Where a cancellation meets another error, that one may be all that is told."""
    if _cancellations() > before:
        raise asyncio.CancelledError


def unless_transient(reply: Exception) -> Exception:
    """A reply that an attempt on another connection, or later, may not get is none: it is raised."""
    if is_transient(reply):
        raise reply
    return reply
