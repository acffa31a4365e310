"""The statements of the package, taken apart, and in the words of SQLite, which evaluates their expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# What SQLite says in other words. Everything else of the package's statements means the same to it.
WORDS = (
    ("CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000000 AS bigint)", "now_us()"),
    ("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))", "now_us()"),
    ("GREATEST(", "MAX("),
    ("strpos(", "instr("),
    ("CAST(%s AS bytea)", "%s"),
    ("SELECT FROM", "SELECT 1 FROM"),
    ("INSERT IGNORE INTO", "INSERT OR IGNORE INTO"),
)
WRITE = re.compile(
    r"(?P<body>(?P<verb>UPDATE|INSERT|DELETE)(?: OR IGNORE)?(?: INTO| FROM)? (?P<table>\w+)(?: AS (?P<alias>\w+))?.*?)"
    r"(?: RETURNING (?P<returning>.*))?",
    re.DOTALL,
)


@dataclass
class Part:
    """A query, or a change; of a statement with WITH one of several. ``name``: by which later ones know its rows."""

    name: str
    text: str
    parameters: Sequence[Any] = field(repr=False)
    verb: str = "SELECT"
    table: str = ""
    body: str = ""  # without RETURNING
    returning: str = ""
    alias: str = ""

    def __post_init__(self) -> None:
        if found := WRITE.fullmatch(self.text):
            self.verb, self.table, self.body = found["verb"], found["table"], found["body"]
            self.alias = found["alias"] or found["table"]
            self.returning = (found["returning"] or "").replace(
                f"{self.alias}.", ""
            )  # which SQLite does not know there

    @property
    def is_write(self) -> bool:
        return self.verb != "SELECT"

    def of_row(self) -> str:
        """The change of one row alone, whose name is one more parameter, and whatever RETURNING says of it."""
        where = "" if self.verb == "INSERT" else f" AND {self.alias}.name = ?"
        return f"{self.body}{where} RETURNING {self.returning or '1'}"


def parts(sql: str, parameters: Sequence[Any]) -> list[Part]:
    for theirs, ours in WORDS:
        sql = sql.replace(theirs, ours)
    found, left = [], list(parameters)
    for name, text in _named_parts(sql):
        number = text.count("%s")
        found.append(Part(name, text.replace("%s", "?"), left[:number]))
        del left[:number]
    return found


def _named_parts(sql: str) -> Iterator[tuple[str, str]]:
    if not sql.startswith("WITH "):
        yield "", sql
        return
    rest = sql.removeprefix("WITH ")
    while begin := re.match(r"(\w+) AS \(", rest):
        end = _closing(rest, begin.end())
        yield begin[1], rest[begin.end() : end]
        rest = rest[end + 1 :].lstrip(", ")
    yield "", rest


def _closing(text: str, position: int) -> int:
    """Where the parenthesis ends that was opened before."""
    depth = 1
    while True:
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
        position += 1
