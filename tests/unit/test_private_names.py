"""Tests use what is public. The exceptions are listed here, so that nobody adds one unseen, and none is left behind."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import django_distlock
from tests.support.programs import ROOT

PRIVATE = re.compile(r"_[a-z]\w*")
MAY_BE_FOREIGN = re.compile(rf"(?<!self\.)(?<!cls\.)(?<!def )\b{PRIVATE.pattern}")
PATCHES = ("setattr", "delattr", "getattr", "hasattr")
SYSTEM = {"atexit", "os", "sys"}  # which programs in strings have from those that are put before them
OTHERS = "unit/test_private_names_of_others.py"  # whose names may be the same
NAMED_TUPLES = {"_replace"}  # public, says Python

EXCEPTIONS = [
    # file, below tests/ | names, as often as they stand there | why nothing public does
    ("support/inside.py", "_client _listener _nodes", "parts of a backend, which tests drive by their public methods"),
    (
        "support/inside.py",
        "_async_clients _calls _filling _lines _waiters _watchdog",
        "nothing is left inside: connections of a loop, sets that wait for some, waiters, whom to wake, calls to end",
    ),
    ("support/inside.py", "_opened", "a session is ended from elsewhere"),
    ("support/inside.py", "_permits _breaker", "all connections are in use, of a server that is silent"),
    ("support/inside.py", "_runs", "a store in memory has lost its data"),
    ("support/inside.py", "_schedule_store _tick_at", "what a beat knows of the runs; its look at the schedule is due"),
    ("support/inside.py", "_broker", "a beat has lost its broker"),
    ("support/inside.py", "_set_up_session", "a pooler that is not recognised"),
    ("support/inside.py", "_mark_lost", "a lease is dropped, and its holder is not told yet"),
    ("support/inside.py", "_order", "no sentinel is missing for others while one is moved to the end"),
    ("support/inside.py", "_renewers", "the exit of a test process does not wait for stores that are gone"),
    ("support/inside.py", "_watchers", "who waits for the end of a lease"),
    ("support/history.py", "_extend _mark_released", "the journal notes each step of a lease at its moment"),
    (
        "simulation/engine/package.py",
        "_worker _worker _reset_after_fork",
        "the thread that sends signals has died with its simulated process",
    ),
    (
        "simulation/engine/package.py",
        "_functions _methods _renewers _services _services",
        "what all simulated processes share, of which a child begins anew with its own alone",
    ),
    ("core/test_renewal.py", "_guard _guard", "another thread ends a lease a moment before the renewer takes it in"),
    ("celery/test_beat.py", "_heap", "of Celery's Scheduler, which counts its entries anew without it"),
    ("celery/test_beat_database.py", "_heap", "the same"),
    ("backends/database/test_backend.py", "_receive", "a pooler passes on the subscription and no notification"),
]


def names_of_package() -> set[str]:
    """Private attributes, methods and variables that the package defines."""
    found = set()
    for path in Path(django_distlock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
    return {name for name in found if PRIVATE.fullmatch(name)} - NAMED_TUPLES


def accesses(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Private names of the package: attributes of others than ``self`` and ``cls``, patches, and imports."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    strangers = {
        alias.asname or alias.name.partition(".")[0] for node in imports if not is_own(node) for alias in node.names
    } | SYSTEM
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if name in names and root_of(value) not in strangers:
                if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    yield name
            case ast.Call(func=ast.Attribute(attr=function) | ast.Name(id=function), args=[of, *rest]) if (
                function in PATCHES
            ):
                for argument in (of, *rest[:1]):
                    name = argument.value.split(".")[-1] if is_text(argument) else ""
                    if name in names and root_of(of) not in strangers:
                        yield name
            case ast.ImportFrom() if is_own(node):
                yield from (alias.name for alias in node.names if alias.name in names)
            case ast.Constant(value=str(text)) if "._" in text:
                yield from accesses(program_of(text), names)


def program_of(text: str) -> ast.Module:
    """Of a string that is run in another process; of others it is empty. A single name, with its dots, is none."""
    try:
        program = ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return ast.Module([], [])
    return ast.Module([one for one in program.body if not isinstance(getattr(one, "value", None), ast.Attribute)], [])


def is_own(node: ast.Import | ast.ImportFrom) -> bool:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
    return module.startswith(("django_distlock", "tests"))


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def root_of(node: ast.expr) -> str:
    """The name with which an expression begins."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.seconds(4)
def test_private_names_are_used_as_listed():
    names, tests = names_of_package(), ROOT / "tests"
    used: Counter[tuple[str, str]] = Counter()
    for path in sorted({*tests.rglob("*.py")} - {tests / OTHERS}):
        text = path.read_text(encoding="utf-8")
        if not names.isdisjoint(MAY_BE_FOREIGN.findall(text)):  # to parse all takes seconds
            used.update((path.relative_to(tests).as_posix(), name) for name in accesses(ast.parse(text), names))
    listed = Counter((path, name) for path, those, _ in EXCEPTIONS for name in those.split())
    assert [*(used - listed).elements()] == [], "use what is public, or list it with its reason"
    assert [*(listed - used).elements()] == [], "take it from the list"
