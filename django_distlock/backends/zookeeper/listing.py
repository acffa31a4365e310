"""Many locks at once: for lists, pages and pruning. Generators without I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...types import LockInfo
from ...utils.clock import clock
from ...utils.drive import Steps
from ...utils.events import about_event
from . import requests as ask
from .inspection import READ, FoundRest, Inspection, Subject
from .names import REST, Line
from .requests import Answers
from .values import Rest, Unreadable

logger = logging.getLogger("django_distlock")


class Listing(Inspection):
    """``deadline``: for the first answers. Each later question gets as long again, because there may be many."""

    def ask(self, requests: Sequence[Any], deadline: float) -> Steps[Answers]:
        return (yield from super().ask(requests, max(deadline, clock() + self._client.request_timeout)))

    def look(self, subjects: Sequence[Subject], deadline: float) -> Steps[list[list[LockInfo]]]:
        lines = yield from self._lines([about.key for about in subjects], deadline)
        found: list[list[LockInfo]] = []
        for start in range(0, len(subjects), READ):
            some = list(zip(subjects, lines, strict=True))[start : start + READ]
            firsts = [(about, line.first) for about, line in some if line.first]
            requests = [ask.read(self._tree.place(about.key, first.node)) for about, first in firsts]
            values = iter((yield from self.ask(requests, deadline)).values if requests else ())
            for about, line in some:
                value = next(values) if line.first else None
                try:
                    info = yield from self._seen(about, line, value, deadline)
                except Unreadable as error:
                    logger.error("%s", error, extra=about_event("unreadable", alias=self._alias, name=about.name))
                    info = None
                found.append([info] if info else [])
        return found

    def _seen(self, about: Subject, line: Line, value: Any, deadline: float) -> Steps[LockInfo | None]:
        while True:
            info = yield from self._standing(about, line, deadline, value)
            if info or not line.first:
                return info
            # It was released, and perhaps taken by the next one.
            line, value = (yield from self._line(about.key, deadline)), None

    def count_waiters(self, keys: Sequence[str], deadline: float) -> Steps[list[int | None]]:
        lines = yield from self._lines(keys, deadline)
        return [max(0, len(line.places) - 1) for line in lines]

    def page(self, paths: Sequence[str], deadline: float) -> Steps[list[str]]:
        """The encoded keys in these shards that have a place in line, or a rest.

        Sorted by shard: so a caller that looks at them in this order lists few shards again at a time.
        """
        answers = yield from self.ask([ask.children(path) for path in paths], deadline)
        shards = [nodes for nodes in answers.values if not isinstance(nodes, NoNodeError)]
        return list(dict.fromkeys(node.rpartition("~")[0] for nodes in shards for node in nodes))

    def prune(self, shard: str, age: float, deadline: float) -> Steps[int]:
        """Delete the rests of a shard that ended so many seconds ago. Returns how many."""
        deleted, server_time = 0, (yield from self.server_time(deadline))
        [nodes] = (yield from self.ask([ask.children(shard)], deadline)).values
        rests = [] if isinstance(nodes, NoNodeError) else [node for node in nodes if node.endswith(REST)]
        for node in rests:
            path = f"{shard}/{node}"
            [value] = (yield from self.ask([ask.read(path)], deadline)).values
            if isinstance(value, NoNodeError):
                continue
            try:
                found = FoundRest(Rest.from_bytes(value[0], path), value[1], server_time)
            except Unreadable as error:
                logger.error("%s", error, extra=about_event("unreadable", alias=self._alias))
                continue
            if found.remaining + age <= 0:
                [answer] = (yield from self.ask([ask.delete(path, found.version)], deadline)).values
                deleted += not isinstance(answer, Exception)
        return deleted
