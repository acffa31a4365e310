"""Tasks that are in the queue only once: a second ``.delay()`` finds the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, cast

from celery import shared_task  # type: ignore[import-untyped]
from celery.contrib.django.task import DjangoTask  # type: ignore[import-untyped]
from celery.utils import uuid  # type: ignore[import-untyped]
from celery.utils.time import maybe_make_aware  # type: ignore[import-untyped]
from django.core.exceptions import ImproperlyConfigured

from ..core.registry import DEFAULT_ALIAS
from ..core.succession import Succession
from ..exceptions import TaskAlreadyQueued
from ..message_ids import new_message, task_of
from ..unique.options import DEFAULT_TTL, Unique, Until, unique
from ..unique.publishing import UniqueHolder, already_queued, claim, publish
from ..unique.queued import FIELD as HEADER
from ..unique.queued import QueuedLease
from ..unique.runs import read_lease
from ..utils.clock import wall_clock
from .messages import HEADER as MESSAGE
from .scheduled import HEADER as RUN
from .tasks import UNIQUE_RUN
from .unique_runs import DUPLICATE, Delivery

ENTERED = "distlock_entered"  # attribute of the request of a run
BY_BEAT = (RUN, "celery_beat_task")  # headers of messages from beats: ours, and any beat of a Celery not too old
CANVAS = ("chord", "chain", "group_id", "parent_id", "root_id", "reply_to")  # options of messages from a canvas


def unique_task(
    name: Any = None,
    /,
    *,
    until: Until = "end",
    ttl: Any = DEFAULT_TTL,
    on_duplicate: Literal["return", "raise", "drop"] = "return",
    on_unavailable: Literal["raise", "run"] = "raise",
    using: str = DEFAULT_ALIAS,
    **options: Any,
) -> Any:
    """Use ``@unique_task("sync:{account_id}")`` in place of ``@shared_task``. It has the arguments of ``unique()``.

    ``options``: the options of ``@shared_task``, such as ``bind``, ``name`` and ``acks_late``. ``base``: a class
    derived from UniqueTask.

    Raises ValueError for values out of range, InvalidLockName for a template that the function cannot fill, TypeError
    for a base that is not unique.
    """
    base = options.pop("base", UniqueTask)
    if not (isinstance(base, type) and issubclass(base, UniqueTask)):
        raise TypeError(f"base is {base!r}; the class of a unique task derives from UniqueTask.")
    is_bare = callable(name)
    has_more = options or (until, ttl, on_duplicate, on_unavailable, using, base) != DEFAULTS
    if is_bare and (has_more or getattr(name, "__name__", "") == "<lambda>"):
        raise TypeError(
            "A callable that makes the name is given to unique(): @shared_task(base=UniqueTask,"
            " unique=unique(lambda pk: ...))."
        )
    given = unique(
        None if is_bare else name, until=until, ttl=ttl, on_duplicate=on_duplicate, on_unavailable=on_unavailable,
        using=using,
    )  # fmt: skip

    def decorate(function: Callable[..., Any]) -> Any:
        given.namer(function)  # refuses a wrong template here, and not when the task is first used
        return shared_task(base=base, unique=given, **options)(function)

    return decorate(name) if is_bare else decorate


class UniqueTask(DjangoTask):  # type: ignore[misc]
    """The base class of tasks that are in the queue only once. Their attribute ``unique`` says how.

    ``apply_async(unique=False)`` always queues the task.
    """

    abstract = True
    unique: Unique | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Celery calls this when an app gets to know the task."""
        if not isinstance(cls.unique, Unique):
            raise ImproperlyConfigured(
                f"{cls.name} derives from UniqueTask, but its attribute 'unique' is {cls.unique!r}. Give it"
                ' unique=unique("name:{argument}").'
            )
        cls.unique.namer(cast(Any, cls.run))
        super().on_bound(app)

    @property
    def _unique(self) -> Unique:
        return cast(Unique, self.unique)

    @cached_property
    def _name_of(self) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        return self._unique.namer(cast(Any, self.run))

    def unique_find(self, *args: Any, **kwargs: Any) -> UniqueHolder | None:
        """Returns who has the task with these arguments queued, or runs it. None: nobody.

        Raises LockBackendError, and TypeError for arguments that the task does not accept.
        """
        name = self._name_of(args, kwargs)
        [leases] = Succession(self._unique.using).backend.look([name])
        return UniqueHolder.of(leases[0]) if leases else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker, or eagerly: run the task, unless another message has its name."""
        request = self.request
        if request.called_directly or getattr(request, ENTERED, False):  # called as a function, or from its own body
            return super().__call__(*args, **kwargs)
        setattr(request, ENTERED, True)
        text = (request.headers or {}).get(HEADER)
        if text == DUPLICATE:
            return None
        queued = read_lease(text, self._unique, f"{self.name}[{request.id}]") if text else None
        if queued is None or task_of(queued.message) != str(request.id):  # for example, of a task that was replaced
            return self.run(*args, **kwargs)
        return Delivery(self, self._unique, queued).call(args, kwargs)

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        unique: bool = True,
        **options: Any,
    ) -> Any:
        """Celery's ``apply_async()``. ``unique=False``: queue the task even if another message has its name, and let
        both run.

        Raises TaskAlreadyQueued and LockBackendError, as ``on_duplicate`` and ``on_unavailable`` say. Raises
        InvalidLockBackend for an alias whose store cannot keep tasks unique.
        """
        task_id = str(task_id or uuid())
        headers = dict(options.pop("headers", None) or {})

        def send(headers: Mapping[str, Any]) -> Any:
            more = {**options, "headers": headers} if headers else options
            return super(UniqueTask, self).apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, **more
            )  # fmt: skip

        request = self.request
        run: Delivery | None = getattr(request, UNIQUE_RUN, None)
        if str(request.id) == task_id:  # a retry, a requeue, or the task by which this one replaces itself
            is_replaced = options.get("replaced_task_nesting", 0) != (request.replaced_task_nesting or 0)
            if not is_replaced or (run and run.name == self._name_of(tuple(args or ()), kwargs or {})):
                return run.publish_again(send, headers, self._delay(options)) if run else send(headers)
        headers.pop(HEADER, None)  # the lease of the task that this one replaces
        if not unique:
            return send(headers)
        return self._publish(send, self._name_of(tuple(args or ()), kwargs or {}), task_id, headers, options)

    def _publish(self, send: Any, name: str, task_id: str, headers: dict[str, Any], options: Mapping[str, Any]) -> Any:
        given, succession = self._unique, Succession(self._unique.using)
        seconds = given.ttl + self._delay(options)
        if (expires := self._seconds_until(options.get("expires", self.expires))) is not None:
            seconds = min(seconds, max(0.0, expires))
        message = str(headers.get(MESSAGE, ""))
        if task_of(message) != task_id:  # give the id here; messages.identify() then does not change it
            message = headers[MESSAGE] = new_message(task_id)
        queued = QueuedLease.new(
            succession, name, given.template, succession.backend.prefix_now(), f"{self.name}[{task_id}]", message,
            wall_clock() + seconds,
        )  # fmt: skip
        found = claim(given, queued)
        if found is None and queued.is_granted:
            return publish(queued, lambda text: send({**headers, HEADER: text}), seconds)
        if found is None:
            return send(headers)
        if any(options.get(option) is not None for option in CANVAS):
            return send({**headers, HEADER: DUPLICATE})
        return self._answer(found, is_beat=any(header in headers for header in BY_BEAT))

    def _answer(self, found: UniqueHolder, *, is_beat: bool) -> Any:
        how = self._unique.on_duplicate
        if how == "raise" and not is_beat:
            raise already_queued(self.name, found)
        return self.AsyncResult(found.task_id) if how == "return" and found.task_id else None

    def _delay(self, options: Mapping[str, Any]) -> float:
        """Returns the seconds until a worker may run the message."""
        if (countdown := options.get("countdown")) is not None:
            return max(0.0, float(countdown))
        return max(0.0, self._seconds_until(options.get("eta")) or 0.0)

    def _seconds_until(self, moment: Any) -> float | None:
        """Returns the seconds until ``moment``, which is a number of seconds, a datetime or its text, or None."""
        if moment is None or isinstance(moment, int | float):
            return moment
        if isinstance(moment, str):
            moment = datetime.fromisoformat(moment)
        aware = maybe_make_aware(moment, self.app.timezone)
        return cast(float, (aware - datetime.now(UTC)).total_seconds())


# The defaults of unique_task(), by which it recognizes that it is used without parentheses
DEFAULTS = ("end", DEFAULT_TTL, "return", "raise", DEFAULT_ALIAS, UniqueTask)


__all__ = ["TaskAlreadyQueued", "Unique", "UniqueHolder", "UniqueTask", "unique", "unique_task"]
