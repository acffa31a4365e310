"""Checks whether the stores of locks answer: a view for probes, and a check for django-health-check."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db.transaction import non_atomic_requests
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..core.registry import SETTING, locks
from ..exceptions import LockBackendError
from ..utils import fork
from ..utils.clock import clock
from ..utils.events import about_event
from ..utils.guards import new_guard
from ..utils.parallel import ask_in_thread

LONGEST = 1.0  # seconds for which a store may take to answer
KEPT = 2.0  # seconds for which further probes get the same answer
OK, SILENT, REFUSES, WRONG = "ok", "does not answer", "refuses", "wrong settings"
NAME = "django_distlock.readiness"  # the name of a lock that nobody acquires

logger = logging.getLogger("django_distlock")


class Probe(NamedTuple):
    """A question to the store of one alias: when it was asked, on ``clock()``, and the answer."""

    asked_at: float
    state: Future[str]


class Probes:
    """The last probe of each alias. Further requests share it for two seconds, and for as long as it has no answer."""

    def __init__(self) -> None:
        self._begin_anew()
        fork.in_child(self._begin_anew)

    def _begin_anew(self) -> None:
        self._guard = new_guard()
        self._last: dict[str, Probe] = {}
        self._failing: set[str] = set()

    def ask(self, alias: str) -> Future[str]:
        with self._guard:
            last = self._last.get(alias)
            if last is None or (last.state.done() and clock() - last.asked_at >= KEPT):
                self._last[alias] = last = Probe(clock(), self._asked(alias))
            return last.state

    def _asked(self, alias: str) -> Future[str]:
        try:
            return ask_in_thread(alias, partial(self._state_of, alias))
        except RuntimeError as error:  # no thread can be started, at the limit of a container
            self._tell(alias, error)
            unasked: Future[str] = Future()
            unasked.set_result(SILENT)
            return unasked

    def _state_of(self, alias: str) -> str:
        """Ask the store with one look, which changes nothing."""
        try:
            backend = locks[alias]
            backend.pinned(backend.shared_prefix).look([NAME])
        except LockBackendError as error:
            self._tell(alias, error)
            return REFUSES if error.is_final else SILENT
        except ImproperlyConfigured as error:
            self._tell(alias, error)
            return WRONG
        except Exception as error:  # a defect; clients of the probe see no more of it than of an outage
            self._tell(alias, error, traceback=error)
            return SILENT
        self._failing.discard(alias)
        return OK

    def _tell(self, alias: str, error: Exception, *, traceback: Exception | None = None) -> None:
        """Log the reason, which clients of the probe do not see, once until the store answers again."""
        if alias not in self._failing:
            self._failing.add(alias)
            about = about_event("not-ready", alias=alias)
            logger.warning("Lock backend %r is not ready: %s", alias, error, exc_info=traceback, extra=about)


probes = Probes()


def states(aliases: Iterable[str]) -> dict[str, str]:
    """Returns, for each alias, "ok" or what is wrong. Takes at most a second."""
    asked = {alias: probes.ask(alias) for alias in aliases}
    wait(asked.values(), timeout=LONGEST)
    return _known(asked)


async def astates(aliases: Iterable[str]) -> dict[str, str]:
    """``states()`` for tasks."""
    asked = {alias: probes.ask(alias) for alias in aliases}
    if asked:
        await asyncio.wait(list(map(asyncio.wrap_future, asked.values())), timeout=LONGEST)
    return _known(asked)


def _known(asked: Mapping[str, Future[str]]) -> dict[str, str]:
    return {alias: state.result() if state.done() else SILENT for alias, state in asked.items()}


class Told(JsonResponse):
    """A response that Django does not log as an error for each probe, because ``not-ready`` is logged once."""

    _has_been_logged = True  # an attribute of Django's


@non_atomic_requests
@require_safe
@never_cache
def readiness(request: HttpRequest) -> JsonResponse:
    """Answers 200 if the stores of all aliases answer, else 503. ``?using=alias``: asks only these aliases.

    Asks each store once, all at the same time, and waits at most a second. Other requests in the next two seconds get
    the same answer. JSON: ``{"status": "ok", "locks": {"default": "ok"}}``.
    """
    aliases = _wanted(request)
    return aliases if isinstance(aliases, JsonResponse) else _answer(states(aliases))


@non_atomic_requests
@require_safe
@never_cache
async def areadiness(request: HttpRequest) -> JsonResponse:
    """``readiness()`` for event loops; no thread waits for the stores' answers here."""
    aliases = _wanted(request)
    return aliases if isinstance(aliases, JsonResponse) else _answer(await astates(aliases))


def _wanted(request: HttpRequest) -> list[str] | JsonResponse:
    try:
        known = list(locks)
    except ImproperlyConfigured:  # the system checks report it
        return _answer({SETTING: WRONG})
    aliases = request.GET.getlist("using") or known
    if unknown := sorted(set(aliases) - set(known)):
        return JsonResponse({"status": "unknown alias", "locks": dict.fromkeys(unknown, "unknown")}, status=404)
    return aliases


def _answer(found: dict[str, str]) -> JsonResponse:
    is_ready = all(state == OK for state in found.values())
    body = {"status": OK if is_ready else "unavailable", "locks": found}
    return Told(body, status=200 if is_ready else 503)


try:
    from health_check.base import HealthCheck  # type: ignore[import-untyped]
    from health_check.exceptions import ServiceUnavailable  # type: ignore[import-untyped]
except ModuleNotFoundError:  # the views do not need it
    pass
else:

    @dataclasses.dataclass
    class LockCheck(HealthCheck):  # type: ignore[misc]
        """A check for django-health-check: whether the stores of locks answer. ``using``: an alias; None: all."""

        using: str | None = None

        async def run(self) -> None:
            found = await astates([self.using] if self.using else list(locks))
            if failing := {alias: state for alias, state in found.items() if state != OK}:
                raise ServiceUnavailable("; ".join(f"{alias}: {state}" for alias, state in failing.items()))
