"""``@distributed_lock``: one call at a time, over all processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

from asgiref.sync import iscoroutinefunction

from . import names, responses
from .exceptions import InvalidLockName, LockNotAcquired
from .handlers import DEFAULT_ALIAS
from .locking import Lock
from .options import LockOptions, Options

P = ParamSpec("P")
R = TypeVar("R")

OnBusy = Literal["raise", "skip"] | Callable[..., Any] | None


def skip(value: Any = None) -> Callable[..., Any]:
    """For ``on_busy``: a call that finds the lock busy does nothing and returns ``value``."""

    def answer(busy: LockNotAcquired, /, *args: Any, **kwargs: Any) -> Any:
        return value

    return answer


@overload
def distributed_lock(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def distributed_lock(
    name: str | None = None, *, using: str = DEFAULT_ALIAS, on_busy: OnBusy = None, **options: Unpack[LockOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def distributed_lock(
    *, name: Callable[..., str], using: str = DEFAULT_ALIAS, on_busy: OnBusy = None, **options: Unpack[LockOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def distributed_lock(
    function: Any = None,
    /,
    *,
    name: Any = None,
    using: str = DEFAULT_ALIAS,
    on_busy: OnBusy = None,
    **options: Unpack[LockOptions],
) -> Any:
    """Run the function only while its lock is held.

    ``name``: a template over the call's arguments, ``"order:{order_id}"`` or ``"cart:{request.user.pk}"``
    (attributes and ``[index]``; defaults count; values are escaped), or ``name=`` a callable that gets the
    arguments and returns the name. Without a name, ``@distributed_lock`` locks the function as a whole.

    ``on_busy``: what a call does that finds the lock busy. ``"raise"`` raises LockNotAcquired or
    LockTimeout; ``"skip"`` returns None, ``skip(value)`` a value; a callable ``(exception, *args,
    **kwargs)`` answers in the function's place. By default a view answers 409 Conflict with
    ``Retry-After``, everything else raises.

    The other options are those of ``lock()``; but ``wait`` is 0 unless given: a decorated call does not wait.

    Raises InvalidLockName when the template can name no lock or asks for an argument that the function
    does not have, ValueError and TypeError for options, all where the function is decorated.
    """
    if function is not None and not isinstance(function, str):
        if getattr(function, "__name__", "") == "<lambda>" or name or options or on_busy:
            raise TypeError("A callable that makes the name is given as name=: @distributed_lock(name=lambda pk: ...).")
        return _decorated(function, None, using, None, Options({"wait": 0}))
    if function is not None and name is not None:
        raise TypeError(f"@distributed_lock was given two names, {function!r} and {name!r}.")
    name = function if name is None else name
    if on_busy not in (None, "raise", "skip") and not callable(on_busy):
        raise ValueError(f"on_busy is {on_busy!r}; choose 'raise', 'skip', skip(value) or a callable.")
    given = Options({"wait": 0, **options})
    return lambda function: _decorated(function, name, using, skip() if on_busy == "skip" else on_busy, given)


def _decorated(function: Callable[..., Any], name: Any, using: str, on_busy: Any, options: Options) -> Any:
    _check(function)
    name_of_call = _naming(function, name)

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lock:
        request = responses.request_of(args)
        label = responses.label(request) if request else _path(function)
        return Lock(name_of_call(args, kwargs), using, options, label)

    def answer(busy: LockNotAcquired, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if callable(on_busy):
            return on_busy(busy, *args, **kwargs)
        request = responses.request_of(args)
        if on_busy is None and request is not None and responses.is_view(request, locked):
            return responses.conflict(request, busy)
        raise busy

    if iscoroutinefunction(function):

        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            async with AsyncExitStack() as stack:
                try:
                    await stack.enter_async_context(handle(args, kwargs))
                except LockNotAcquired as busy:
                    result = answer(busy, args, kwargs)
                    return await result if inspect.isawaitable(result) else result
                return await function(*args, **kwargs)

    else:

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                try:
                    stack.enter_context(handle(args, kwargs))
                except LockNotAcquired as busy:
                    return answer(busy, args, kwargs)
                return _finished(function, function(*args, **kwargs))

    locked.__signature__ = _signature(function)  # type: ignore[attr-defined]  # Celery checks arguments by it
    return locked


def _finished(function: Callable[..., Any], result: Any) -> Any:
    """The result, unless the work is only about to begin when the lock is released."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(
        f"{_path(function)} is no 'async def' but returned an awaitable, which would run without the lock."
        " Put @distributed_lock on the coroutine function itself: in an async class view on its handlers,"
        " not on dispatch."
    )


def _check(function: Any) -> None:
    if inspect.isclass(function):
        raise TypeError(
            f"@distributed_lock was put on the class {function.__name__}. Put it on a method, for a class view by"
            ' @method_decorator(distributed_lock(...), name="dispatch"), or on its handlers if they are async.'
        )
    if not callable(function) or isinstance(function, staticmethod | classmethod):
        raise TypeError(
            f"@distributed_lock was put on {function!r}, which is no function. With staticmethod, classmethod or"
            " property, put it below them."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"@distributed_lock was put on the generator {_path(function)}, whose body runs after the call has"
            " returned. Use 'with lock(...)' inside it."
        )


def _path(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "view_class", function)  # all results of as_view() have one name
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _naming(function: Callable[..., Any], name: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """How to get from the arguments of a call to the name of its lock."""
    if callable(name):
        return lambda args, kwargs: names.check_name(name(*args, **kwargs))
    if name is None:
        whole = names.check_name(_path(function))
        return lambda args, kwargs: whole
    if not isinstance(name, str) or not name:
        names.check_name(name)  # says why
    template = names.parse(name)
    if not template.arguments:
        constant = names.check_name(template.fill({}))
        return lambda args, kwargs: constant
    signature = _signature(function)
    _check_arguments(template, function, signature)
    keywords = next((name for name, kind in signature.parameters.items() if kind.kind is kind.VAR_KEYWORD), None)

    def filled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments |= arguments.pop(keywords, {}) if keywords else {}
        return names.check_name(template.fill(arguments))

    return filled


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    # method_decorator hands over a partial of the bound method that claims to wrap the unbound one.
    if isinstance(function, functools.partial) and not function.args and not function.keywords:
        function = function.func
    return inspect.signature(function)


def _check_arguments(template: names.Template, function: Callable[..., Any], signature: inspect.Signature) -> None:
    parameters = signature.parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for argument in template.arguments:
        if argument.isdecimal():
            raise InvalidLockName(
                f"The template {template.text!r} fills a field by position; name an argument of {_path(function)}."
            )
        if argument not in named and not is_open:
            raise InvalidLockName(
                f"The template {template.text!r} asks for {argument!r}, but {_path(function)}{signature} has no such"
                " argument."
            )
