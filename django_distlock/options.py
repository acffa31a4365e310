"""The options of a lock: their names, their defaults, and what their values may be."""

# Annotations are no texts here, as in types.py.
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, Any, Literal, NoReturn, Self, TypedDict

from .exceptions import LockLost
from .types import MOST_SLOTS
from .utils import other_words
from .utils.events import about_event

SHORTEST_TTL = 0.01
LONGEST_TTL = 10 * 366 * 86_400.0
NEEDLESS_TTL = 3600.0  # seconds; a longer TTL that is renewed is probably a mistake, or not meant in seconds

NEEDLESS = "A holder that is killed blocks others for its whole TTL, and renewal lets a short one last."

logger = logging.getLogger("django_distlock")

Check = Callable[[str, Any], Any]  # gets a name and a value, and returns the value; its ValueError says what to write


def as_seconds(length: Any) -> Any:
    """Returns a timedelta as a number of seconds, and anything else unchanged."""
    return length.total_seconds() if isinstance(length, timedelta) else length


class Seconds:
    """The check of a length of time, which is at most ten years: a number of seconds, or a timedelta.

    ``meaning``: the text after "the number of seconds" in the error. ``least``: the smallest number of seconds allowed.
    ``above``: the number must be larger than this. ``or_none``: None is allowed, too.
    """

    __slots__ = ("above", "least", "meaning", "or_none")

    def __init__(self, meaning: str, least: float = 0.0, above: float = -1.0, or_none: bool = False) -> None:
        self.meaning = meaning
        self.least = least
        self.above = above
        self.or_none = or_none

    def __call__(self, name: str, value: object) -> float | None:
        if value is None and self.or_none:
            return None
        seconds = as_seconds(value)
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if is_number and self.least <= seconds <= LONGEST_TTL and seconds > self.above:
            return seconds  # type: ignore[no-any-return]
        raise ValueError(f"{name} is {value!r}. It is the number of seconds {self.meaning}")


def _choice(*choices: str, hint: str) -> Check:
    def check(name: str, value: object) -> object:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; choose {hint}.")
        return value

    return check


def _on_lost(name: str, value: object) -> object:
    if value not in ("raise", "log") and not callable(value):
        raise ValueError(f"{name} is {value!r}; choose 'raise', 'log' or something to call, which gets the LockLost.")
    return value


