"""What a busy lock answers to a request: the only module that knows HttpResponse."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from math import ceil
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse

from .exceptions import LockNotAcquired


def request_of(args: tuple[Any, ...]) -> HttpRequest | None:
    """The request that a function view, or a method of a class view, was called with."""
    return next((value for value in args[:2] if isinstance(value, HttpRequest)), None)


def is_view(request: HttpRequest, called: Callable[..., Any]) -> bool:
    """Whether ``called`` is what the request's URL leads to, and not a helper that takes a request.

    Without a URL, as in a unit test with RequestFactory, it is taken for the view.
    """
    if request.resolver_match is None:
        return True
    view: Any = request.resolver_match.func
    while view is not None:
        if view is called:
            return True
        if view_class := getattr(view, "view_class", None):
            # method_decorator makes a new function for each call; what it wraps in the end is the handler itself.
            handler = getattr(view_class, getattr(called, "__name__", ""), None)
            if handler and inspect.unwrap(handler) is inspect.unwrap(called):
                return True
        view = view.func if isinstance(view, functools.partial) else getattr(view, "__wrapped__", None)
    return False


def label(request: HttpRequest) -> str:
    return f"{request.method} {request.path}"


def conflict(request: HttpRequest, busy: LockNotAcquired) -> HttpResponse:
    """409 with Retry-After: the seconds that the holder's lease has left. Names neither lock nor holder."""
    seconds = max(1, ceil(busy.retry_after or 1))
    if request.get_preferred_type(["text/plain", "application/json"]) == "application/json":
        response: HttpResponse = JsonResponse({"detail": "Busy, try again.", "retry_after": seconds}, status=409)
    else:
        text = f"Somebody else is at this just now. Please try again in {seconds} s.\n"
        response = HttpResponse(text, status=409, content_type="text/plain; charset=utf-8")
    response["Retry-After"] = str(seconds)
    return response
