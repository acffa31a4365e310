"""Makes the name of a lock from a template and values. Equal names are one lock; different values give other names."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from string import Formatter
from typing import Any

from .exceptions import InvalidLockName, UnusableLockName
from .utils.events import about_event

LONGEST_VERBATIM = 200  # characters; a longer name keeps its beginning and gets a hash for the rest
LONGEST_ACCEPTED = 10_000
_KEPT = 160
_SHORTENED = rf"(?s).{{{_KEPT}}}~[0-9a-f]{{64}}"

OWN = "django_distlock."  # the beginning of the names of the package's own locks, in which it remembers something

_UNFILLED = r"\{(?:(?:\d+|[^\W\d]\w*)(?:[.\[!:][^{}]*)?)?\}"

_ALWAYS_ESCAPED = "%:{}"
_DELIMITERS = ":{}"  # never in an escaped value, so they show where it ends
_PLAIN = (str, int)  # the types of most values; their text always identifies the value
_IN_ESCAPES = "%0123456789ABCDEF"  # "%XX" is written with these, so they do not show where a value ends

logger = logging.getLogger("django_distlock")


def check_name(name: object, *, own: bool = False) -> str:
    """Return the name as stores know it. ``own``: the name of one of the package's own locks is allowed, too.

    Any text is a valid name, except the names of the package's own locks. In a name of more than 200 characters, the
    SHA-256 of the whole replaces the tail. The result is still longer than 200 characters, so no name equals the short
    form of another.

    Raises InvalidLockName for a value that is not a str, is empty, has more than 10,000 characters (a document passed
    by mistake), begins with "django_distlock.", or cannot be written as UTF-8.
    """
    if not isinstance(name, str):
        raise InvalidLockName(
            f"The name of a lock is a str, not {type(name).__name__}."
            ' Write it out, for example lock("order:{}", order.pk).'
        )
    if not name:
        raise UnusableLockName("The name of a lock is empty. Give it a name that says what it guards.")
    if name.startswith(OWN) and not own:
        raise UnusableLockName(
            f"The name {name[:60]!r} begins with {OWN!r}, as those of the locks by which this package remembers"
            " something. Let it begin with something else."
        )
    if len(name) > LONGEST_ACCEPTED:
        raise _too_long(name)
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise UnusableLockName(
            f"The name {name[:60]!r} cannot be written as UTF-8: {error.reason} at position {error.start}."
        ) from error
    if len(name) <= LONGEST_VERBATIM:
        return name
    return f"{name[:_KEPT]}~{hashlib.sha256(encoded).hexdigest()}"


def _fixed_name(name: object) -> str:
    checked, text = check_name(name), str(name)
    if "{" in text and (field := _unfilled_field(text)) and not _ends_in_json(text):
        raise InvalidLockName(
            f"The name {text[:60]!r} has the field {field!r}, and no value for it. All calls would share one lock."
            ' Give the values: lock("order:{}", pk) is the lock of @distributed_lock("order:{pk}"). Or write an'
            " f-string."
        )
    return checked


def _unfilled_field(text: str) -> str | None:
    """Returns the first field that is not inside other braces."""
    depth = end = 0
    for field in re.finditer(_UNFILLED, text):
        depth += text.count("{", end, field.start()) - text.count("}", end, field.start())
        if depth <= 0:
            return field[0]
        end = field.end()
    return None


def _ends_in_json(text: str) -> bool:
    """Returns whether everything from the first bracket on is JSON. ``{}`` alone does not count."""
    value = re.sub(r"^[^{\[]*", "", text)
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return value.strip() != "{}"


_fixed = lru_cache(maxsize=1024)(_fixed_name)


def fixed_name(name: str) -> str:
    """Returns ``check_name()`` of a name without values, from a cache, because the same names are asked for often.

    Raises InvalidLockName also for a field such as ``{pk}``, because nothing fills it. Other braces are text, as in
    JSON.
    """
    return _fixed(name) if type(name) is str else _fixed_name(name)


def own_name(template: str, *values: object) -> str:
    """Returns the name of one of the package's own locks. ``values`` fill the template's fields."""
    parsed = parse(template)
    return check_name(OWN + parsed.fill(parsed.by_position(values)), own=True)


def _too_long(text: str) -> UnusableLockName:
    return UnusableLockName(
        f"The name of a lock is too long: {len(text):,} characters, at most {LONGEST_ACCEPTED:,} are accepted."
        f" It begins with {text[:60]!r}. Name the lock by an id or by a hash of the content."
    )


def stored_name(text: str, *, own: bool = True) -> str:
    """Returns the same as ``check_name()``, and accepts its results, too: for names that people copy from a list.

    Raises InvalidLockName.
    """
    if re.fullmatch(_SHORTENED, text) and (own or not text.startswith(OWN)):
        return text
    return check_name(text, own=own)


def render(template: str, values: tuple[object, ...]) -> str:
    """Fill ``{}`` or ``{0}`` fields by position. Without values, the text itself is the name."""
    if not values or not isinstance(template, str):
        return fixed_name(template)
    parsed = parse(template)
    return check_name(parsed.fill(parsed.by_position(values)))


@lru_cache(maxsize=512)
def parse(template: str) -> Template:
    """Parse a template once. Raises InvalidLockName if no values could make a safe name of it."""
    return Template(template)


def template_of(text: str) -> str:
    """Returns the ``Template.normalized`` of the text; "" for a text without fields."""
    template = parse(text)
    return template.normalized if template.arguments else ""


class Template:
    """A text with ``{fields}``.

    A value is written as its ``str()``, with ``%``, ``:``, ``{`` and ``}`` percent-encoded. If the text between two
    fields has none of these, its first usable character is encoded, too. So the end of every value is known, and values
    with different ``str()`` give different names.

    ``normalized``: the template without the names of its fields: ``order:{}``. It is the same for all templates that
    make the same names from the same values.
    """

    _has_told_of_none = False

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[tuple[str, str]] = []  # literal text, then the field behind it ("" at the end)
        try:
            pieces = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidLockName(f"The template {text!r} cannot be read: {error}.") from error
        for literal, field, spec, conversion in pieces:
            if field is None:
                self.parts.append((literal, ""))
                continue
            if spec or conversion:
                raise InvalidLockName(
                    f"The template {text!r} formats the field {field!r}. Fields take no format spec and no"
                    " conversion; pass a callable as the name to compute it."
                )
            self.parts.append((literal, self._numbered(field)))
        # "{{" and "}}" make the parser yield a literal in pieces; the text before a field is all of its pieces.
        self._escaped = _ALWAYS_ESCAPED + "".join(self._separators())
        self._escape = re.compile(f"[{re.escape(self._escaped)}]")
        self.arguments: tuple[str, ...] = tuple(_argument_of(field) for _, field in self.parts if field)
        self.positions = sorted(set(self.arguments), key=lambda name: (len(name), name))
        self.is_by_position = self.positions == [str(position) for position in range(len(self.positions))]
        self._lookups = {field: _lookup(field) for _, field in self.parts if field}
        self.normalized = "".join(_doubled(literal) + ("{}" if field else "") for literal, field in self.parts)

    def _numbered(self, field: str) -> str:
        if re.match(r"$|[.\[]", field):
            return f"{sum(bool(known) for _, known in self.parts)}{field}"
        return field

    def _separators(self) -> Iterator[str]:
        between: str | None = None  # text since the last field; None before the first
        for literal, field in self.parts:
            if between is not None:
                between += literal
            if not field:
                continue
            if between == "":
                raise InvalidLockName(
                    f"The template {self.text!r} has adjacent fields, so that different values could give one"
                    ' name. Put a text between them, for example "{a}:{b}".'
                )
            if between and not set(between) & set(_DELIMITERS):
                usable = [character for character in between if character not in _IN_ESCAPES]
                if not usable:
                    raise InvalidLockName(
                        f"The template {self.text!r} separates fields by {between!r} alone, which values may"
                        ' contain. Separate them by ":".'
                    )
                yield usable[0]
            between = ""

    def by_position(self, values: tuple[object, ...]) -> Mapping[str, object]:
        """Returns the values by the numbers of their fields. Raises InvalidLockName if they do not fill them."""
        if self.is_by_position and len(values) == len(self.positions):
            return dict(zip(self.positions, values, strict=True))
        if named := [name for name in self.arguments if not name.isdecimal()]:
            raise InvalidLockName(
                f"The template {self.text!r} asks for {named[0]!r}; lock() fills fields by position:"
                ' lock("order:{}", pk).'
            )
        raise InvalidLockName(
            f"The template {self.text!r} has {len(self.positions)} field(s) and was given {len(values)} value(s)."
            " Each value needs a field of its own."
        )

    def fill(self, arguments: Mapping[str, object]) -> str:
        """Returns the template filled with its values. Raises InvalidLockName for a value that identifies nothing."""
        name = []
        for literal, field in self.parts:
            name.append(literal)
            if field:
                value = self._text_of(field, arguments)
                if len(value) > LONGEST_ACCEPTED:  # before the work of escaping it
                    raise _too_long(value)
                is_number = value.isdecimal() and value.isascii()  # most are; no digit is ever escaped
                name.append(value if is_number else self._escape.sub(_percent, value))
        return "".join(name)

    def _text_of(self, field: str, arguments: Mapping[str, object]) -> str:
        try:
            value = self._lookups[field](arguments)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            if _argument_of(field) not in arguments:
                reason = f"this call has only {', '.join(arguments)}" if arguments else "this call has no arguments"
            raise InvalidLockName(
                f"The template {self.text!r} asks for {field!r}, which cannot be read: {reason}."
            ) from error
        try:
            return str(value if type(value) in _PLAIN else self._usable(field, value, arguments))
        except InvalidLockName:
            raise
        except ValueError as error:  # an int with more digits than Python converts to text
            raise UnusableLockName(
                f"The template {self.text!r} was given a value for {field!r} that has no text: {error}."
            ) from error

    def _usable(self, field: str, value: Any, arguments: Mapping[str, object]) -> Any:
        if value is None:
            self._tell_of_none(field, arguments)
        return self._ordered(field, value, is_inside=False)

    def _tell_of_none(self, field: str, arguments: Mapping[str, object]) -> None:
        """Refuse the primary key of an object that has none yet. For any other None, log once to ask if it is meant."""
        path, _, attribute = field.rpartition(".")
        meta = getattr(_lookup(path)(arguments), "_meta", None) if path else None
        if (key := getattr(meta, "pk", None)) and attribute in ("pk", key.name, key.attname):
            raise InvalidLockName(
                f"The template {self.text!r} was given an object of {meta} for {field!r} that is not saved and has no"
                " primary key yet. All such objects would share one lock. Save it first."
            )
        if not self._has_told_of_none:
            self._has_told_of_none = True
            logger.warning(
                "The template %r was given None for %r, so that it is one lock for all that have none, such as objects"
                " that are not saved, or visitors who are not logged in. If that is meant, give it a text instead.",
                self.text, field, extra=about_event("value-none", template=self.normalized),
            )  # fmt: skip

    def _check(self, field: str, value: Any, *, is_inside: bool) -> None:
        if hasattr(value, "_meta") and hasattr(value, "pk"):
            raise InvalidLockName(
                f"The template {self.text!r} was given a model instance for {field!r}; its text may change and"
                f" is no key. Use its primary key: {{{field}.pk}} in a decorator, or pass its .pk to lock()."
            )
        if callable(value):
            raise InvalidLockName(
                f"The template {self.text!r} was given something to call for {field!r}; templates call nothing."
                " Pass its result, or compute the name by a callable."
            )
        if isinstance(value, set | frozenset):
            raise InvalidLockName(
                f"The template {self.text!r} was given a set for {field!r}, whose text has another order in each"
                " process. Sort it."
            )
        kind: Any = type(value)
        if kind.__repr__ is object.__repr__ and (is_inside or kind.__str__ is object.__str__):
            raise InvalidLockName(
                f"The template {self.text!r} was given a {kind.__name__!r} for {field!r}, whose text is an address in"
                " memory and differs between processes. Use an attribute that identifies it."
            )

    def _ordered(self, field: str, value: Any, *, is_inside: bool = True) -> Any:
        """Returns the value with the keys of each dict sorted, also inside lists, so that equal dicts get one text. The
        order of an OrderedDict is part of its value and stays. Inner values are refused for the same reasons as values.
        """
        self._check(field, value, is_inside=is_inside)
        kind: Any = type(value)
        if isinstance(value, dict) and kind.__str__ is object.__str__:
            keys = list(dict.keys(value)) if isinstance(value, OrderedDict) else sorted(dict.keys(value), key=repr)
            for key in keys:
                self._ordered(field, key)
            ordered = {key: self._ordered(field, dict.__getitem__(value, key)) for key in keys}
            return OrderedDict(ordered) if isinstance(value, OrderedDict) else ordered
        if kind in (list, tuple):
            return kind(self._ordered(field, each) for each in value)
        if isinstance(value, tuple) and hasattr(kind, "_make"):
            return kind._make(self._ordered(field, each) for each in value)
        return value


class _Fields(Formatter):
    """Looks up positions like names, so that one mapping fills both kinds of templates."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs[str(key)]


def _doubled(literal: str) -> str:
    """Returns the text as a template writes it: with each brace doubled."""
    return literal.replace("{", "{{").replace("}", "}}")


def _argument_of(field: str) -> str:
    return re.split(r"[.\[]", field)[0]


def _lookup(field: str) -> Callable[[Mapping[str, object]], object]:
    """Returns a function that finds the value of a field like ``string.Formatter``, but parses the field only once."""
    argument = _argument_of(field)
    if argument == field:
        return itemgetter(field)
    if "[" in field or "" in field.split("."):  # an index, or a mistake, for which Formatter has the error
        return lambda arguments: _Fields().get_field(field, (), arguments)[0]
    path = attrgetter(field.removeprefix(f"{argument}."))
    return lambda arguments: path(arguments[argument])


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
