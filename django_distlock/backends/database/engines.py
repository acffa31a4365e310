"""Django's database engines: what they are, and their classes and settings for connections of locks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import ceil
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend
from django.utils.asyncio import async_unsafe

ASYNC_UNSAFE_METHODS = "connect", "ensure_connection", "cursor", "get_new_connection", "create_cursor"
ASYNC_UNSAFE_FILE = async_unsafe.__code__.co_filename


@lru_cache
def own_class(engine: str) -> Any:
    """The DatabaseWrapper of an engine, for our connections. ``watched`` limits the time to open one.

    It has no guard against calls from an event loop; lock() has a better one. Under gevent, all greenlets share
    asyncio's state of a thread, so while one of them runs an event loop, Django would refuse the calls of all others.
    """
    base: Any = load_backend(engine).DatabaseWrapper

    def init_connection_state(self: Any) -> None:
        with self.watched(self):  # the first statements of the connection, which did not exist before
            base.init_connection_state(self)

    methods = {name: _unguarded(base, name) for name in ASYNC_UNSAFE_METHODS}
    methods |= {"close": inspect.unwrap(BaseDatabaseWrapper.close), "init_connection_state": init_connection_state}
    return type("DatabaseWrapper", (base,), methods)


def _unguarded(base: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(base, name)  # looked up now, because test runners replace methods there for a while
        is_guard = getattr(found, "__code__", None) is not None and found.__code__.co_filename == ASYNC_UNSAFE_FILE
        return (found.__wrapped__ if is_guard else found)(self, *args, **kwargs)

    return method


def own_settings(alias: str, timeout: float, file: str | None, prepare_after: int) -> dict[str, Any]:
    """The settings of the alias, changed for our connections. ``timeout``: seconds for an answer."""
    base = connections.settings[alias]
    own: dict[str, Any] = {**base, "ATOMIC_REQUESTS": False, "AUTOCOMMIT": True, "OPTIONS": {**base["OPTIONS"]}}
    options, whole, twice = own["OPTIONS"], ceil(timeout), ceil(2 * timeout)
    if file is not None:
        return {**own, "NAME": file, "OPTIONS": {"timeout": timeout}, "CONN_HEALTH_CHECKS": False}
    if vendor_of(alias) == "mysql":
        for limit, seconds in (("connect_timeout", twice), ("read_timeout", whole), ("write_timeout", whole)):
            options.setdefault(limit, seconds)
        options["isolation_level"] = "read committed"
    else:
        options.setdefault("connect_timeout", twice)
        for option in ("isolation_level", "pool"):
            options.pop(option, None)
        if is_psycopg3(class_of(alias)):
            options["server_side_binding"] = True
            options.setdefault("prepare_threshold", prepare_after)
    return own


def class_of(alias: str) -> Any:
    return load_backend(connections.settings[alias]["ENGINE"]).DatabaseWrapper


def vendor_of(alias: str) -> str:
    return str(class_of(alias).vendor)


def is_psycopg3(wrapper: Any) -> bool:
    """``wrapper``: a connection of Django, or its class."""
    return bool(wrapper.Database.__name__ == "psycopg")


def address(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """Identifies the database."""
    return settings["NAME"], settings["HOST"], settings["PORT"], settings["USER"]
