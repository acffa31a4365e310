"""Processes that ask for the lock. What they do is the package's own code, in its asynchronous form; simulated
are what it stands on: tasks, sockets, events, and the renewer, because these follow the clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from math import inf
from types import coroutine
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError, TimeoutError

from django_distlock.backends.common.attempts import NOT_WAITING, InDoubt
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.common.wakeup_listener import Waiters
from django_distlock.backends.redis.backend import RedisBackend
from django_distlock.backends.redis.client import AsyncClient, Reply
from django_distlock.backends.redis.pubsub import RedisListener
from django_distlock.backends.redis.scripts import Command
from django_distlock.core.acquire import Acquisition
from django_distlock.core.holds import Holds
from django_distlock.core.lease import safe_deadline
from django_distlock.core.local_queue import LocalQueue
from django_distlock.core.renewal import Cleaner
from django_distlock.exceptions import LockBackendError
from django_distlock.options import Terms
from django_distlock.types import Grant, Holder, LockInfo, LockRequest
from django_distlock.utils.drive import adrive
from tests.support.inside import listener_of

if TYPE_CHECKING:
    from .world import World

TIMEOUT = 2.0  # seconds a client waits for a reply
SHORTEST_TTL, LONGEST_TTL = 8.0, 12.0
CUT = object()  # with what a reader wakes whose connection was cut

Wake = Callable[[Any], object]
Effect = Callable[[Wake], object]  # what a task waits for: called with what wakes the task


@coroutine
def suspended(effect: Effect) -> Generator[Effect, Any, Any]:
    """Wait for the effect, and return what it wakes with."""
    return (yield effect)


class Cancelled(BaseException):
    """Thrown into whoever waits, as asyncio does it."""


class Task:
    """A thread or a task: runs until it waits for something."""

    def __init__(self, process: Process, steps: Coroutine[Effect, Any, Any]) -> None:
        self._process = process
        self._steps = steps
        self._turn = 0  # wakes what waits now, and not what has waited for something else before
        self.is_cancellable = False

    def go(self, step: Callable[[Any], Effect], value: Any) -> None:
        self._turn += 1
        self._process.current = self
        try:
            begin = step(value)
        except StopIteration:
            return
        begin(partial(self._wake, self._turn))

    def start(self) -> None:
        self.go(self._steps.send, None)

    def _wake(self, turn: int, value: Any) -> None:
        self._process.when_running(partial(self._go_on, turn, value))

    def _go_on(self, turn: int, value: Any) -> None:
        if turn == self._turn:
            self.go(self._steps.send, value)

    def cancel(self) -> None:
        if self.is_cancellable:
            self._process.world.tell("cancelled", self._process)
            self.go(self._steps.throw, Cancelled())

    def close(self) -> None:
        self._turn += 1
        self._steps.close()


class WakeEvent:
    """As the package's, for tasks of the simulation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rung = False
        self._wake: Wake | None = None

    def set(self) -> None:
        self._rung = True
        if self._wake:
            self._world.after(0.0, self._wake, None)

    async def await_set(self, timeout: float) -> None:
        await suspended(partial(self._begin, timeout))
        self._rung, self._wake = False, None

    def _begin(self, timeout: float, wake: Wake) -> None:
        self._wake = wake
        self._world.after(0.0 if self._rung else timeout, wake, None)


class Requests(dict[str, LockRequest]):
    """For a WeakValueDictionary: freed as told, not as it happens."""

    def valuerefs(self) -> list[Callable[[], LockRequest | None]]:
        return [partial(self.get, token) for token in self]


class SimulatedWaiters(Waiters):
    def __init__(self) -> None:
        self._requests: Any = Requests()


