"""The keywords that a lock is asked for with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict

from .terms import Terms


class LockOptions(TypedDict, total=False):
    """Keywords of ``lock()`` and ``@distributed_lock``. What is not given comes from the alias' settings."""

    ttl: float
    wait: float | None
    renew: bool
    max_hold: float | None
    min_hold: float
    reentrant: bool
    on_lost: Literal["raise", "log"]
    in_atomic: Literal["defer", "refuse", "ignore"]
    label: str


_KNOWN = tuple(option.name for option in fields(Terms))
_MISTAKEN = {
    "timeout": "ttl or wait? ttl=30 is how long the store keeps a lease nobody renews (what redis-py calls timeout);"
    " wait=5 is how long to wait for a busy lock.",
    "blocking_timeout": "ttl or wait? wait=5 is how long to wait for a busy lock; ttl=30 is how long the store keeps"
    " a lease nobody renews.",
    "blocking": "wait=0 does not wait for a busy lock; wait=None waits as long as it takes.",
    "expire": "ttl=30 is how long the store keeps a lease nobody renews.",
    "auto_renewal": "renew=True keeps the lease alive while its holder lives; it is the default.",
}


class Options:
    """Options as given, and the terms that follow from them with the defaults of an alias."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for option in given:
            if option not in _KNOWN:
                hint = _MISTAKEN.get(option) or f"The options are {', '.join(_KNOWN)}, using."
                raise TypeError(f"A lock has no option {option!r}: {hint}")
        Terms(**given)  # tells bad values where they are written, not where they are first used
        self.given = given
        self._last: tuple[Terms, Terms] | None = None

    def terms(self, defaults: Terms) -> Terms:
        last = self._last  # another thread may set one meanwhile
        if last is None or last[0] is not defaults:
            self._last = last = defaults, replace(defaults, **self.given)
        return last[1]


# A program has few different sets of options and asks for locks often. Typed, because 1 == True.
_settled = lru_cache(maxsize=256, typed=True)(lambda **given: Options(given))


def settled(**given: Any) -> Options:
    """Raises TypeError for an unknown option, ValueError for a value out of range."""
    try:
        return _settled(**given)
    except TypeError:  # also for a value that cannot be hashed, of which the option itself says more
        return Options(given)
