"""The options of a lock: their names, their defaults, and what their values may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypedDict

SHORTEST_TTL = 0.01
LONGEST_TTL = 10 * 366 * 86_400.0


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LONGEST_TTL


def check_ttl(ttl: object) -> float:
    """Return the TTL in seconds, or raise ValueError that says what one looks like."""
    if not _is_seconds(ttl) or ttl < SHORTEST_TTL:  # type: ignore[operator]
        raise ValueError(
            f"ttl is {ttl!r}. It is the number of seconds that the store keeps a lease nobody renews,"
            f" from {SHORTEST_TTL} to ten years; work that takes longer is covered by renew=True."
        )
    return float(ttl)  # type: ignore[arg-type]


def check_wait(wait: object) -> float | None:
    """Return the wait in seconds or None, or raise ValueError."""
    if wait is not None and not _is_seconds(wait):
        raise ValueError(
            f"wait is {wait!r}. It is the number of seconds to wait for a busy lock: 0 does not wait,"
            " None waits as long as it takes."
        )
    return wait  # type: ignore[return-value]


def check_bound(name: str, bound: object, meaning: str) -> float | None:
    """Return the seconds, above 0, or None, or raise ValueError that tells what they mean."""
    if bound is not None and not (_is_seconds(bound) and bound > 0):  # type: ignore[operator]
        raise ValueError(f"{name} is {bound!r}. It is the number of seconds {meaning}")
    return bound  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Terms:
    """The options of one lock, in seconds where they are times; what they mean is told by ``lock()``."""

    ttl: float = 30.0
    wait: float | None = 10.0
    renew: bool = True
    max_hold: float | None = None
    min_hold: float = 0.0
    reentrant: bool = False
    on_lost: Literal["raise", "log"] = "raise"
    in_atomic: Literal["defer", "refuse", "ignore"] = "defer"
    label: str = ""

    def __post_init__(self) -> None:
        check_ttl(self.ttl)
        check_wait(self.wait)
        check_bound(
            "max_hold",
            self.max_hold,
            "after which a lease is renewed no more; None renews for as long as the process lives, even if the holder"
            " hangs.",
        )
        if not _is_seconds(self.min_hold):
            raise ValueError(
                f"min_hold is {self.min_hold!r}. It is the number of seconds for which a lock stays taken after it"
                " was granted, however soon it is released; 0 frees it at once."
            )
        if self.on_lost not in ("raise", "log"):
            raise ValueError(f"on_lost is {self.on_lost!r}; choose 'raise' or 'log'.")
        if self.in_atomic not in ("defer", "refuse", "ignore"):
            raise ValueError(
                f"in_atomic is {self.in_atomic!r}; choose 'defer' (free the lock when the transaction around it ends),"
                " 'refuse' (raise inside a transaction) or 'ignore' (free the lock before COMMIT)."
            )
        for flag in ("renew", "reentrant"):
            if not isinstance(getattr(self, flag), bool):
                raise ValueError(f"{flag} is {getattr(self, flag)!r}; choose True or False.")
        if not isinstance(self.label, str):
            raise ValueError(f"label is {self.label!r}; it is a text for people that says what holds the lock.")


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
