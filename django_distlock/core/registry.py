"""The setting ``DISTRIBUTED_LOCKS``, the backends that it names, and what a process has beside each backend."""

from __future__ import annotations

import atexit
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import global_settings, settings
from django.core.checks import ERROR, WARNING, CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..exceptions import InvalidLockBackend, LockBackendDoesNotExist, LockBackendError
from ..utils import fork
from ..utils.events import about_event
from ..utils.guards import new_guard
from ..utils.text import quoted
from ..utils.threads import end_all
from ..utils.weak import WeakList

if TYPE_CHECKING:
    from ..backends.base import BaseLockBackend
    from .lease import Lease
    from .renewal import Renewer
    from .service import Service

SETTING = "DISTRIBUTED_LOCKS"
DEFAULT_ALIAS = "default"
LOCAL_MEMORY = "django_distlock.backends.locmem.LocMemBackend"
LONGEST_END = 1.0  # seconds that the exit waits for threads of ours
TAG = "distlock"  # of the system checks
HINT_OF_TESTS = (
    "Tests need no server: django_distlock.testing.override_locks(), and the fixture local_locks of pytest, keep locks"
    " in local memory."
)

EXAMPLE = """\
DISTRIBUTED_LOCKS = {
    "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "redis://127.0.0.1:6379/0"},
}"""

logger = logging.getLogger("django_distlock")


@register(TAG)
def check_presence(**_: Any) -> list[CheckMessage]:
    """Checks that the setting exists. Here, so that the check also runs if the app is not in INSTALLED_APPS."""
    if hasattr(settings, SETTING):
        return []
    problem = f"{SETTING} is not set{_look_alikes()}. Without it, locks exclude no other process."
    hint = f"Name a backend that all processes share:\n\n{EXAMPLE}\n\nFor one process alone, name {LOCAL_MEMORY!r}."
    if _may_do_without():
        return [Warning(problem, hint=hint, id="distlock.W001")]
    return [Error(problem, hint=f"{hint} Only with DEBUG, and in tests, it may be absent.", id="distlock.E005")]


def _look_alikes() -> str:
    from difflib import get_close_matches  # hardly any process needs it

    unknown = {name for name in dir(settings) if name.isupper()} - {*dir(global_settings)}
    names = sorted(name for name in unknown if not name.startswith(f"{SETTING}_"))
    found = [name for name in names if "DISTLOCK" in name or "DISTRIBUTED_LOCK" in name]
    found += get_close_matches(SETTING, [name for name in names if name not in found])
    return f", but {' and '.join(found)} {'is' if len(found) == 1 else 'are'}" if found else ""


def _may_do_without() -> bool:
    """Whether this is a process of development or of tests."""
    return settings.DEBUG or is_tested()


def is_tested() -> bool:
    """Whether a test runner has set up its environment in this process."""
    return hasattr(sys.modules.get("django.core.mail"), "outbox")


def hint_at_local_memory(error: BaseException) -> None:
    """Add a hint for tests to the error of a store that does not answer."""
    if isinstance(error, LockBackendError) and is_tested() and HINT_OF_TESTS not in getattr(error, "__notes__", ()):
        error.add_note(HINT_OF_TESTS)


@cache
def log_once(level: int, text: str) -> None:
    logger.log(level, "%s", text, extra=about_event("not-set-up"))


def tell_of_absence(least: int = WARNING) -> None:
    """Log the messages of check_presence(), once per process. ``least``: the lowest level."""
    for message in check_presence():
        if message.level >= least:
            log_once(message.level, f"{message.msg} {message.hint}")


def aliases_to_check() -> list[str]:
    """The default one also if the setting cannot be read: building its backend then raises the reason."""
    if not hasattr(settings, SETTING):
        return []
    try:
        return list(locks) or [DEFAULT_ALIAS]
    except ImproperlyConfigured:
        return [DEFAULT_ALIAS]


@register(TAG)
def check_entries(**_: Any) -> list[CheckMessage]:
    """Checks that a backend can be made from each entry. Here for the same reason as check_presence()."""
    found: list[CheckMessage] = []
    for alias in aliases_to_check():
        try:
            locks[alias]  # builds it
        except ImproperlyConfigured as error:
            found.append(Error(str(error), id="distlock.E001"))
    return found


