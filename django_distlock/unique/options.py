"""``unique()``: by which name a task is unique, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from .. import names
from ..core.registry import DEFAULT_ALIAS
from ..decorators import key
from ..options import Seconds

unique_aliases: set[str] = set()  # aliases that keep the names of the unique tasks that this process knows

task_backends: set[str] = set()  # aliases of django.tasks that queue unique tasks

PREFIX = "unique:"  # of the locks for names, so that none of them is also a lock that a task holds while it runs

DEFAULT_TTL = 3600.0
Until = Literal["start", "end", "success"]
TTL = Seconds("for which a task that waits in the queue keeps others out of it.", above=0.0)


class Unique:
    """The checked arguments of ``unique()``."""

    def __init__(self, name: Any, until: Until, ttl: float, on_duplicate: str, on_unavailable: str, using: str) -> None:
        _choose("until", until, "start", "end", "success")
        _choose("on_duplicate", on_duplicate, "return", "raise", "drop")
        _choose("on_unavailable", on_unavailable, "raise", "run")
        self.name, self.until, self.using = name, until, using
        self.ttl = float(TTL("ttl", ttl) or 0.0)
        self.on_duplicate, self.on_unavailable = on_duplicate, on_unavailable
        self.template = PREFIX + names.template_of(name) if isinstance(name, str) else ""
        unique_aliases.add(using)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Unique) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def namer(self, function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        """Returns a function that makes the name of a call. Raises InvalidLockName if it cannot fill the template."""
        make_key = key.make_key(function, self.name)
        return lambda args, kwargs: names.check_name(PREFIX + make_key(args, kwargs))


def _choose(option: str, given: object, *choices: str) -> None:
    if given not in choices:
        raise ValueError(f"{option} is {given!r}; choose {' or '.join(map(repr, choices))}.")


def unique(
    name: str | Callable[..., str] | None = None,
    *,
    until: Until = "end",
    ttl: Any = DEFAULT_TTL,
    on_duplicate: Literal["return", "raise", "drop"] = "return",
    on_unavailable: Literal["raise", "run"] = "raise",
    using: str = DEFAULT_ALIAS,
) -> Unique:
    """For ``@shared_task(base=UniqueTask, unique=unique("sync:{account_id}"))``: the task is in the queue only once.

    ``name``: a template with fields for the arguments of the task, or a callable that gets them and returns the name,
    as for ``@distributed_lock``; None: the task is unique as a whole. Its lock is ``unique:`` and the name.

    ``until``: when the same task may be queued again. ``"start"``: when its body begins; ``"end"``: when it has
    returned or raised; ``"success"``: ``ttl`` seconds after it was queued, or when it has raised.

    ``ttl``: seconds for which a message that no worker runs keeps others from being queued, in addition to its
    ``countdown`` or the time until its ``eta``, but at most until it ``expires``. A run keeps the name for as long as
    it takes. The run of a worker that was killed keeps it for the ``TTL`` of the alias.

    ``on_duplicate``: ``"return"`` returns the AsyncResult of the message that is queued or running, ``"raise"`` raises
    TaskAlreadyQueued, ``"drop"`` returns None.

    ``on_unavailable``: if the store cannot be asked, ``"raise"`` raises LockBackendError, and ``"run"`` queues and runs
    the task as if it were not unique.

    ``using``: an alias on Redis or on a database; in local memory only if one process queues the tasks and runs them.

    Raises ValueError for values out of range.
    """
    return Unique(name, until, ttl, on_duplicate, on_unavailable, using)