def _flag(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; choose True or False.")
    return value


def _label(name: str, value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; it is a text for people that says what holds the lock.")
    return value


def _slots(name: str, value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SLOTS:
        return value
    raise ValueError(
        f"{name} is {value!r}; it is how many may hold the lock at once, a whole number from 1 to {MOST_SLOTS}."
    )


def _max_waiters(name: str, value: object) -> object:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(
        f"{name} is {value!r}; it is how many may wait for the lock before others are turned away, a whole number from"
        " 1 on, or None for no bound. A caller that is not to wait at all has wait=0."
    )


TTL = Seconds(
    f"that the store keeps a lease nobody renews, from {SHORTEST_TTL} to ten years; work that takes longer is covered"
    " by renew=True.",
    least=SHORTEST_TTL,
)


def check_ttl(ttl: object) -> float:
    """Return the TTL in seconds. Raises ValueError, which says what a TTL looks like."""
    return float(TTL("ttl", ttl) or 0.0)


HAS_KEY = "key"  # the entry of an alias in the settings may set the option, under its name in capitals


class Terms:
    """The final options of a lock, with their names, defaults and checks. ``lock()`` explains them.

    Each has its type, its check, and whether it has a key. No named tuple, which takes longer to read.
    """

    ttl: Annotated[float, TTL, HAS_KEY] = 30.0
    wait: Annotated[
        float | None,
        Seconds("to wait for a busy lock: 0 does not wait, None waits as long as it takes.", or_none=True),
        HAS_KEY,
    ] = 10.0
    max_waiters: Annotated[int | None, _max_waiters, HAS_KEY] = None
    renew: Annotated[bool, _flag, HAS_KEY] = True
    max_hold: Annotated[
        float | None,
        Seconds(
            "after which a lease is no longer renewed; None renews for as long as the process lives, even if the holder"
            " hangs.",
            above=0.0,
            or_none=True,
        ),
        HAS_KEY,
    ] = None
    min_hold: Annotated[
        float,
        Seconds("for which a lock stays taken after it was granted, however soon it is released; 0 frees it at once."),
        HAS_KEY,
    ] = 0.0
    slots: Annotated[int, _slots] = 1
    reentrant: Annotated[bool, _flag] = False
    on_lost: Annotated[Literal["raise", "log"] | Callable[[LockLost], object], _on_lost] = "raise"
    in_atomic: Annotated[
        Literal["defer", "refuse", "ignore"],
        _choice(
            "defer", "refuse", "ignore",
            hint="'defer' (free the lock when the transaction around it ends), 'refuse' (raise inside a transaction) or"
            " 'ignore' (free the lock before COMMIT)",
        ),
    ] = "defer"  # fmt: skip
    on_unavailable: Annotated[
        Literal["raise", "run"],
        _choice(
            "raise", "run",
            hint="'raise' (LockBackendError) or 'run' (go on without the lock); 'skip', 'retry' and something to call"
            " are for on_unavailable= of @distributed_lock alone",
        ),
        HAS_KEY,
    ] = "raise"  # fmt: skip
    label: Annotated[str, _label] = ""

    def __init__(self, **given: Any) -> None:
        if unknown := given.keys() - _CHECKS:
            raise TypeError(f"Terms have no {', '.join(map(repr, sorted(unknown)))}.")
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, given.get(name, getattr(Terms, name))))
        if self.slots > 1 and self.reentrant:
            raise ValueError(
                "reentrant=True is for locks with one slot: a holder of one of several slots that asks again gets"
                " another slot. Call the inner code without the lock."
            )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("Terms do not change, because many locks have the same; replace() returns others.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Terms) and self.as_dict() == other.as_dict()

    def __repr__(self) -> str:
        return f"Terms({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    @property
    def has_needless_ttl(self) -> bool:
        return self.renew and self.ttl > NEEDLESS_TTL

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _CHECKS}

    def replace(self, **options: Any) -> Self:
        """Returns other terms, which are checked, too."""
        return type(self)(**{**self.as_dict(), **options})

    __replace__ = replace  # for copy.replace() of Python 3.13

    def elsewhere(self) -> dict[str, Any]:
        """Returns the options for another process, which does not have the callable ``on_lost`` of this one."""
        return {**self.as_dict(), "on_lost": "raise" if callable(self.on_lost) else self.on_lost}


_CHECKS: dict[str, Check] = {name: hint.__metadata__[0] for name, hint in Terms.__annotations__.items()}
OPTION_KEYS = tuple(name.upper() for name, hint in Terms.__annotations__.items() if HAS_KEY in hint.__metadata__)


class CommonOptions(TypedDict, total=False):
    """Keywords of ``lock()`` and ``@distributed_lock``, as type checkers need them: the fields of ``Terms``.

    An option that is not given comes from the settings of the alias.
    """

    ttl: float | timedelta
    wait: float | timedelta | None
    max_waiters: int | None
    renew: bool
    max_hold: float | timedelta | None
    min_hold: float | timedelta
    reentrant: bool
    on_lost: Literal["raise", "log"] | Callable[[LockLost], object]
    in_atomic: Literal["defer", "refuse", "ignore"]
    label: str


class LockOptions(CommonOptions, total=False):
    """Keywords of ``lock()``. The decorator has more values for ``on_unavailable``."""

    slots: int
    on_unavailable: Literal["raise", "run"]


class CallOptions(CommonOptions, total=False):
    """Keywords of ``@distributed_lock``, except those that only the decorator has."""

    slots: int | Callable[..., int]


class Options:
    """Options as given, and the terms that they make with the defaults of an alias.

    ``own``: the terms with the defaults of the package; for options for which an alias has no key.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        for option in given:
            if option not in _CHECKS:
                hint = other_words.OPTIONS.get(option) or f"The options are {', '.join(_CHECKS)}, using."
                raise TypeError(f"A lock has no option {option!r}: {hint}")
        self.own = Terms(**given)  # also raises for a bad value where it is written, not where it is first used
        if self.own.has_needless_ttl:
            logger.warning(
                "%s Is ttl=%g meant to be seconds?", NEEDLESS, self.own.ttl, extra=about_event("ttl-needless")
            )
        self.given = given
        self._last: tuple[Terms, Terms] | None = None

    def terms(self, defaults: Terms) -> Terms:
        last = self._last  # read once: another thread may set it meanwhile
        if last is None or last[0] is not defaults:
            self._last = last = defaults, defaults.replace(**self.given)
        return last[1]


DEFAULTS = Options({})

# Cached, because a program has few different sets of options and asks for locks often. Typed, because 1 == True.
_settled = lru_cache(maxsize=256, typed=True)(lambda **given: Options(given))


def settled(**given: Any) -> Options:
    """Returns the ``Options``. Raises TypeError for an unknown option, ValueError for a value out of range."""
    try:
        return _settled(**given)
    except TypeError:  # also for a value that cannot be hashed; the error of its option says more
        pass
    return Options(given)  # outside the handler, because there Python would show two errors, one during the other


def seconds_to_wait(blocking: bool, timeout: float | timedelta) -> float:
    """Returns the seconds to wait. The arguments of ``acquire()`` follow the rules of ``threading.Lock``.

    ``timeout``: seconds, or a timedelta.
    """
    seconds: float = as_seconds(timeout)
    if not blocking:
        if seconds != -1:
            raise ValueError("A lock that does not block takes no timeout.")
        return 0.0
    if not seconds >= 0:  # which refuses NaN, too
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds to wait, or -1 for the lock's own wait.")
    if seconds > threading.TIMEOUT_MAX:
        raise OverflowError(f"timeout is {timeout!r}, longer than threading.TIMEOUT_MAX.")
    return seconds
