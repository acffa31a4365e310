"""Decorated functions: their kind, their names, and the name of the lock for a call."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from asgiref.sync import iscoroutinefunction

from .. import names
from ..exceptions import InvalidLockName
from ..utils.events import about_event
from . import task_context

MARK = "__distributed_lock__"  # attribute of decorated functions, and of wrappers around them

logger = logging.getLogger("django_distlock")


class Kind(enum.Enum):
    """When a call does its work: at once, when it is awaited, or while it is iterated."""

    FUNCTION = enum.auto()
    COROUTINE = enum.auto()
    GENERATOR = enum.auto()
    ASYNC_GENERATOR = enum.auto()


def kind_of(function: Any) -> Kind:
    """Returns the kind of the function. Raises TypeError for an object that cannot be decorated."""
    if inspect.isclass(function):
        raise TypeError(
            f"@distributed_lock was put on the class {function.__name__}. Put it on a method, or for a class view write"
            ' @method_decorator(distributed_lock(...), name="dispatch").'
        )
    task_context.refuse_task(function)
    if not callable(function):
        raise TypeError(
            f"@distributed_lock was put on {function!r}, which is no function. Put it below what makes it a property"
            " or a descriptor."
        )
    # The kind of an object is the kind of its __call__, unless the object is marked, like the results of as_view().
    for candidate in (function, type(function).__call__):
        if inspect.isasyncgenfunction(candidate):
            return Kind.ASYNC_GENERATOR
        if inspect.isgeneratorfunction(candidate):
            return Kind.GENERATOR
        if iscoroutinefunction(candidate):
            return Kind.COROUTINE
    return Kind.FUNCTION


def wraps_like(wrapper: FunctionType, function: Callable[..., Any]) -> Any:
    """Returns the wrapper with the name, attributes, signature and annotations of the function."""
    innermost = inspect.unwrap(function)
    if isinstance(innermost, FunctionType):
        # Frameworks such as Django Ninja evaluate annotations that are strings in __globals__. So the wrapper gets the
        # globals of the function, and its body uses none of its own.
        wrapper = FunctionType(
            wrapper.__code__, innermost.__globals__, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__
        )
    functools.update_wrapper(wrapper, function)
    wrapper.__signature__ = signature_of(function)  # type: ignore[attr-defined]  # Celery checks arguments by it
    return wrapper


def module_and_name(function: Callable[..., Any]) -> tuple[str, str]:
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "view_class", function)  # all results of as_view() have the same name
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return named.__module__, named.__qualname__


def dotted_path(function: Callable[..., Any]) -> str:
    return ".".join(module_and_name(function))


def dotted_path_of_view(function: Callable[..., Any]) -> str:
    """The same as ``dotted_path``; for a method of a class view, with the class of the view, even if a parent class
    defines the method."""
    while isinstance(function, functools.partial):
        function = function.func
    if (owner := getattr(function, "__self__", None)) is None:
        return dotted_path(function)
    return f"{dotted_path(owner if inspect.isclass(owner) else type(owner))}.{function.__name__}"


def make_key(function: Callable[..., Any], name: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """Returns a function that makes the name of the lock from the arguments of a call."""
    if callable(name):
        return lambda args, kwargs: names.check_name(name(*args, **kwargs))
    if name is None:
        return _whole_function(function)
    if not isinstance(name, str) or not name:
        names.check_name(name)  # its error says why
    template = names.parse(name)
    if not template.arguments:
        constant = names.fixed_name(template.fill({}))
        return lambda args, kwargs: constant
    fixed: tuple[Any, ...] = ()
    preset: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        fixed, preset, function = function.args + fixed, {**function.keywords, **preset}, function.func
    signature = signature_of(function)
    _check_arguments(template, function, signature)
    keywords = next((name for name, kind in signature.parameters.items() if kind.kind is kind.VAR_KEYWORD), None)
    places = Places(template, signature)

    def filled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if fixed or preset:
            args, kwargs = (*fixed, *args), {**preset, **kwargs}
        if (picked := places.picked(args, kwargs)) is not None:
            return names.check_name(template.fill(picked))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        others = arguments.pop(keywords, {}) if keywords else {}
        # A keyword may have the name of a positional-only parameter, and means something else.
        return names.check_name(template.fill({**others, **arguments}))

    return filled


def _whole_function(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
    """Returns a function that makes the same name for all calls."""
    path = dotted_path(function)
    whole, told = names.check_name(path), False

    def name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        nonlocal told
        if not told and len(args) == 1 and type(args[0]) is FunctionType and not kwargs:
            told = True
            logger.warning(
                "%s is under @distributed_lock, and was called with the function %s alone. If it was to make the names"
                " of locks for that one, write @distributed_lock(name=%s).",
                path, dotted_path(args[0]), path.rpartition(".")[2], extra=about_event("decorated-a-callable"),
            )  # fmt: skip
        return whole

    return name


_REQUIRED = inspect.Parameter.empty


class Places:
    """The places of the template's arguments in the calls of a function, for calls where that is simple."""

    def __init__(self, template: names.Template, signature: inspect.Signature) -> None:
        parameters = list(signature.parameters.values())
        kinds = [parameter.kind for parameter in parameters]
        self._wanted = [
            (parameter.name, position, parameter.default)
            for position, parameter in enumerate(parameters)
            if parameter.name in template.arguments
        ]
        # For each number of arguments that may come by position: the names of the other parameters, all and required.
        self._others: list[tuple[frozenset[str], frozenset[str]]] = []
        if all(kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY) for kind in kinds):
            for given in range(sum(kind is kind.POSITIONAL_OR_KEYWORD for kind in kinds) + 1):
                others = parameters[given:]
                needed = (each.name for each in others if each.default is _REQUIRED)
                self._others.append((frozenset(each.name for each in others), frozenset(needed)))

    def picked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the arguments that the template needs. None: ``signature.bind()`` has to find or refuse them."""
        given = len(args)
        if given >= len(self._others):
            return None
        others, needed = self._others[given]
        if not needed <= kwargs.keys() <= others:
            return None
        return {
            name: args[position] if position < given else kwargs.get(name, default)
            for name, position, default in self._wanted
        }


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    # method_decorator passes a partial of the bound method, whose __wrapped__ is the unbound one.
    if isinstance(function, functools.partial) and not function.args and not function.keywords:
        function = function.func
    if sys.version_info >= (3, 14):
        import annotationlib

        # Annotations may have names that are defined further down in the module.
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _check_arguments(template: names.Template, function: Callable[..., Any], signature: inspect.Signature) -> None:
    parameters = signature.parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for argument in template.arguments:
        if argument.isdecimal():
            raise InvalidLockName(
                f"The template {template.text!r} fills a field by position; name an argument of"
                f" {dotted_path(function)}."
            )
        if argument not in named and not is_open:
            raise InvalidLockName(
                f"The template {template.text!r} asks for {argument!r}, but {dotted_path(function)}{signature} has no"
                " such argument."
            )
