"""Tasks of ``django.tasks`` that are in the queue only once: a second ``enqueue()`` finds the first one.

A message carries its lease as one more argument, which ``call()`` removes. The id of the message is the id of its
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

LOOK_EVERY = 1.0  # seconds between two looks at a name that another run of the same message holds

STATUS = {
    "queued": TaskResultStatus.READY,
    "running": TaskResultStatus.RUNNING,
    "done": TaskResultStatus.SUCCESSFUL,
}

logger = logging.getLogger("django_distlock")

# In this thread: the result of the unique task that a backend calls next, and the lease of the task it called last.
started: ContextVar[AnyResult | None] = ContextVar("distlock_started", default=None)
called: ContextVar[str] = ContextVar("distlock_called", default="")


@receiver(task_started)
def _on_started(task_result: AnyResult, **_: Any) -> None:
    """A backend sends this signal in the thread that then calls the task: so a task without context gets its id."""
    started.set(task_result if FIELD in task_result.kwargs else None)


@receiver(task_finished)
def _on_finished(task_result: AnyResult, **_: Any) -> None:
    """Free the name of a task that failed before it was called, for example in a receiver of ``task_started``."""
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
    """Use ``@unique_task("sync:{account_id}")`` in place of Django's ``@task``. It has the options of ``@task``, too.

    ``template``: the template of the name of the task's lock, with fields for the arguments of ``enqueue()``. Instead,
    ``name`` may be a callable that gets them and returns the name. Without both, the task is unique as a whole. The
    lock is ``unique:`` and the name.

    ``until``: when the same task may be queued again. ``"start"``: when its body begins; ``"end"``: when it has
    returned or raised; ``"success"``: ``ttl`` seconds after it was queued, or when it has raised.

    ``ttl``: seconds for which a message that no worker runs keeps others from being queued, in addition to the time
    until its ``run_after``. A run keeps the name for as long as it takes. The run of a worker that was killed keeps it
    for the ``TTL`` of the alias.

    ``on_duplicate``: ``"return"`` returns the TaskResult of the message that is queued or running, ``"raise"`` raises
    TaskAlreadyQueued, ``"drop"`` returns None.

    ``on_unavailable``: if the store cannot be asked, ``"raise"`` raises LockBackendError, and ``"run"`` queues and runs
    the task as if it were not unique.

    ``using``: an alias of locks on Redis or on a database; in local memory only if one process queues the tasks and
    runs them. ``backend``: an alias of ``TASKS``.

    Raises ValueError for values out of range, InvalidLockName for a template that the function cannot fill, and the
    errors of ``@task``.
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
    """A task that is in the queue only once.

    ``unique``: the arguments of ``@unique_task``. ``is_bypassed``: it is queued like any other task nevertheless.
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
        """Raises InvalidLockName if the task cannot fill its template, before the task is first queued."""
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
        """``using()`` of tasks. ``unique=False``: returns a task that is always queued; True: a unique one again."""
        changed = super().using(priority=priority, queue_name=queue_name, run_after=run_after, backend=backend)
        return replace(cast(UniqueTask, changed), is_bypassed=self.is_bypassed if unique is None else not unique)

    def unique_find(self, *args: Any, **kwargs: Any) -> UniqueHolder | None:
        """Returns who has the task with these arguments queued, or runs it. None: nobody.

        Raises LockBackendError, and TypeError for arguments that the task does not accept.
        """
        [leases] = Succession(self.unique.using).backend.look([self._name_of(args, kwargs)])
        return UniqueHolder.of(leases[0]) if leases else None

    async def aunique_find(self, *args: Any, **kwargs: Any) -> UniqueHolder | None:
        """``unique_find()`` for tasks of an event loop."""
        return await sync_to_async(self.unique_find)(*args, **kwargs)

    def enqueue(self, *args: Any, **kwargs: Any) -> Any:
        """``enqueue()`` of tasks. A duplicate is not queued; ``on_duplicate`` says what happens instead.

        Returns None instead of a TaskResult if something else holds a lock with its name, and with ImmediateBackend
        also if a task of another thread is about to begin, because its id is not known yet.

        In a transaction of the database with the messages, the message is always written. At COMMIT it is decided
        whether it is a duplicate. A duplicate succeeds with None, and does nothing.

        Raises TaskAlreadyQueued and LockBackendError as the options say; InvalidTaskBackend for a backend, and
        InvalidLockBackend for an alias, that cannot keep tasks unique; TypeError for arguments that the task does not
        accept; TransactionManagementError with autocommit off, because then nobody learns of COMMIT.
        """
        kwargs.pop(FIELD, None)  # the lease of the message from which these arguments come
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
        """Decide after COMMIT whether the message is a duplicate. From then on it may run, and keeps others out."""
        if not queue.is_waiting(result_id):
            return  # a worker has it already
        if (found := claim(self.unique, queued)) is not None:
            if found.task_id != result_id:
                queue.conclude(result_id)
        elif queued.is_granted:
            if queue.is_waiting(result_id):
                lengthen(queued, self.unique.ttl + self._delay())
            else:  # this process may have been stopped so long that the message is done
                queued.succession.release_in_background(queued.request)

    def _delay(self) -> float:
        """Returns the seconds until a worker may run the message."""
        return max(0.0, (self.run_after - timezone.now()).total_seconds()) if self.run_after else 0.0

    def _label(self, result_id: str) -> str:
        return f"{self.module_path}[{result_id}]" if result_id else self.module_path

    def _result_of(self, queue: Queue, found: UniqueHolder) -> AnyResult:
        """Returns the result of the message that has the name; only its id and state if it cannot be looked up."""
        return queue.find(found.task_id) or AnyResult(
            task=self, id=found.task_id, status=STATUS[found.state], enqueued_at=None, started_at=None,
            finished_at=None, last_attempted_at=None, args=[], kwargs={}, backend=self.backend, errors=[],
            worker_ids=[],
        )  # fmt: skip

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker: run the task, unless another message has its name. Without a message: call the function."""
        text = kwargs.pop(FIELD, None)
        function = partial(super().call, *args, **kwargs)
        if text is None or self.is_bypassed:
            return function()
        result = started.get()
        started.set(None)
        called.set(text)

        def body() -> Any:
            """Raises here if the result is one that no backend can keep, so that the run gives up the name."""
            return normalize_json(function())

        result_id = result.id if result and result.kwargs.get(FIELD) == text else ""
        queued = read_lease(text, self.unique, self._label(result_id))
        if queued is None:
            return body()
        message = queued.message if task_of(queued.message) else new_message(result_id)
        if result_id and task_of(message) != result_id:  # for example, a message that somebody has copied
            return body()
        return TaskRun(self.unique, queued, self._label(task_of(message)), message).call(self.func, body)

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """``call()`` for tasks of an event loop."""
        if FIELD in kwargs:
            return await sync_to_async(self.call)(*args, **kwargs)
        return await super().acall(*args, **kwargs)


class Dropped(Exception):
    """This run does nothing, because the work belongs to another message."""


class TaskRun(UniqueRun):
    """One run of a task of ``django.tasks`` for its message.

    The backends make no copies of a message. So if another run of the message has the name, somebody has set its row
    back to ready and wants it to run once more.
    """

    dropped = Dropped
    _waits_since: float | None = None

    def call(self, function: Callable[..., Any], body: Callable[[], Any]) -> Any:
        """Call the body. Returns its result, or None if it is dropped."""
        token = task_context.unique_body.set((function, self.body_begins))
        try:
            return self.run(body, is_guarded=is_guarded(function))
        except Dropped:
            return None
        finally:
            task_context.unique_body.reset(token)

    def _stop_if_copy(self, busy: LockInfo) -> None:
        """Wait for the end of the other run, at most for a TTL: by then the lease of a killed worker ends.

        A run that has succeeded is over, so the name that it keeps for ``until="success"`` is taken from it. Raises
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
