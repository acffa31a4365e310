"""Lists the Python frames of this package that ``with lock("x")`` enters: ``python -m benchmarks.frames``.

It also counts the Python instructions in each module. Other work on the machine does not change these counts.

The lock is a free lock on Redis, with default options, in a warm process: its backend is built, its connection is open,
its scripts are loaded, and its renewing thread runs. Counts differ by version: Python 3.12 and later make no frames for
comprehensions. Compare counts of one version.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Callable
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any, NamedTuple

import django
from django.conf import settings

from example_project.valkey import Valkey

PACKAGE = "django_distlock"
WARM_UP = 100  # acquisitions
ROUNDS = 5  # the shortest counts: sometimes a round has more to do, for example to wake the renewing thread earlier


class Entered(NamedTuple):
    """A frame that was entered. ``goes_on``: it is a generator that had begun before."""

    module: str
    function: str
    depth: int
    goes_on: bool


class Frames:
    """The frames of the package that the calling thread enters in ``with Frames() as frames``."""

    def __init__(self) -> None:
        self.entered: list[Entered] = []
        self._kept: list[FrameType] = []  # so that no two frames have the same id
        self._begun: set[int] = set()

    def __enter__(self) -> Frames:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _is_ours(frame):
            return
        goes_on = bool(frame.f_code.co_flags & CO_GENERATOR) and id(frame) in self._begun
        self._begun.add(id(frame))
        self._kept.append(frame)
        name = frame.f_code.co_qualname.removeprefix("__create_fn__.<locals>.")
        self.entered.append(Entered(_module(frame), name, self._depth(frame), goes_on))

    @staticmethod
    def _depth(frame: FrameType) -> int:
        depth, caller = 0, frame.f_back
        while caller:
            depth, caller = depth + _is_ours(caller), caller.f_back
        return depth


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(frame: FrameType) -> bool:
    """Returns whether the frame is of this package. Methods that dataclasses generate belong to their class' module."""
    return f"{_module(frame)}.".startswith(f"{PACKAGE}.")


def of_a_free_lock() -> tuple[list[Entered], Counter[str]]:
    """Returns the frames, and the instructions by module."""
    from django_distlock import lock

    def once() -> None:
        with lock("x"):
            pass

    for _ in range(WARM_UP):
        once()
    entered = min((_entered(once) for _ in range(ROUNDS)), key=len)
    return entered, min((_instructions(once) for _ in range(ROUNDS)), key=Counter.total)


def _instructions(call: Callable[[], None]) -> Counter[str]:
    counted: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted[_module(frame)] += event == "opcode"
        return count

    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(None)
    return counted


def _entered(call: Callable[[], None]) -> list[Entered]:
    with Frames() as frames:
        call()
    return frames.entered


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.frames", description=__doc__.replace("``", ""))
    parser.add_argument("--url", help="of a server that runs already; else a private one")
    options = parser.parse_args()
    if options.url:
        _print(options.url)
        return
    with Valkey() as server:
        _print(server.url)


def _print(url: str) -> None:
    backend = "django_distlock.backends.redis.RedisBackend"
    settings.configure(DISTRIBUTED_LOCKS={"default": {"BACKEND": backend, "LOCATION": url}}, LOGGING_CONFIG=None)
    django.setup()
    entered, instructions = of_a_free_lock()
    for one in entered:
        module, mark = one.module.removeprefix(f"{PACKAGE}."), "  (goes on)" if one.goes_on else ""
        print(f"{'  ' * one.depth}{one.function:<{50 - 2 * one.depth}} {module}{mark}")
    modules, go_on = Counter(one.module for one in entered), sum(one.goes_on for one in entered)
    print()
    for module, calls in modules.most_common():
        print(f"{calls:>5} calls, {instructions[module]:>5} instructions  {module.removeprefix(f'{PACKAGE}.')}")
    print(
        f"\nPython {platform.python_version()}: {len(entered)} calls in {len(modules)} modules of {PACKAGE},"
        f" of which {go_on} go on with a generator; {instructions.total()} instructions."
    )


if __name__ == "__main__":
    main()
