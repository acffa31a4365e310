"""What a busy lock answers to a request: the only module that knows HttpResponse."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views import View

from .exceptions import LockNotAcquired

_HANDLERS = {"dispatch", *View.http_method_names}


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
    if getattr(view, "view_class", None):
        return getattr(called, "__name__", "") in _HANDLERS
    while view is not None:
        if view is called:
            return True
        view = getattr(view, "__wrapped__", None)
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