class SimulatedWorker:
    """As Worker: a task that works when it is nudged, and when the work is due again."""

    def __init__(self, process: Process, work: Callable[[], Coroutine[Effect, Any, float | None]]) -> None:
        self._process, self._work = process, work
        self._event = WakeEvent(process.world)
        self._is_nudged = False
        self.thread: object = None

    def nudge(self, due: float = -inf) -> None:
        self._is_nudged = True
        if due <= self._process.world.now:
            self._event.set()
        if self.thread is None:
            self.thread = self
            self._process.start(self._run())

    async def _run(self) -> None:
        while self._is_nudged:
            self._is_nudged = False
            while (due := await self._work()) is not None:
                await self._event.await_set(max(0.0, due - self._process.world.now))
        self.thread = None


class SimulatedCleaner(Cleaner):
    def __init__(self, process: Process) -> None:
        super().__init__(process.backend)
        self._worker: Any = SimulatedWorker(process, self._clean)

    async def _clean(self) -> float | None:
        return await adrive(self.steps(), self._backend)


class SimulatedListener(RedisListener):
    """The connection is two facts: whether the store counts it, and whether it delivers."""

    def __init__(self, process: Process, hand_back: Callable[[str, str], None], timing: Timing) -> None:
        self._process = process
        location: Any = None  # the world is where it connects to
        super().__init__(location, lambda: "", hand_back, "simulated", timing, SimulatedWaiters())
        self._channel = f"lock|in:{process.number}"
        self._kind = process.world.random.choice("SP")
        self._worker: Any = SimulatedWorker(process, self.listen)
        self._delivers = False
        self._end: Wake | None = None
        self.is_heard_of = False

    def is_counted(self, kind: str, channel: str) -> bool:
        return self.is_heard_of and (kind, channel) == (self._kind, self._channel)

    def receive(self, text: str) -> None:
        if self._delivers:
            self._receive([b"message", b"", text.encode()])

    async def astart(self, name: str, timeout: float) -> None:
        world = self._process.world
        until = world.now + TIMEOUT
        self.touch()
        while not self.is_ready:
            if world.now >= until:
                raise TimeoutError("no answer to SUBSCRIBE")
            await self._process.sleep(self._timing.listener_nap / 2)

    # The thread

    async def listen(self) -> float | None:
        if self._is_wanted:
            await adrive(self.steps(), self)
        return self._not_before if self._is_wanted else None

    async def aconnect(self) -> object:
        await self._process.sleep(self._process.world.between(0.002, 0.05))
        self.is_heard_of = self._delivers = True
        return object()

    async def asubscribe(self, connection: object) -> None:
        await self._process.sleep(self._process.world.between(0.002, 0.05))
        self._inbox = self._kind + self._channel
        self._mark_ready()

    async def aread(self, connection: object, seconds: float) -> None:
        """Until the connection ends or the time is over; what is delivered meanwhile is heard as it comes."""
        if await suspended(partial(self._until_ended, seconds)) is CUT:
            raise ConnectionError("it was cut")

    def _until_ended(self, seconds: float, wake: Wake) -> None:
        self._end = wake
        self._process.world.after(seconds, wake, None)

    def disconnect(self, connection: object) -> None:
        self._end = None
        self.is_heard_of = self._delivers = False

    def will_look(self, *told: Any) -> None:
        super().will_look(*told)
        self._tell_if_given_up()

    def looked(self, *told: Any) -> None:
        super().looked(*told)
        self._tell_if_given_up()

    def _tell_if_given_up(self) -> None:
        if self._resubscribe and self.is_ready:
            self._process.world.checker.gives_up_subscription(works=self._delivers and self.is_heard_of)

    def cut(self, is_noticed_by_store: bool) -> None:
        """Of a half-open connection neither side knows at first; one that is reset is seen by both, soon or late."""
        if self.is_ready:
            self._delivers = False
            if is_noticed_by_store:
                self.is_heard_of = False
            self._process.world.after(
                self._process.world.random.choice([0.01, 1.0, 5.0]), self._noticed, self._connection
            )

    def _noticed(self, connection: object) -> None:
        if self._connection is connection and self._end:
            self._end(CUT)

    def disappear(self) -> None:
        self.is_heard_of = False


