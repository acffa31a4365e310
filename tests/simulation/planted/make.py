"""Makes mutants of the code that the simulated worlds run: the same seed, and the same code, make the same ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from .changes import PACKAGE, ROOT, Change, DoesNotApply, Hunk
from .operators import Edit, PythonEdits, lua_edits


class Share(NamedTuple):
    """So many mutants of those files for a world. ``worlds``: those that run the code."""

    number: int
    worlds: tuple[str, ...]
    files: tuple[str, ...]


def _redis(*names: str) -> tuple[str, ...]:
    return tuple(f"backends/redis/{name}" for name in names)


# Settings, checks, lists for people, messages and runs of beat are left out: no world runs them.
SHARES = {
    "memory": (
        Share(7, ("memory", "redis"), tuple(f"core/{name}.py" for name in (
            "acquire", "adoption", "holds", "known_leases", "lease", "local_queue", "lock", "renewal", "transactions",
        ))),
        Share(3, ("memory", "postgresql"), ("backends/locmem.py", "backends/common/state.py")),
    ),
    "redis": (
        Share(6, ("redis",), (
            *_redis("attempts.py", "backend.py", "client.py", "operations.py", "pubsub.py", "errors.py"),
            "backends/common/attempts.py", "backends/common/wakeup_listener.py", "backends/common/permits.py",
        )),
        Share(4, ("redis",), _redis("scripts/acquire.lua", "scripts/release.lua", "scripts/renew.lua")),
    ),
    "sentinel": (Share(10, ("sentinel",), _redis("sentinel/connection.py", "sentinel/discovery.py")),),
    "quorum": (
        Share(7, ("quorum",), tuple(f"backends/redlock/{name}.py" for name in (
            "aio_connections", "algorithm", "backend", "connections", "messages", "quorum",
        ))),
        Share(3, ("quorum",), tuple(
            f"backends/redlock/scripts/{name}.lua" for name in ("acquire", "release", "renew")
        )),
    ),
    "cluster": (Share(10, ("cluster",), _redis("cluster/client.py", "cluster/routing.py", "cluster/pubsub.py")),),
    "sql": (
        Share(10, ("postgresql", "mariadb"), (*(f"backends/database/{name}.py" for name in (
            "backend", "calls", "errors", "fast_path", "operations", "polling", "sql",
        )), "backends/common/backoff.py")),
    ),
}  # fmt: skip

SKIPPED_FUNCTIONS = re.compile(
    r"__(init|repr|str|len|del|hash|eq)__|check_\w+|_?diagnose|_?check|.*_text|.*_message|_advice\w*|advice|explain|_explain"
    r"|describe\w*|_described|_warn\w*|_log\w*|log_\w+|.*_error|fail|refuse|copy|foreign_value|unreadable"
    r"|a?slots|_?a?list_slots|_slots_of|_pages?|_next_nodes|a?held|a?holders|_holders|found_\w+|_?a?remaining|counted"
    r"|_?a?count(_waiters)?|_?a?prune\w*|.*prun.*|scan|a?runs?_?\w*|_find_runs|find_runs|claim\w*|keyspace|server"
    r"|is_half_plain|of_run|_?reset_after_fork|forget(_run)?|_begin\w*|new_names|commands|pattern|close|aclose|info|_exit"
    r"|take_over|taken_over|opened|_opened|_take_hooks|_run_hooks|_watch_\w+|_drop_leftovers|_listed|page|_page\w*|end_of|_holder|_?assert\w*|depends_on_transactions|wait_for_transactions|_open_transactions|_?is_known|known|final|_complete|_name"
)
SKIPPED_LINES = re.compile(
    r"logger\.|getpid|fork\.|is_copy|_pid\b|check_process|TYPE_CHECKING|warnings\.|super\(\)\.__init__|printable|\.ssl|check_health|disable_decoding|format\(many|nowait|CHANNEL|self\._log\("
)


# What the tests of the suite must notice: so many of each folder.
OF_THE_SUITE = {"core": 18, "backends": 24, "decorators": 9, "celery": 9}


def for_the_suite(seed: int, root: Path = ROOT) -> list[Change]:
    """Mutants of the Python code that no world needs to run."""
    made = []
    for folder, number in OF_THE_SUITE.items():
        files = sorted(path.relative_to(root / PACKAGE).as_posix() for path in (root / PACKAGE / folder).rglob("*.py"))
        drawn = _drawn(f"{seed} {folder} ", Share(number, (), tuple(files)), root)
        made += [Change(f"{folder}/{n:02}", (), (hunk,)) for n, hunk in enumerate(islice(drawn, number), 1)]
    return made


def mutants(
    seed: int, known: dict[tuple[Hunk, ...], Change], root: Path = ROOT, report: Callable[[str], object] = print
) -> list[Change]:
    """As many as ``SHARES`` say; those that are ``unseen`` in ``known`` are listed, but do not count."""
    made = []
    for group, shares in SHARES.items():
        numbers = count(1)
        for index, share in enumerate(shares):
            left = share.number
            drawn = _drawn(f"{seed} {group} {index} ", share, root)
            while left and (hunk := next(drawn, None)):
                was = known.get((hunk,))
                change = Change(f"{group}/{next(numbers):02}", share.worlds, (hunk,))
                if was:
                    change = replace(was, name=change.name, worlds=was.worlds or share.worlds)
                made.append(change)
                left -= not change.unseen
            if left:
                report(f"{group}: {left} mutants are missing")
    return made


def _drawn(seed: str, share: Share, root: Path) -> Iterator[Hunk]:
    """Each kind of mistake in turn, and no second one of a place.

    The order follows from the seed and the text of each, so that a change of the code elsewhere does not alter it.
    """
    by_operator: dict[str, list[tuple[str, Hunk, tuple[str, int]]]] = {}
    for file in share.files:
        source = (root / PACKAGE / file).read_text()
        for edit in edits_of(file, source):
            hunk, place = as_hunk(file, source, edit), (file, source.count("\n", 0, edit.start))
            by_operator.setdefault(edit.operator, []).append((_rank(f"{seed}{hunk}"), hunk, place))
    queues = {operator: iter(sorted(found)) for operator, found in by_operator.items()}
    taken: set[tuple[str, int]] = set()

    def following(queue: Iterator[tuple[str, Hunk, tuple[str, int]]]) -> Hunk | None:
        for _, hunk, place in queue:
            if place not in taken and _is_usable(hunk, root):
                taken.add(place)
                return hunk
        return None

    while queues:
        for operator in sorted(queues, key=lambda operator: _rank(f"{seed}{operator}")):
            if drawn := following(queues[operator]):
                yield drawn
            else:
                del queues[operator]


def _rank(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


def _is_usable(hunk: Hunk, root: Path) -> bool:
    try:
        Change("", (), (hunk,)).check(root)
    except (DoesNotApply, SyntaxError):
        return False
    return True


@cache
def edits_of(file: str, source: str) -> list[Edit]:
    """Several shares have the same file."""
    if file.endswith(".lua"):
        return [*lua_edits(source)]
    return [*PythonEdits(source, SKIPPED_FUNCTIONS, SKIPPED_LINES).all()]


def as_hunk(file: str, source: str, edit: Edit) -> Hunk:
    """With as many lines before it as make the text occur once."""
    start, end = source.rfind("\n", 0, edit.start) + 1, source.find("\n", edit.end) + 1
    while source.count(source[start:end]) > 1 and start > 0:
        start = source.rfind("\n", 0, start - 1) + 1
    return Hunk(file, source[start:end], source[start : edit.start] + edit.text + source[edit.end : end])
