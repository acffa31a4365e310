"""The answers to requests whose lock is busy or whose store is down."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from math import ceil
from typing import Any

from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html
from django.utils.translation import get_language, override
from django.utils.translation import gettext_lazy as _

from ..exceptions import LockNotAcquired, UnusableLockName
from ..options import as_seconds
from ..utils.chance import chance
from ..utils.events import about_event
from .http import is_for_programs, is_rest_framework, label, request_of

BUSY = _("This is already being processed. Try again in a moment.")
UNAVAILABLE = _("This is not available just now. Try again later.")
INVALID = _("Bad request.")

PAGE = """\
<!doctype html>
<html lang="{language}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{detail}</title></head>
<body><p>{detail}</p></body>
</html>
"""

logger = logging.getLogger("django_distlock")

named_templates: set[str] = set()  # the templates of the answers in this process, for the system checks

OfProblem = Callable[[LockNotAcquired, Any], Any]  # the second argument is the request


class Respond:
    """An answer to a request whose lock is not acquired. See ``respond()``."""

    __slots__ = ("detail", "retry_after", "status", "template_name")

    def __init__(
        self,
        status: int | OfProblem = 409,
        template_name: str | None = None,
        retry_after: float | timedelta | OfProblem | None = None,
        detail: str | OfProblem | None = None,
    ) -> None:
        self.status = status if callable(status) else _checked_status(status)
        self.template_name = template_name
        if template_name:
            named_templates.add(template_name)
        self.retry_after = retry_after if callable(retry_after) else _checked_seconds(retry_after)
        self.detail = detail

    def __call__(self, problem: Exception, /, *args: Any, **kwargs: Any) -> HttpResponse:
        if (request := request_of(args, kwargs)) is None:
            raise TypeError("respond(...) answers requests, and this call has none.") from problem
        return self.answer(request, problem)

    def answer(self, request: Any, problem: Exception, view: str = "") -> HttpResponse:
        """Returns the response. It names neither the lock nor its holder.

        The status is that of this object for a busy lock, 503 for a store that is down, and 400 for a value from the
        client that cannot be in the name of a lock. ``view``: for the log if there is no route.
        """
        if isinstance(problem, LockNotAcquired):
            return self._when_busy(request, problem)
        if isinstance(problem, UnusableLockName):
            about = about_event("answered-400")
            logger.warning("%s is answered 400: %s", label(request, view), problem, extra=about)
            return self._with_format(request, problem, 400, {"detail": INVALID, "code": "invalid"})
        about = about_event("answered-503")
        logger.error("%s is answered 503: %s", label(request, view), problem, exc_info=problem, extra=about)
        return self._with_format(request, problem, 503, {"detail": UNAVAILABLE, "code": "unavailable"})

    def _when_busy(self, request: Any, busy: LockNotAcquired) -> HttpResponse:
        def given(value: Any) -> Any:
            return value(busy, request) if callable(value) else value

        seconds = _checked_seconds(given(self.retry_after))
        if seconds is None:
            seconds = _seconds_until_free(busy)
        detail = BUSY if self.detail is None else str(given(self.detail))
        content = {"detail": detail, "code": "busy", "retry_after": seconds}
        return self._with_format(request, busy, _checked_status(given(self.status)), content)

    def _with_format(self, request: Any, problem: Exception, status: int, content: dict[str, Any]) -> HttpResponse:
        """``detail`` in the content is the project's text, or a text of this module, which programs get in English."""
        if is_rest_framework(request):
            raise _api_exception(status, _for_programs(content)) from problem
        # The first type is for clients without a preference.
        texts = ["text/html"] if self.template_name else ["text/plain", "text/html"]
        kinds = ["application/json", *texts] if is_for_programs(request) else [*texts, "application/json"]
        kind = request.get_preferred_type(kinds) or kinds[0]
        if kind == "application/json":
            response: HttpResponse = JsonResponse(_for_programs(content), status=status)
        else:
            response = self._for_people(request, kind, status, content)
        if "retry_after" in content:
            response["Retry-After"] = str(content["retry_after"])
        patch_vary_headers(response, ["Accept"])
        return response

    def _for_people(self, request: Any, kind: str, status: int, content: dict[str, Any]) -> HttpResponse:
        detail = str(content["detail"])
        if self.template_name:
            return render(request, self.template_name, {**content, "detail": detail, "status": status}, status=status)
        text = f"{detail}\n"
        if kind == "text/html":
            text = format_html(PAGE, detail=detail, language=get_language() or "en")
        return HttpResponse(text, status=status, content_type=f"{kind}; charset=utf-8")


def respond(
    *,
    status: int | OfProblem = 409,
    detail: str | OfProblem | None = None,
    retry_after: float | timedelta | OfProblem | None = None,
    template_name: str | None = None,
) -> Respond:
    """For ``on_busy`` of a view: the answer to a request whose lock is busy.

    - ``status``: the HTTP status, from 400 to 599.
    - ``detail``: the text for people. Default: a sentence, in English in JSON, else in the language of the request.
    - ``retry_after``: seconds, or a timedelta, for ``Retry-After``, rounded up. Default: a random number from 1 to 3,
      because it is unknown when the holder ends, and clients that were refused together should not come back together.
      For a lock that rests for its ``min_hold``, the default is the time until it is free.
    - ``template_name``: the template of a page for browsers. Its context: ``detail``, ``code``, ``retry_after``,
      ``status``.

    ``status``, ``detail`` and ``retry_after`` may be callables, which get the LockNotAcquired and the request.

    Clients that prefer JSON, and clients of APIs, get ``detail``, ``code`` ("busy") and ``retry_after``. Browsers get a
    page, and others a line of text. In Django REST framework, its own exceptions are raised, so that the project's
    exception handler and renderers make the answer. If the store is down, the answer is 503 in the same form, with the
    code "unavailable" and without ``retry_after``.

    Raises ValueError for a status or a number of seconds that is out of range.
    """
    return Respond(status, template_name, retry_after, detail)


def _checked_status(status: Any) -> int:
    if status not in range(400, 600):
        raise ValueError(f"status is {status!r}; a busy lock is answered by an HTTP status from 400 to 599.")
    return int(status)


def _checked_seconds(retry_after: Any) -> int | None:
    if retry_after is None:
        return None
    seconds = as_seconds(retry_after)
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError(f"retry_after is {retry_after!r}; it is a number of seconds from 0 on, or a timedelta.")
    return ceil(seconds)


def _seconds_until_free(busy: LockNotAcquired) -> int:
    if busy.resting and busy.retry_after is not None:
        return max(1, ceil(busy.retry_after))
    return chance.randint(1, 3)


class _Seconds(int):
    """A number with a ``code``, which ``APIException.get_codes()`` expects of each detail."""

    code = "busy"


def _for_programs(content: dict[str, Any]) -> dict[str, Any]:
    with override(None):
        return {**content, "detail": str(content["detail"])}


def _api_exception(status: int, content: dict[str, Any]) -> Any:
    exceptions = import_module("rest_framework.exceptions")
    code = content["code"]
    error = exceptions.APIException(content["detail"], code)
    error.status_code = status
    error.detail = {key: exceptions.ErrorDetail(content[key], code) for key in ("detail", "code")}
    if "retry_after" in content:
        error.wait = content["retry_after"]  # REST framework makes Retry-After of it, as for throttling
        error.detail["retry_after"] = _Seconds(error.wait)
    return error


DEFAULT = Respond()