class SimulatedClient(AsyncClient):
    """With the world as its connections."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def get(self) -> SimulatedClient:
        """As PerLoop."""
        return self

    async def asend(
        self,
        *commands: Command,
        timeout: float | None = None,
        deadline: float = NOT_WAITING,
        queue_deadline: float = NOT_WAITING,
    ) -> Reply:
        """Twice, and then no more."""
        patience, world = min(TIMEOUT, TIMEOUT if timeout is None else timeout), self._process.world
        for in_doubt in (False, True):
            sent_at = world.now
            reply = await suspended(partial(world.exchange, self._process, commands[0], patience))
            if reply is not None:
                return Reply([reply], sent_at, in_doubt)
        raise InDoubt.because_of(TimeoutError("no reply"))


class SimulatedBackend(RedisBackend):
    """With the world as its client. Tells the checker what its callers are told."""

    _listener: SimulatedListener

    def __init__(self, process: Process) -> None:
        super().__init__("default", {"LOCATION": "redis://127.0.0.1:6379/0", "OPTIONS": {"socket_timeout": TIMEOUT}})
        self.on_orphan = process.release_in_background
        self._process = process
        self._world = process.world
        self._listener = SimulatedListener(process, self._hand_back, self.timing)
        self._async_clients: Any = SimulatedClient(process)

    async def aacquire(self, lock_request: LockRequest, *, queue: bool) -> Grant | LockInfo:
        self._world.checker.asks(lock_request)
        answer = await super().aacquire(lock_request, queue=queue)
        if isinstance(answer, LockInfo) and lock_request.place:
            self._world.checker.told_place(lock_request)
        return answer

    async def arelease(self, lock_request: LockRequest, cooldown: float = 0.0, *, force: bool = False) -> bool:
        released = await super().arelease(lock_request, cooldown, force=force)
        if not lock_request.is_offer:  # else somebody may have taken it
            self._world.checker.settled(lock_request)
        return released


class Process:
    """Threads and tasks that share a backend, a listener and a cleaner: a Service of its own."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.is_alive = True
        self.is_stopped = False
        self.waiting: list[float] = []  # since when each caller waits
        self.renewer = self
        self.queue = LocalQueue(Timing())
        self.backend = SimulatedBackend(self)
        self.listener = listener_of(self.backend)
        self.current: Task
        self._cleaner = SimulatedCleaner(self)
        self._tasks: list[Task] = []
        self._backlog: list[Callable[[], object]] = []

    def __str__(self) -> str:
        return f"p{self.number:<2}"

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_stopped

    def start(self, steps: Coroutine[Effect, Any, Any]) -> None:
        task = Task(self, steps)
        self._tasks.append(task)
        self.world.after(0.0, self.when_running, task.start)

    def when_running(self, happen: Callable[[], object]) -> None:
        if self.is_stopped:
            self._backlog.append(happen)
        elif self.is_alive:
            happen()

    def go_on(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for happen in backlog:
            self.world.after(self.world.between(0.0, 0.01), self.when_running, happen)

    def kill(self) -> None:
        self.is_alive = False
        for task in self._tasks:
            task.close()
        self.waiting.clear()

    async def sleep(self, seconds: float) -> None:
        await suspended(lambda wake: self.world.after(seconds, wake, None))

    # As Renewer and Cleaner

    def get(self, token: str) -> None:
        """The leases of its callers are their own affair here."""

    latest = get

    def release_in_background(self, lock_request: LockRequest, *, cooldown: float = 0.0, until: float = 0.0) -> bool:
        if self.is_alive:
            self._cleaner.add(lock_request, cooldown, max(until, self.world.now + lock_request.ttl))
        return self.is_alive

    # Callers

    async def calls(self) -> None:
        """A thread or task that asks for the lock again and again."""
        pick = self.world.random.choice
        me = self.current
        service: Any = self
        while True:
            await self.sleep(pick([0.0, 0.0, 0.05, self.world.between(0.0, 3.0)]))
            if not self.world.is_faulty:
                return
            seconds = pick([0.0, 0.0, self.world.between(0.02, 1.0), self.world.between(1.0, 10.0), None])
            ttl = pick(self.world.faults.ttls)
            holder = Holder("host", os.getpid(), str(self), "simulation", 0.0)
            event: Any = WakeEvent(self.world)
            lock_request = LockRequest("name", ttl, holder, self.world.new_token(), event=event)
            acquisition = Acquisition(service, lock_request, seconds, Terms(), Holds(), me)
            try:
                await self._wait(me, acquisition, seconds)
            except Cancelled:
                continue
            except LockBackendError:
                self.world.checker.fails(lock_request, waited=acquisition.has_waited)
                continue
            if acquisition.grant:
                await self._hold(acquisition.request, acquisition.grant)
            elif not acquisition.request.is_inherited:
                self.world.checker.settled(acquisition.request)

    async def _wait(self, me: Task, acquisition: Acquisition, seconds: float | None) -> None:
        since = self.world.now
        if seconds != 0.0:
            self.waiting.append(since)
        me.is_cancellable = True
        if self.world.chance(self.world.faults.cancel):
            self.world.after(self.world.between(0.0, 4.0), self.when_running, me.cancel)
        try:
            await adrive(acquisition.steps(), self.backend)
        except BaseException as error:
            acquisition.undo(error)
            raise
        finally:
            me.is_cancellable = False
            if since in self.waiting:
                self.waiting.remove(since)

    async def _hold(self, lock_request: LockRequest, grant: Grant) -> None:
        """As Lease and Renewer: renew at a third of the TTL, keep min_hold, do not release what is lost."""
        granted_at = self.world.now
        deadline = safe_deadline(grant.sent_at, lock_request.ttl)
        self.world.checker.believes(self, lock_request, grant, deadline)
        self.world.tell("holds", self, lock_request.token)
        if self.world.chance(0.2):
            self.world.tell("adopted", self, lock_request.token)  # by another process: this one knows it no more
            self.listener.forget(lock_request)
        until = granted_at + self.world.random.choice(
            [0.0, 0.01, 0.1, self.world.between(0.0, 2.0), self.world.between(0.0, 8.0)]
        )
        if self.world.chance(self.world.faults.run_out):
            await self.sleep(deadline - granted_at)
        else:
            deadline = await self._renew(lock_request, grant, deadline, until)
        self.world.checker.disbelieves(lock_request)
        if self.world.now >= deadline:
            self.world.tell("lost", self, lock_request.token)
            self.listener.forget(lock_request)
            return
        min_hold = self.world.random.choice([0.0, 0.0, 0.0, self.world.between(0.0, 2.0)])
        cooldown = max(0.0, granted_at + min_hold - self.world.now)
        self.world.checker.cools_down(lock_request, min(self.world.now + cooldown, deadline))
        try:
            released = await self.backend.arelease(lock_request, cooldown)
        except LockBackendError:
            self.release_in_background(lock_request, cooldown=cooldown, until=deadline)
        else:
            if not released:
                self.world.checker.was_lost(lock_request, deadline)

    async def _renew(self, lock_request: LockRequest, grant: Grant, deadline: float, until: float) -> float:
        """Return the deadline, which has passed if the lease was lost."""
        due = grant.sent_at + lock_request.ttl / 3
        while self.world.now < min(until, deadline):
            await self.sleep(max(0.0, min(due, until, deadline) - self.world.now))
            if self.world.now < due or self.world.now >= deadline:
                continue
            sent_at = self.world.now
            try:
                [renewed] = await self.backend.arenew(
                    [(lock_request, lock_request.ttl)], timeout=(deadline - sent_at) / 3
                )
            except LockBackendError:
                due = self.world.now + min(self.backend.timing.retry_delay, lock_request.ttl / 6)
                continue
            if not renewed:
                self.world.checker.was_lost(lock_request, deadline)
                return -inf
            deadline = max(deadline, safe_deadline(sent_at, lock_request.ttl))
            due = sent_at + lock_request.ttl / 3
            self.world.checker.renewed(lock_request, deadline)
        return deadline
