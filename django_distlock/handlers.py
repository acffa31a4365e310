"""The setting ``DISTRIBUTED_LOCKS`` and the backends it names."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from . import forks
from .backends.base import BaseLockBackend
from .exceptions import InvalidLockBackend, LockBackendDoesNotExist
from .texts import quoted

SETTING = "DISTRIBUTED_LOCKS"
DEFAULT_ALIAS = "default"
DEFAULT_SETTING = {DEFAULT_ALIAS: {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}}


class LockBackends:
    """``locks[alias]``: one backend per alias and process, built when first asked for."""

    def __init__(self) -> None:
        self._inherited: list[Mapping[str, BaseLockBackend]] = []
        self._reset()
        forks.in_child(self._begin_anew)

    def _reset(self) -> None:
        self._building = threading.RLock()  # a signal handler may ask for a lock while this very thread is inside
        self._backends: dict[str, BaseLockBackend] = {}

    def _begin_anew(self) -> None:
        """In a forked child. Those of the parent are kept: collected, they might reach what the parent still uses."""
        self._inherited.append(self._backends)
        self._reset()

    @property
    def settings(self) -> Mapping[str, Any]:
        configured = getattr(settings, SETTING, DEFAULT_SETTING)
        if not isinstance(configured, Mapping):
            raise InvalidLockBackend(f"{SETTING} is {quoted(configured)}; it is a dict of lock backends by alias.")
        return configured

    def __getitem__(self, alias: str) -> BaseLockBackend:
        forks.notice()
        if backend := self._backends.get(alias):
            return backend
        with self._building:
            if alias not in self._backends:
                self._backends.setdefault(alias, self._build(alias))
            return self._backends[alias]

    def _build(self, alias: str) -> BaseLockBackend:
        configured = self.settings
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
            raise InvalidLockBackend(f"{SETTING}[{alias!r}]['BACKEND'] cannot be imported: {error}.") from error
        if not (isinstance(backend, type) and issubclass(backend, BaseLockBackend)):
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
        backends = list(self._backends.values())
        self._reset()
        for backend in backends:
            backend.close()


locks = LockBackends()


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting == SETTING:
        locks.close()


setting_changed.connect(_on_setting_changed)
