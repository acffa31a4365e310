"""The middleware: gives the answers of decorated views also for locks that a view acquires itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction

from .decorators import answers
from .exceptions import LockBackendError, LockNotAcquired, UnusableLockName


class LockMiddleware:
    """Answers 409 Conflict to LockNotAcquired, wherever a view raises it, and 503 to LockBackendError.

    It answers 400 to a text that cannot be the name of a lock, such as one that is too long.

    Add ``"django_distlock.middleware.LockMiddleware"`` to ``MIDDLEWARE``.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any | Awaitable[Any]:
        return self.get_response(request)

    def process_exception(self, request: Any, problem: Exception) -> Any:
        if isinstance(problem, LockNotAcquired | LockBackendError | UnusableLockName):
            return answers.DEFAULT.answer(request, problem)
        return None
