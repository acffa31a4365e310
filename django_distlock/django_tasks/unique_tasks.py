"""Tasks of ``django.tasks`` that are in the queue once: a second ``enqueue()`` finds the first one.

The lease of a message is one more argument of it, which ``call()`` takes away. The id of the message is that of its
result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal, cast

from asgiref.sync import sync_to_async
from django.db import transaction
from django.dispatch import receiver
from django.tasks import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_QUEUE_NAME,
    TaskResultStatus,
)
from django.tasks.base import DEFAULT_TASK_PRIORITY
from django.tasks.signals import task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from .. import names
from ..core.busy import described, not_acquired
from ..core.registry import DEFAULT_ALIAS
from ..core.succession import Succession
from ..decorators import key, task_context
from ..exceptions import InvalidLockName
from ..message_ids import new_message, task_of
from ..types import LockInfo, place_of
from ..unique import options
from ..unique.options import DEFAULT_TTL, Unique, Until, unique
from ..unique.publishing import UniqueHolder, already_queued, claim, lengthen, publish
from ..unique.queued import FIELD, QueuedLease
from ..unique.runs import UniqueRun, is_guarded, read_lease, release_unrun
from ..utils.clock import clock, sleep, wall_clock
from .queues import AnyResult, AnyTask, DatabaseQueue, Queue, queue_of

LOOK_EVERY = 1.0  # seconds between two looks at a name that another run of the same message has

STATUS = {
    "queued": TaskResultStatus.READY,
    "running": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
}

logger = logging.getLogger("django_distlock")

# Of this thread: the result of the unique task that a backend calls next, and the lease of the last one that it called.
started: ContextVar[AnyResult | None] = ContextVar("distlock_started", default=None)
called: ContextVar[str] = ContextVar("distlock_called", default="")


@receiver(task_started)
def _on_started(task_result: AnyResult, **_: Any) -> None:
    """Of a backend, in the thread that calls the task next: only so one that takes no context is told its id."""
    started.set(task_result if FIELD in task_result.kwargs else None)


@receiver(task_finished)
def _on_finished(task_result: AnyResult, **_: Any) -> None:
    """Of one that failed before it was called, as by a receiver of ``task_started``: nobody else frees its name."""
    text = task_result.kwargs.get(FIELD)
    if text and text != called.get() and task_result.status == TaskResultStatus.FAILED:
        release_unrun(text)
    called.set("")


def unique_task(
    template: Any = None,
    /,
    *,
    name: str | Callable[..., str] | None = None,
    until: Until = "end",
    ttl: Any = DEFAULT_TTL,
    on_duplicate: Literal["return", "raise", "drop"] = "return",
    on_unavailable: Literal["raise", "run"] = "raise",
    using: str = DEFAULT_ALIAS,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
) -> Any:
    """``@unique_task("sync:{account_id}")`` in the place of Django's ``@task``, whose options it takes, too.

    ``template``: of the name of the task's lock, over the arguments that ``enqueue()`` is given; in its place ``name``
    may be a callable that gets them and returns the name. Neither: the task is unique as a whole. The lock is
    ``unique:`` and the name.

    ``until``: when the same task may be queued again. ``"start"``: when its body begins; ``"end"``: when it has
    returned or raised; ``"success"``: ``ttl`` seconds after it was queued, or when it has raised.

    ``ttl``: seconds for which a message that nobody runs keeps others from being queued, beside the time until its
    ``run_after``. A run keeps the name for as long as it takes; that of a worker that was killed for the ``TTL`` of
    the alias.

    ``on_duplicate``: ``"return"`` returns the TaskResult of the message that is queued or running, ``"raise"`` raises
    TaskAlreadyQueued, ``"drop"`` returns None.

    ``on_unavailable``: when the store cannot be asked, ``"raise"`` raises LockBackendError, and ``"run"`` queues and
    runs the task as one that is not unique.

    ``using``: an alias of locks on Redis or on a database; in local memory only if one process queues the tasks and
    runs them. ``backend``: an alias of ``TASKS``.

    Raises ValueError for values out of range, InvalidLockName for a template that the function cannot fill, and what
    ``@task`` raises.
    """
    if callable(template) and (name is not None or getattr(template, "__name__", "") == "<lambda>"):
        raise TypeError("A callable that makes the name is given as @unique_task(name=...).")
    if isinstance(template, str) and name is not None:
        raise TypeError("The name is given twice, as a template and as name=.")
    given = unique(
        template if isinstance(template, str) else name, until=until, ttl=ttl, on_duplicate=on_duplicate,
        on_unavailable=on_unavailable, using=using,
    )  # fmt: skip

    def decorate(function: Callable[..., Any]) -> UniqueTask:
        made = UniqueTask(
            func=function, unique=given, priority=priority, queue_name=queue_name, backend=backend, run_after=None,
            takes_context=takes_context,
        )  # fmt: skip
        made.check_template()
        return made

    return decorate(template) if callable(template) else decorate


@dataclass(frozen=True, kw_only=True)
class UniqueTask(AnyTask):
    """A task that is in the queue once.

    ``unique``: what ``@unique_task`` was given. ``is_bypassed``: it is queued as any other task all the same.
    """

    unique: Unique
    is_bypassed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_bypassed:
            options.task_backends.add(self.backend)

    @cached_property
    def _name_of(self) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        function = partial(self.func, None) if self.takes_context else self.func  # None: the context
        signature, name_of = key.signature_of(function), self.unique.namer(function)

        def checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            signature.bind(*args, **kwargs)
            return name_of(args, kwargs)

        return checked

    def check_template(self) -> None:
        """Raises InvalidLockName where the task cannot fill it, before it is first queued."""
        name = self.unique.name
        if self.takes_context and isinstance(name, str) and "context" in names.parse(name).arguments:
            raise InvalidLockName(f"The template {name!r} asks for 'context', which enqueue() is not given.")
        _ = self._name_of

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        unique: bool | None = None,
    ) -> UniqueTask:
        """As of each task. ``unique=False``: one that is queued whoever has its name; True: one that is not, again."""
        changed = super().using(priority=priority, queue_name=queue_name, run_after=run_after, backend=backend)
        return replace(cast(UniqueTask, changed), is_bypassed=self.is_bypassed if unique is None else not unique)

    def unique_find(self, *args: Any, **kwargs: Any) -> UniqueHolder | None:
        """Who has the task with these arguments queued, or runs it. None: nobody.

        Raises LockBackendError, and TypeError for arguments that it does not take.
        """
        [leases] = Succession(self.unique.using).backend.look([self._name_of(args, kwargs)])
        return UniqueHolder.of(leases[0]) if leases else None

    async def aunique_find(self, *args: Any, **kwargs: Any) -> UniqueHolder | None:
        """``unique_find()`` for tasks of an event loop."""
        return await sync_to_async(self.unique_find)(*args, **kwargs)

    def enqueue(self, *args: Any, **kwargs: Any) -> Any:
        """As of each task. In the place of a duplicate, what ``on_duplicate`` says.

        None in the place of a TaskResult where somebody else has a lock of its name; and with ImmediateBackend also
        where a task of another thread is about to begin, whose id is not known yet.

        In a transaction of the database that has the messages, the message is written in any case, and it is decided at
        COMMIT whether it is a duplicate: then it succeeds with None, and does nothing.

        Raises TaskAlreadyQueued and LockBackendError as the options say; InvalidTaskBackend for a backend, and
        InvalidLockBackend for an alias, that cannot keep tasks unique; TypeError for arguments that the task does not
        take; TransactionManagementError with autocommit off, where nobody is told of COMMIT.
        """
        kwargs.pop(FIELD, None)  # of the message that these arguments come from
        if self.is_bypassed:
            return super().enqueue(*args, **kwargs)
        given, queue, name = self.unique, queue_of(self.backend), self._name_of(args, kwargs)
        result_id, succession = queue.new_id(), Succession(given.using)
        seconds = given.ttl + self._delay()
        queued = QueuedLease.new(
            succession, name, given.template, succession.backend.prefix_now(), self._label(result_id),
            new_message(result_id), wall_clock() + seconds,
        )  # fmt: skip

        def send(text: str) -> AnyResult:
            return queue.enqueue(self, result_id, args, {**kwargs, FIELD: text} if text else kwargs)

        if isinstance(queue, DatabaseQueue) and (database := queue.open_transaction()):
            transaction.on_commit(lambda: self._decide(queue, queued, result_id), using=database, robust=True)
            return send(queued.to_text())
        found = claim(given, queued)
        if found is None:
            return publish(queued, send, seconds) if queued.is_granted else send("")
        if given.on_duplicate == "raise":
            raise already_queued(self.module_path, found)
        return self._result_of(queue, found) if given.on_duplicate == "return" and found.task_id else None

    async def aenqueue(self, *args: Any, **kwargs: Any) -> Any:
        """``enqueue()`` for tasks of an event loop."""
        return await sync_to_async(self.enqueue, thread_sensitive=True)(*args, **kwargs)

    def _decide(self, queue: DatabaseQueue, queued: QueuedLease, result_id: str) -> None:
        """After COMMIT: from then on the message may be run, and keeps others out of the queue."""
        if not queue.is_waiting(result_id):
            return  # a worker has it already
        if (found := claim(self.unique, queued)) is not None:
            if found.task_id != result_id:
                queue.conclude(result_id)
        elif queued.is_granted:
            if queue.is_waiting(result_id):
                lengthen(queued, self.unique.ttl + self._delay())
            else:  # this process may have been stopped for so long that the message is done
                queued.succession.release_in_background(queued.request)

    def _delay(self) -> float:
        """Seconds until a message may be run."""
        return max(0.0, (self.run_after - timezone.now()).total_seconds()) if self.run_after else 0.0

    def _label(self, result_id: str) -> str:
        return f"{self.module_path}[{result_id}]" if result_id else self.module_path

    def _result_of(self, queue: Queue, found: UniqueHolder) -> AnyResult:
        """Of the message that has the name; where it cannot be looked up, no more than its id and its state."""
        return queue.find(found.task_id) or AnyResult(
            task=self, id=found.task_id, status=STATUS[found.state], enqueued_at=None, started_at=None,
            finished_at=None, last_attempted_at=None, args=[], kwargs={}, backend=self.backend, errors=[],
            worker_ids=[],
        )  # fmt: skip

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker: run the task, unless its name is another message's. Without a message, call the function."""
        text = kwargs.pop(FIELD, None)
        function = partial(super().call, *args, **kwargs)
        if text is None or self.is_bypassed:
            return function()
        result = started.get()
        started.set(None)
        called.set(text)

        def body() -> Any:
            """What no backend can keep is raised here already, so that its run gives up the name."""
            return normalize_json(function())

        result_id = result.id if result and result.kwargs.get(FIELD) == text else ""
        queued = read_lease(text, self.unique, self._label(result_id))
        if queued is None:
            return body()
        message = queued.message if task_of(queued.message) else new_message(result_id)
        if result_id and task_of(message) != result_id:  # as of a message that somebody has copied
            return body()
        return TaskRun(self.unique, queued, self._label(task_of(message)), message).call(self.func, body)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """``call()`` for tasks of an event loop."""
        if FIELD in kwargs:
            return await sync_to_async(self.call)(*args, **kwargs)
        return await super().acall(*args, **kwargs)


