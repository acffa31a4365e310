"""The options of a lock, and what their values may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
