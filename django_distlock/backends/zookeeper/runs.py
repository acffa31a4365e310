"""The runs of beat: a persistent node for each entry, moved by compare-and-set of its version."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...exceptions import ClockIsAhead, NewerRun, UnreadableRun
from ...formats import is_newer
from ...runs import LastRun
from ...utils.drive import Steps
from ...utils.events import about_event
from . import requests as ask
from .inspection import READ, Inspection
from .names import RUN, Tree, decode
from .requests import Multi, refusal

logger = logging.getLogger("django_distlock")


class FoundRun(NamedTuple):
    """Moments are on the servers' clock. ``since``: when the store first knew the entry."""

    stamp: LastRun
    ttl: float
    since: float
    written_at: float
    version: int

    @classmethod
    def of(cls, value: tuple[bytes, Any], path: str) -> Self:
        """Raises UnreadableRun."""
        data, stat = value
        text, _, ttl = data.decode(errors="replace").partition("\n")
        try:
            return cls(LastRun.from_text(text), float(ttl), stat.ctime / 1000, stat.mtime / 1000, stat.version)
        except ValueError:
            raise (NewerRun if is_newer(data) else UnreadableRun)(f"The node {path}") from None

    def is_over(self, now: float, for_seconds: float = 0.0) -> bool:
        return self.written_at + self.ttl + for_seconds <= now


class Runs:
    """``deadline``: on ``clock()``, for the answers."""

    def __init__(self, tree: Tree, inspection: Inspection) -> None:
        self._tree, self._inspection = tree, inspection
        self._ask = inspection.ask

    def claim(
        self, key: str, seen: LastRun, now: LastRun, ttl: float, grace: float, most_ahead: float, deadline: float
    ) -> Steps[LastRun | None]:
        """See ``claim_run``. Repeatable."""
        path = self._tree.run(key)
        while True:
            server_time = yield from self._inspection.server_time(deadline)
            [value] = (yield from self._ask([ask.read(path)], deadline)).values
            found = None if isinstance(value, NoNodeError) else FoundRun.of(value, path)
            standing = found if found and not found.is_over(server_time) else None
            if standing and not _may_move(standing, seen, now, server_time - grace):
                return standing.stamp
            if now.at - server_time > most_ahead:
                raise ClockIsAhead(now.at - server_time, most_ahead)
            if standing is None:
                if (yield from self._keep(path, found, seen, ttl, deadline)):
                    return seen
            elif _moment(standing.stamp) >= _moment(now):
                return None
            else:
                write = ask.write(path, _data(now, ttl), standing.version)
                [value] = (yield from self._ask([write], deadline)).values
                if not isinstance(value, Exception):
                    self._inspection.note_server_time(value.mtime)
                    return None

    def _keep(self, path: str, expired: FoundRun | None, seen: LastRun, ttl: float, deadline: float) -> Steps[bool]:
        """Store ``seen`` if there is no run, or if it has expired. False if another process came first."""
        changes = [ask.delete(path, expired.version)] if expired else []
        changes.append(ask.create(path, _data(seen, ttl)))
        [results] = (yield from self._ask([Multi(changes)], deadline)).values
        if (refused := refusal(results)) and isinstance(refused[1], NoNodeError) and not expired:
            yield from self._ask([ask.ensure(self._tree.runs)], deadline)
        return refused is None

    def find(self, keys: Sequence[str], deadline: float) -> Steps[list[LastRun | None]]:
        found: list[LastRun | None] = []
        server_time = yield from self._inspection.server_time(deadline)
        for start in range(0, len(keys), READ):
            paths = [self._tree.run(key) for key in keys[start : start + READ]]
            answers = yield from self._ask([ask.read(path) for path in paths], deadline)
            for path, value in zip(paths, answers.values, strict=True):
                run = _run_or_error(value, path)
                found.append(run.stamp if isinstance(run, FoundRun) and not run.is_over(server_time) else None)
        return found

    def forget(self, key: str, deadline: float) -> Steps[bool]:
        [answer] = (yield from self._ask([ask.delete(self._tree.run(key))], deadline)).values
        return not isinstance(answer, NoNodeError)

    def keys(self, deadline: float) -> Steps[list[str]]:
        """The keys of all entries that have a node."""
        [nodes] = (yield from self._ask([ask.children(self._tree.runs)], deadline)).values
        if isinstance(nodes, NoNodeError):
            return []
        return [decode(node.removesuffix(RUN)) for node in nodes if node.endswith(RUN)]

    def page(self, keys: Sequence[str], deadline: float) -> Steps[list[tuple[str, LastRun]]]:
        """The runs of these names that can be read. An error is logged for each of the others."""
        server_time = yield from self._inspection.server_time(deadline)
        paths = [self._tree.run(key) for key in keys]
        answers = yield from self._ask([ask.read(path) for path in paths], deadline)
        found = []
        for key, path, value in zip(keys, paths, answers.values, strict=True):
            run = _run_or_error(value, path)
            if isinstance(run, UnreadableRun):
                logger.error("%s", run, extra=about_event("unreadable"))
            elif run and not run.is_over(server_time):
                found.append((key, run.stamp))
        return found

    def prune(self, key: str, age: float, deadline: float) -> Steps[int]:
        """Delete it if it expired so long ago. Returns how many were deleted."""
        server_time = yield from self._inspection.server_time(deadline)
        path = self._tree.run(key)
        [value] = (yield from self._ask([ask.read(path)], deadline)).values
        run = _run_or_error(value, path)
        if not isinstance(run, FoundRun) or not run.is_over(server_time, age):
            return 0
        [answer] = (yield from self._ask([ask.delete(path, run.version)], deadline)).values
        return int(not isinstance(answer, Exception))


def _may_move(standing: FoundRun, seen: LastRun, now: LastRun, settled_before: float) -> bool:
    is_known = _moment(standing.stamp) <= _moment(seen) or standing.stamp.token == now.token
    return is_known and (standing.since <= settled_before or _moment(now) <= _moment(seen))


def _run_or_error(value: Any, path: str) -> FoundRun | UnreadableRun | None:
    if isinstance(value, NoNodeError):
        return None
    try:
        return FoundRun.of(value, path)
    except UnreadableRun as error:
        return error


def _data(stamp: LastRun, ttl: float) -> bytes:
    return f"{stamp.to_text()}\n{ttl!r}".encode()


def _moment(stamp: LastRun) -> int:
    """Microseconds, by which other stores compare, too."""
    return round(stamp.at * 1_000_000)