class Dropped(Exception):
    """This run does nothing: the work is another message's."""


class TaskRun(UniqueRun):
    """One run of a task of ``django.tasks`` for its message.

    The backends make no copies of a message. So where another run of it has the name, somebody has set its row back to
    ready, and wants it run once more.
    """

    dropped = Dropped
    _waits_since: float | None = None

    def call(self, function: Callable[..., Any], body: Callable[[], Any]) -> Any:
        """The body, or None in its place."""
        token = task_context.unique_body.set((function, self.body_begins))
        try:
            return self.run(body, is_guarded=is_guarded(function))
        except Dropped:
            return None
        finally:
            task_context.unique_body.reset(token)

    def _stop_if_copy(self, busy: LockInfo) -> None:
        """Wait for the end of the other run: for a TTL, in which the lease of a worker that was killed ends.

        One that has succeeded is over: it gives up the name that it keeps for ``until="success"``. Raises
        LockNotAcquired.
        """
        queued, now = self._queued, clock()
        if busy.resting:
            queued.succession.backend.release(queued.request.copy(token=busy.token), force=True)
            return
        if self._waits_since is None:
            self._waits_since = now
            logger.warning(
                "%s waits for another run of its message to end: the lock is %s", self._label, described(busy),
                extra=queued.about("unique-waits"),
            )  # fmt: skip
        waited = now - self._waits_since
        if waited >= queued.succession.ttl:
            raise not_acquired(f"{busy.name!r} ({place_of(busy.using, busy.prefix)})", busy, 1, waited)
        sleep(min(LOOK_EVERY, busy.remaining, queued.succession.ttl - waited))
