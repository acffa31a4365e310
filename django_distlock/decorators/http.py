"""Requests and responses: the request of a call, whether the call is its view, and unfinished responses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from ..core.holds import ResponseRetainer
from ..core.lease import Lease
from ..types import shown

RETAINERS = "distlock_retainers"  # the name of an attribute of responses


def request_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the request with which a function view, or a method of a class view, was called, or None.

    It is an HttpRequest, or the wrapper of Django REST framework around one.
    """
    if args and isinstance(args[0], HttpRequest):  # most often
        return args[0]
    for value in (*args[:2], kwargs.get("request")):
        if isinstance(original(value), HttpRequest):
            return value
    return None


def original(request: Any) -> Any:
    """Returns Django's own request. Django REST framework wraps it, and passes calls of its methods on to it."""
    if isinstance(request, HttpRequest) or not is_rest_framework(request):
        return request
    return request.get_host.__self__


def is_rest_framework(request: Any) -> bool:
    module = sys.modules.get("rest_framework.request")
    return module is not None and isinstance(request, module.Request)


def label(request: Any, view: str = "") -> str:
    """Returns the method of the request and the route of its URL: "POST orders/<int:order_id>/pay".

    Never the path, because the client chooses it, and it may contain a secret such as the token of a password reset.
    ``view`` replaces the route if the request has none, as in a middleware or in a unit test with RequestFactory.
    """
    match = original(request).resolver_match
    route = view if match is None or match.route is None else match.route or "/"
    return shown(f"{request.method} {route}".rstrip())


def routed_view(request: Any) -> Any:
    """Returns the view of the request's URL; None without a URL, as in a unit test with RequestFactory."""
    match = original(request).resolver_match
    return match.func if match else None


def is_view(request: Any, called: Callable[..., Any]) -> bool:
    """Returns whether ``called`` is the view of the request's URL, and not a helper that takes a request.

    True without a URL.
    """
    view = routed_view(request)
    return (
        view is None
        or any(_is_api_view_of(made, called) for made in _unwrapped(view))
        or any(
            candidate is called or (is_method and inspect.unwrap(candidate) is inspect.unwrap(called))
            for candidate, is_method in _handlers(view, request.method.lower())
        )
    )


def is_for_programs(request: Any) -> bool:
    """Returns whether the request's URL leads to an API, whose clients read JSON."""
    module = sys.modules.get("rest_framework.views")
    return any(
        _ninja_operations(view) or (module is not None and issubclass(getattr(view, "cls", object), module.APIView))
        for view in _unwrapped(routed_view(request))
    )


