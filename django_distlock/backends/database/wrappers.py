"""Django's connections without its guard against event loops: lock() has its own, and threads have no loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend
from django.utils.asyncio import async_unsafe

GUARDED = "connect", "ensure_connection", "cursor", "get_new_connection", "create_cursor"
GUARD = async_unsafe.__code__.co_filename


@lru_cache
def own_class(engine: str) -> Any:
    """The DatabaseWrapper of an engine, for connections of our own, whose ``watched`` bounds what opens them.

    Under gevent all greenlets share what asyncio knows of a thread. While one of them runs an event loop, Django
    takes all others for calls from inside of it, and refused to renew leases.
    """
    theirs: Any = load_backend(engine).DatabaseWrapper

    def init_connection_state(self: Any) -> None:
        with self.watched(self):  # these are the first statements; the connection was not there before
            theirs.init_connection_state(self)

    methods = {name: _unguarded(theirs, name) for name in GUARDED}
    methods |= {"close": inspect.unwrap(BaseDatabaseWrapper.close), "init_connection_state": init_connection_state}
    return type("DatabaseWrapper", (theirs,), methods)


def _unguarded(theirs: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(theirs, name)  # now: test runners put methods of their own there for a while
        is_guard = getattr(found, "__code__", None) is not None and found.__code__.co_filename == GUARD
        return (found.__wrapped__ if is_guard else found)(self, *args, **kwargs)

    return method
