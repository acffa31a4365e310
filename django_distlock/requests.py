"""Which request a call is about, and whether what is called is the view of that request."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.http import HttpRequest

from .types import shown


def request_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The request that a function view, or a method of a class view, was called with, or None.

    An HttpRequest, or what Django REST framework wraps around one.
    """
    candidates = (*args[:2], kwargs.get("request"))
    return next((value for value in candidates if isinstance(original(value), HttpRequest)), None)


def original(request: Any) -> Any:
    """Django's own request, which Django REST framework wraps."""
    return request._request if is_rest_framework(request) else request


def is_rest_framework(request: Any) -> bool:
    module = sys.modules.get("rest_framework.request")
    return module is not None and isinstance(request, module.Request)


def label(request: Any, view: str = "") -> str:
    """The method and the route of its URL: "POST orders/<int:order_id>/pay".

    Never the path: that is chosen by the client, and may hold a secret such as the token of a password reset. ``view``
    stands for the route where the request has none yet, as in a middleware or in a unit test with RequestFactory.
    """
    match = original(request).resolver_match
    route = view if match is None or match.route is None else match.route or "/"
    return shown(f"{request.method} {route}".rstrip())


def routed_view(request: Any) -> Any:
    """What the request's URL leads to; None without a URL, as in a unit test with RequestFactory."""
    match = original(request).resolver_match
    return match.func if match else None


def is_view(request: Any, called: Callable[..., Any]) -> bool:
    """Whether ``called`` is what the request's URL leads to, and not a helper that takes a request.

    Without a URL it is taken for the view.
    """
    view = routed_view(request)
    return view is None or any(
        candidate is called or (is_method and inspect.unwrap(candidate) is inspect.unwrap(called))
        for candidate, is_method in _handlers(view, request.method.lower())
    )


def is_for_programs(request: Any) -> bool:
    """Whether the request's URL leads to an API, whose clients read JSON."""
    module = sys.modules.get("rest_framework.views")
    return any(
        _ninja_operations(view) or (module is not None and issubclass(getattr(view, "cls", object), module.APIView))
        for view in _unwrapped(routed_view(request))
    )


def is_async_dispatch(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether it is the ``dispatch`` of a class view with async handlers, which is plain and begins a coroutine."""
    if getattr(function, "__name__", "") != "dispatch":
        return False
    owners = [getattr(bound, "__self__", None) for bound in _unwrapped(function)]
    view = next((owner for owner in owners if owner is not None), args[0] if args else None)
    return getattr(view, "view_is_async", False) is True


def _handlers(routed: Any, method: str) -> Iterator[tuple[Any, bool]]:
    """Every callable between the URL and the code that answers it, and whether it is a method of a class view.

    method_decorator makes a new function for each call of a method; what it wraps in the end is the method itself.
    """
    for view in _unwrapped(routed):
        yield view, False
        if view_class := getattr(view, "view_class", None) or getattr(view, "cls", None):
            actions = getattr(view, "actions", None) or {}
            for name in ("dispatch", actions.get(method, method), *(("get",) if method == "head" else ())):
                if handler := getattr(view_class, name, None):
                    yield handler, True
                    yield from ((function, False) for function in _unwrapped(_function_of_api_view(handler)))
        for operation in _ninja_operations(view):
            if method.upper() in operation.methods:
                yield from ((function, False) for function in _unwrapped(operation.view_func))


def _function_of_api_view(handler: Any) -> Any:
    """``@api_view`` hides its function in a method that it makes."""
    if getattr(handler, "__module__", None) != "rest_framework.decorators" or not inspect.isfunction(handler):
        return None
    return inspect.getclosurevars(handler).nonlocals.get("func")


def _ninja_operations(view: Any) -> list[Any]:
    """Django Ninja's view of a path is a function around an object that has the operations of the path."""
    if getattr(view, "__module__", None) != "ninja.operation" or not inspect.isfunction(view):
        return []
    return getattr(inspect.getclosurevars(view).nonlocals.get("self"), "operations", [])


def _unwrapped(function: Any) -> Iterator[Any]:
    """The function, and what it wraps, down to the innermost."""
    while function is not None:
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
