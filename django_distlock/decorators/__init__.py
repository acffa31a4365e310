"""``@distributed_lock``: one call at a time, in all processes together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from ..core import transactions
from ..core.registry import DEFAULT_ALIAS
from ..exceptions import InvalidLockName
from ..options import CallOptions, Options, Seconds
from ..types import MOST_SLOTS
from . import key, task_context
from .answers import respond
from .wrapper import LockedCallable, Skip

P = ParamSpec("P")
R = TypeVar("R")

Names = str | list[str] | tuple[str, ...] | None
OnBusy = Literal["raise", "retry"] | Callable[..., Any] | None
OnUnavailable = Literal["raise", "run", "retry"] | Callable[..., Any] | None
RetryFor = float | timedelta | None

RETRY_FOR = Seconds(
    "for which a task waits for its lock and is sent again; None: as long as it takes.", above=0.0, or_none=True
)


def skip(value: Any = None) -> Callable[..., Any]:
    """For ``on_busy`` and ``on_unavailable``: a call that does not get the lock returns ``value`` and does nothing."""
    return Skip(value)


class Skipping(Protocol):
    """A decorator that lets a function return None instead of its result."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | None]: ...


@overload
def distributed_lock(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def distributed_lock(
    name: Names = None,
    *,
    using: str = DEFAULT_ALIAS,
    on_busy: Literal["skip"],
    on_unavailable: OnUnavailable | Literal["skip"] = None,
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Skipping: ...
@overload
def distributed_lock(
    *,
    name: Callable[..., str],
    using: str = DEFAULT_ALIAS,
    on_busy: Literal["skip"],
    on_unavailable: OnUnavailable | Literal["skip"] = None,
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Skipping: ...
@overload
def distributed_lock(
    name: Names = None,
    *,
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy | Literal["skip"] = None,
    on_unavailable: Literal["skip"],
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Skipping: ...
@overload
def distributed_lock(
    *,
    name: Callable[..., str],
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy | Literal["skip"] = None,
    on_unavailable: Literal["skip"],
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Skipping: ...
@overload
def distributed_lock(
    name: Names = None,
    *,
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy = None,
    on_unavailable: OnUnavailable = None,
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def distributed_lock(
    *,
    name: Callable[..., str],
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy = None,
    on_unavailable: OnUnavailable = None,
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def distributed_lock(
    function: Any = None,
    /,
    *,
    name: Any = None,
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy | Literal["skip"] = None,
    on_unavailable: OnUnavailable | Literal["skip"] = None,
    retry_for: RetryFor = None,
    hold_until: Literal["response", "return"] = "response",
    **options: Unpack[CallOptions],
) -> Any:
    """Run the function only while its lock is held.

    ``name``: a template with fields for the call's arguments, ``"order:{order_id}"`` or ``"cart:{request.user.pk}"``.
    Fields may have attributes and ``[index]``. Default values of arguments count. Values are escaped. Or give ``name=``
    a callable that gets the arguments and returns the name. Without a name, ``@distributed_lock`` locks the function as
    a whole. A list of templates, ``["account:{source}", "account:{target}"]``, acquires several locks, as
    ``lock_all()`` does.

    ``on_busy``: what a call does if the lock is busy.

    - ``"raise"`` raises LockNotAcquired or LockTimeout.
    - ``"skip"`` returns None; ``skip(value)`` returns the value.
    - A callable ``(exception, *args, **kwargs)`` is called, and its result is returned.
    - ``"retry"``, below ``@shared_task``, sends the Celery task again later, which does not count against
      ``max_retries``. First it waits in the worker, for half a second or for the ``wait`` that is given. Without a
      worker it raises.
    - By default a view answers 409 Conflict with ``Retry-After``, which ``respond(...)`` changes. Everything else
      raises.

    ``on_unavailable``: what a call does if the store does not answer. ``"raise"`` raises LockBackendError. ``"run"``
    calls the function *without* the lock, as with ``lock()``. ``"skip"``, ``skip(value)``, a callable and ``"retry"``
    mean the same as for ``on_busy``, but coroutine functions and generators have no ``"retry"``. An error that somebody
    has to correct (``LockBackendError.is_final``) is always raised. The default is the ``ON_UNAVAILABLE`` of the
    alias. Unless that is "run", a view answers 503 (with ``on_busy="raise"`` it raises), and everything else raises.

    ``retry_for``: seconds for which a task is sent again, counted from the first run that did not get the lock. After
    that it fails, with LockTimeout if the lock is busy. None: there is no limit.

    ``hold_until``: ``"response"``: a response whose content is made after the view has returned (streaming, file,
    unrendered template) holds the lock until its content is complete or it is closed. ``"return"`` frees the lock when
    the view returns.

    A coroutine function holds the lock until it is done, a generator while it is iterated. A view under
    ATOMIC_REQUESTS gets its transaction inside the lock, unless ``in_atomic="ignore"``.

    ``slots``: how many calls may run at once: a number, or a callable that gets the arguments and returns the number.

    The other options are those of ``lock()``, but ``wait`` is 0 by default: a decorated call does not wait. On a view
    with a ``wait``, ``max_waiters`` limits how many of its requests wait for one lock.

    Raises InvalidLockName if the template cannot name a lock or has a field for an argument that the function does not
    have; ValueError and TypeError for options. All of them are raised when the function is decorated.
    """
    if function is not None and not isinstance(function, str | list | tuple):
        has_more = name or options or on_busy or on_unavailable or retry_for or hold_until != "response"
        if getattr(function, "__name__", "") == "<lambda>" or has_more:
            raise TypeError("A callable that makes the name is given as name=: @distributed_lock(name=lambda pk: ...).")
        return _decorated(function, None, using, None, None, "response", Options({"wait": 0}))
    if function is not None and name is not None:
        raise TypeError(f"@distributed_lock was given two names, {function!r} and {name!r}.")
    name = function if name is None else name
    if isinstance(name, list | tuple) and not name:
        raise InvalidLockName("@distributed_lock was given a list of no names.")
    if on_busy not in (None, "raise", "skip", "retry") and not callable(on_busy):
        raise ValueError(
            f"on_busy is {on_busy!r}; choose 'raise', 'skip', 'retry', skip(value), respond(...) or a callable."
        )
    if on_unavailable not in (None, "raise", "run", "skip", "retry") and not callable(on_unavailable):
        raise ValueError(
            f"on_unavailable is {on_unavailable!r}; choose 'raise', 'run', 'skip', 'retry', skip(value) or a callable."
        )
    seconds = RETRY_FOR("retry_for", retry_for)
    if seconds is not None and "retry" not in (on_busy, on_unavailable):
        raise ValueError("retry_for is for tasks that are sent again: on_busy or on_unavailable is 'retry'.")
    if hold_until not in ("response", "return"):
        raise ValueError(f"hold_until is {hold_until!r}; choose 'response' or 'return'.")
    terms: dict[str, Any] = {"wait": 0, **options}
    if on_unavailable is not None:
        terms["on_unavailable"] = "run" if on_unavailable == "run" else "raise"
    slots_of = terms.get("slots") if callable(terms.get("slots")) else None
    given = Options(terms if slots_of is None else {**terms, "slots": MOST_SLOTS})
    choices = _in_full(on_busy), None if on_unavailable == "run" else _in_full(on_unavailable)
    stands_by = on_busy == "retry" and "wait" not in options
    return lambda function: _decorated(function, name, using, *choices, hold_until, given, slots_of, seconds, stands_by)


def _in_full(choice: Any) -> Any:
    """Returns the choice, with a short form replaced by the callable that it stands for."""
    if choice in ("skip", skip):
        return skip()
    return respond() if choice is respond else choice


def _decorated(function: Any, *how: Any) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_decorated(function.__func__, *how))
    guarded = LockedCallable(function, *how)
    guarded.decorated = key.wraps_like(_WRAPPERS[guarded.kind](guarded), function)
    setattr(guarded.decorated, key.MARK, True)
    if guarded.kind is key.Kind.FUNCTION:
        task_context.connect_to_celery()  # the function may be a task
        if guarded.takes_over:
            transactions.take_over(function, guarded.decorated)
    return guarded.decorated


# The bodies of these wrappers use no globals: see key.wraps_like().


def _plain(guarded: LockedCallable) -> Any:
    def locked(*args: Any, **kwargs: Any) -> Any:
        return guarded.call(args, kwargs)

    return locked


def _coroutine(guarded: LockedCallable) -> Any:
    async def locked(*args: Any, **kwargs: Any) -> Any:
        return await guarded.acall(args, kwargs)

    return locked


def _generator(guarded: LockedCallable) -> Any:
    def locked(*args: Any, **kwargs: Any) -> Any:
        return (yield from guarded.iterate(args, kwargs))

    return locked


def _async_generator(guarded: LockedCallable) -> Any:
    async def locked(*args: Any, **kwargs: Any) -> Any:
        async with guarded.aiterated(args, kwargs) as items:
            try:
                item = await items.asend(None)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        item = await items.athrow(error)
                    else:
                        item = await items.asend(sent)
            except StopAsyncIteration:
                return

    return locked


_WRAPPERS = {
    key.Kind.FUNCTION: _plain,
    key.Kind.COROUTINE: _coroutine,
    key.Kind.GENERATOR: _generator,
    key.Kind.ASYNC_GENERATOR: _async_generator,
}