class LockBackends:
    """``locks[alias]``: one backend per alias and process, built when first asked for."""

    def __init__(self) -> None:
        self._inherited: list[Mapping[str, Service]] = []
        # Also of aliases that the settings no longer name, in the order in which they were made
        self._renewers: WeakList[Renewer] = WeakList()
        self._reset()
        fork.in_child(self._begin_anew)

    def _reset(self) -> None:
        self._building = new_guard()  # a signal handler may ask for a lock while this very thread is inside
        self._services: dict[str, Service] = {}

    def _begin_anew(self) -> None:
        """In a forked child. The parent's services are kept: their finalizers might end what the parent still uses."""
        for renewer in self._renewers:
            renewer.forget()
        self._renewers.clear()
        self._inherited.append(self._services)
        self._reset()

    @property
    def settings(self) -> Mapping[str, Any]:
        if not hasattr(settings, SETTING):
            if not _may_do_without():
                tell_of_absence()  # without DEBUG, Django does not log the errors of requests
                [message] = check_presence()
                raise InvalidLockBackend(f"{message.msg} {message.hint}")
            return {DEFAULT_ALIAS: {"BACKEND": LOCAL_MEMORY}}
        configured = getattr(settings, SETTING)
        if not isinstance(configured, Mapping):
            raise InvalidLockBackend(f"{SETTING} is {quoted(configured)}; it is a dict of lock backends by alias.")
        if isinstance(configured.get("BACKEND"), str):
            raise InvalidLockBackend(f"{SETTING} is one backend; it is a dict of them by alias:\n\n{EXAMPLE}")
        return configured

    if not TYPE_CHECKING:  # to which every attribute would seem to exist

        def __getattr__(self, name: str) -> None:
            raise AttributeError(
                f"There is no locks.{name}. Name a backend by its alias, such as locks['default'].held()."
            )

    def __getitem__(self, alias: str) -> BaseLockBackend:
        return self.service(alias).backend

    def service(self, alias: str) -> Service:
        """For the package itself: the service of that alias."""
        fork.notice()
        if service := self._services.get(alias):
            return service
        with self._building:
            services = self._services  # if close() drops it meanwhile, the new service is for this call alone
            if alias not in services:
                from .service import Service  # only a process that uses locks needs it

                service = Service(self._build(alias))
                self._renewers.add(service.renewer)
                _watch_the_exit()
                services.setdefault(alias, service)  # a signal handler may have built one meanwhile
            return services[alias]

    def _build(self, alias: str) -> BaseLockBackend:
        from ..backends import base  # only a process that uses locks needs it

        configured = self.settings
        if not hasattr(settings, SETTING):
            tell_of_absence()
        if alias not in configured:
            known = ", ".join(map(repr, configured)) or "none"
            raise LockBackendDoesNotExist(f"{SETTING} has no alias {quoted(alias)}. Known: {known}.")
        entry = configured[alias]
        path = entry.get("BACKEND") if isinstance(entry, Mapping) else None
        example = "Name one by its dotted path, for example 'django_distlock.backends.redis.RedisBackend'."
        if not isinstance(path, str):
            raise InvalidLockBackend(f"{SETTING}[{alias!r}] has no 'BACKEND'. {example}")
        if not re.fullmatch(r"[\w.]*", path):
            raise InvalidLockBackend(f"{SETTING}[{alias!r}]['BACKEND'] is {quoted(path)}. {example}")
        try:
            backend = import_string(path)
        except ImportError as error:
            raise InvalidLockBackend(
                f"{SETTING}[{alias!r}]['BACKEND'] cannot be imported: {error}. {example}"
            ) from error
        if not (isinstance(backend, type) and issubclass(backend, base.BaseLockBackend)):
            raise InvalidLockBackend(f"{SETTING}[{alias!r}]['BACKEND'] is {path}, which is no lock backend.")
        return backend(alias, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __contains__(self, alias: object) -> bool:
        return alias in self.settings

    def all(self) -> list[BaseLockBackend]:
        return [self[alias] for alias in self]

    def close(self) -> None:
        """Forget the backends; the next use builds them anew from the settings."""
        services = self._services
        self._reset()
        for service in list(services.values()):
            service.backend.close()

    def leases(self) -> list[Lease]:
        """The leases that this process holds, of all backends, also of those that the settings no longer name."""
        return [lease for renewer in self._renewers for lease in renewer.leases()]

    def release_all(self) -> None:
        """The process exits: release the leases whose thread or task is gone."""
        fork.notice()
        for renewer in self._renewers:
            renewer.release_all()
            if renewer.journal:
                renewer.journal.write_last()


locks = LockBackends()


def _exit() -> None:
    locks.release_all()
    end_all(LONGEST_END)


atexit.register(_exit)


def _watch_the_exit() -> None:
    """Children of multiprocessing exit by os._exit. They call the finalizers of multiprocessing, but not atexit."""
    util, process = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "process"))
    if util and process and process.parent_process():
        util.Finalize(None, locks.release_all, exitpriority=100)


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting == SETTING:
        locks.close()


setting_changed.connect(_on_setting_changed)

# If a view is the first to import this, Django's checks are running or have run already, without ours.
if apps.ready and not apps.is_installed("django_distlock"):
    tell_of_absence(least=ERROR)