def is_async_dispatch(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Returns whether the function is the ``dispatch`` of a class view with async handlers.

    It is a sync method that returns a coroutine.
    """
    if getattr(function, "__name__", "") != "dispatch":
        return False
    owners = [getattr(bound, "__self__", None) for bound in _unwrapped(function)]
    view = next((owner for owner in owners if owner is not None), args[0] if args else None)
    return getattr(view, "view_is_async", False) is True


def _handlers(routed: Any, method: str) -> Iterator[tuple[Any, bool]]:
    """Yields every callable between the URL and the code that answers it, and whether it is a method of a class view.

    method_decorator makes a new function for each call of a method. The innermost one is the method itself.
    """
    for view in _unwrapped(routed):
        yield view, False
        if view_class := getattr(view, "view_class", None) or getattr(view, "cls", None):
            actions = getattr(view, "actions", None) or {}
            for name in ("dispatch", actions.get(method, method), *(("get",) if method == "head" else ())):
                if handler := getattr(view_class, name, None):
                    yield handler, True
        for operation in _ninja_operations(view):
            if method.upper() in operation.methods:
                yield from ((function, False) for function in _unwrapped(operation.view_func))


def _is_api_view_of(view: Any, called: Any) -> bool:
    """Returns whether ``@api_view`` made the view from the function ``called``.

    The view is a class that hides the function, but has its module and its name.
    """
    made: Any = getattr(view, "cls", None)
    handlers = [getattr(made, method, None) for method in getattr(made, "http_method_names", ())]
    if not any(getattr(handler, "__module__", None) == "rest_framework.decorators" for handler in handlers):
        return False
    place = getattr(called, "__qualname__", "").rpartition(".")[0]
    is_method = bool(place) and not place.endswith("<locals>")
    path = getattr(called, "__module__", None), getattr(called, "__name__", None)
    return not is_method and path == (made.__module__, made.__name__)


def _ninja_operations(view: Any) -> list[Any]:
    """Returns the operations of a path in Django Ninja. Its view is a closure over the object that has them."""
    if getattr(view, "__module__", None) != "ninja.operation" or not inspect.isfunction(view):
        return []
    return getattr(inspect.getclosurevars(view).nonlocals.get("self"), "operations", [])


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yields the function and everything that it wraps, down to the innermost function."""
    while function is not None:
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


def is_response(result: Any) -> bool:
    return isinstance(result, HttpResponseBase)


def is_unfinished(result: Any) -> bool:
    """Returns whether the result is a response whose content is made after the view has returned."""
    return is_response(result) and (result.streaming or not getattr(result, "is_rendered", True))


def retain_until_finished(lease: Lease, response: Any, request: Any) -> None:
    """Retain the lease until the content is made, the response is closed, or another response replaces it."""
    retainer = _Retainer(lease)
    if RETAINERS not in vars(response):
        vars(response)[RETAINERS] = []
        response.__class__ = _retaining_class(response.__class__)
    vars(response)[RETAINERS].append(retainer)
    if hasattr(response, "_iterator"):
        wrapper = _AsyncParts if response.is_async else _parts
        response._iterator = wrapper(response._iterator, retainer)  # noqa: SLF001 - streaming_content would wrap it twice
    if request is not None:
        _close_with(original(request), retainer)


class _Retainer(ResponseRetainer):
    """Retains a lease for one response, which alone owns it.

    It is released when the content is made, when the response is closed, or when it is collected with the response.
    """

    def __call__(self) -> None:
        self.release(promptly=not _is_in_event_loop())


@functools.lru_cache(maxsize=128)
def _retaining_class(kind: Any) -> Any:
    """Returns a subclass of ``kind``. When a response of it is rendered or closed, it becomes a ``kind`` again and
    releases its retainers.

    An attribute ``render`` or ``close`` of the response would refer back to the response. If nobody called it, only
    the garbage collector could then free the response.
    """

    @contextmanager
    def finishing(response: Any) -> Iterator[None]:
        response.__class__, retainers = kind, vars(response).pop(RETAINERS)
        try:
            yield
        finally:
            for retainer in retainers:
                retainer()

    def close(response: Any) -> None:
        with finishing(response):
            response.close()

    def render(response: Any) -> Any:
        with finishing(response):
            return response.render()

    async def arender(response: Any) -> Any:
        with finishing(response):
            return await response.render()

    def reduce(response: Any, protocol: int) -> Any:
        """For a cache that pickles a response whose content was set. The copies retain nothing."""
        state = {name: value for name, value in response.__getstate__().items() if name != RETAINERS}
        return kind.__new__, (kind,), state

    methods: dict[str, Any] = {"close": close, "__reduce_ex__": reduce}
    if hasattr(kind, "render"):
        methods["render"] = arender if iscoroutinefunction(kind.render) else render
    named_alike = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind)(kind.__name__, (kind,), {**named_alike, **methods})


def _parts(parts: Iterator[Any], retainer: _Retainer) -> Iterator[Any]:
    """Yields the parts, then releases the retainer. Under ASGI, a response whose content raises is never closed."""
    try:
        yield from parts
    except GeneratorExit:
        raise  # collected, with the response or before it; the response owns the retainer, too
    except BaseException:
        retainer()
        raise
    retainer()


class _AsyncParts:
    """Yields the parts, then releases the retainer. Under ASGI, a response that raises or cannot be sent is never
    closed.

    Each iteration is an object of its own. So it ends when it is collected, even if something keeps the response, such
    as a traceback.
    """

    def __init__(self, parts: AsyncIterator[Any], retainer: _Retainer) -> None:
        self._parts, self._retainer = parts, retainer

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for part in self._parts:
                yield part
        finally:
            try:
                if isinstance(self._parts, AsyncGenerator):
                    await self._parts.aclose()
            finally:
                self._retainer()


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _close_with(request: Any, retainer: _Retainer) -> None:
    """Release the retainer when the request is closed, which always happens.

    A response that fails to render, or that a middleware replaces, is not closed.
    """
    close, reference = request.close, ref(retainer)

    def close_and_release() -> None:
        close()
        if (existing := reference()) is not None:
            existing()

    request.close = close_and_release
