"""``KEY_PREFIX`` as a callable: it answers whose locks the caller means, for example those of a tenant."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from django.utils.module_loading import import_string

from ...exceptions import InvalidLockBackend

LONGEST_PREFIX = 100  # bytes
SHARED = "lock"  # the prefix of keys that belong to no tenant: runs of beat, inboxes, self-tests

DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# A colon ends the prefix in the keys of all stores, so a name under one prefix is never a lock under another one.
REFUSED = ":|{}"


class AskedPrefix:
    """Answers which prefix the locks of the caller have.

    ``setting``: how messages name KEY_PREFIX. ``end``: a text after each answer. ``shared``: the prefix of keys that
    belong to no tenant. An error of the function reaches the caller. Raises InvalidLockBackend for an answer that
    cannot be a prefix.
    """

    def __init__(self, setting: str, function: Callable[[], str], end: str = "") -> None:
        self._setting, self._function, self._end = setting, function, end
        self.shared = f"{SHARED}{end}"
        self._checked = lru_cache(maxsize=1024)(self._check)

    def __call__(self) -> str:
        answer = self._function()
        if not isinstance(answer, str):
            raise self._unusable(answer)
        return self._checked(answer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AskedPrefix) and (self._function, self._end) == (other._function, other._end)

    def __hash__(self) -> int:
        return hash(self._end)  # some callables have no hash

    def __repr__(self) -> str:
        """The same in all processes, because stores are sorted by it."""
        function = self._function
        return f"<AskedPrefix {getattr(function, '__qualname__', type(function).__qualname__)} {self._end}>"

    def _check(self, answer: str) -> str:
        prefix = f"{answer}{self._end}"
        # A printable text can be written as UTF-8.
        fits = answer and prefix.isprintable() and len(prefix.encode()) <= LONGEST_PREFIX
        if not fits or set(prefix) & set(REFUSED):
            raise self._unusable(answer)
        return prefix

    def _unusable(self, answer: object) -> InvalidLockBackend:
        return InvalidLockBackend(
            f"{self._setting} was asked and answered {answer!r:.200}. Let it return the text that keys of the caller's"
            f" locks begin with: of 1 to {LONGEST_PREFIX} bytes, printable, without ':', '|', '{{' and '}}'. Where it"
            " is not known whose locks are asked for, let it raise an error."
        )


class WithEnd(NamedTuple):
    """A callable KEY_PREFIX, or its dotted path, and the text after each answer."""

    given: object
    end: str


def with_end(given: object, end: str) -> object:
    """The KEY_PREFIX with that end."""
    if isinstance(given, WithEnd):
        return WithEnd(given.given, f"{given.end}{end}")
    return WithEnd(given, end) if callable(given) or _is_path(given) else f"{given}{end}"


def read_fixed_prefix(given: object, setting: str, where: str) -> str:
    """A KEY_PREFIX that is not a callable. ``where``: in which names it stands first. Raises InvalidLockBackend."""
    if not isinstance(given, str) or not given or len(given.encode()) > LONGEST_PREFIX:
        raise InvalidLockBackend(
            f"{setting} is {given!r:.200}. It is the text that names of locks begin with in {where}, of 1 to"
            f" {LONGEST_PREFIX} bytes."
        )
    return given


def read_asked_prefix(given: object, setting: str) -> AskedPrefix | None:
    """None if KEY_PREFIX is neither a callable nor the dotted path of one. Raises InvalidLockBackend."""
    given, end = given if isinstance(given, WithEnd) else (given, "")
    if isinstance(given, str) and _is_path(given):
        try:
            found = import_string(given)
        except ImportError as error:
            raise InvalidLockBackend(
                f"{setting} is {given!r:.200}. A text with dots between words is the path of a callable, and this one"
                f" cannot be imported: {error}. A prefix that is meant as it stands has no such dots."
            ) from error
        if not callable(found):
            raise InvalidLockBackend(f"{setting} is {given!r:.200}, which is no callable but {type(found).__name__}.")
        given = found
    return AskedPrefix(setting, given, end) if callable(given) else None


def _is_path(given: object) -> bool:
    return isinstance(given, str) and DOTTED_PATH.fullmatch(given) is not None
