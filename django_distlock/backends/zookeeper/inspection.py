"""Questions to the servers about a lock, and the reading of their answers. Generators without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from ...types import Holder, LockInfo, LockRequest, lock_key
from ...utils.clock import clock
from ...utils.drive import Call, Steps
from . import requests as ask
from .names import Line, Place, Tree
from .requests import Answers
from .upkeep import Upkeep
from .values import Held, Rest

LISTED = 32  # shards that are listed together
READ = 200  # nodes that are read together


class Subject(NamedTuple):
    """The lock of a question. ``key``: as in the names of nodes."""

    name: str
    prefix: str
    key: str


class FoundRest:
    """A rest in its current state."""

    def __init__(self, rest: Rest, stat: Any, server_time: float) -> None:
        self.rest, self.version = rest, stat.version
        self.remaining = min(rest.length, stat.mtime / 1000 + rest.length - server_time)

    @property
    def is_over(self) -> bool:
        return bool(self.remaining <= 0)


class Inspection:
    """For one backend. ``deadline``: on ``clock()``, for the answers. ``own_prefix``: KEY_PREFIX, if it is a text."""

    def __init__(self, alias: str, tree: Tree, own_prefix: str, upkeep: Upkeep) -> None:
        self._alias, self._tree, self._own_prefix, self._upkeep = alias, tree, own_prefix, upkeep
        self._places, self._client = upkeep.places, upkeep.client

    def _subject(self, request: LockRequest) -> Subject:
        return Subject(request.name, request.prefix, lock_key(self._own_prefix, request.key))

    def ask(self, requests: Sequence[Any], deadline: float) -> Steps[Answers]:
        answers: Answers = yield Call("ask", (requests, deadline))
        return answers

    def _line(self, key: str, deadline: float, *, catches_up: bool = False) -> Steps[Line]:
        """``catches_up``: the server may be another one than before, so it first catches up with the leader."""
        shard = self._tree.shard(key)
        requests = [ask.children(shard)]
        if catches_up:
            requests.insert(0, ask.sync(shard))
        nodes = (yield from self.ask(requests, deadline)).values[-1]
        return Line.of(key, () if isinstance(nodes, NoNodeError) else nodes)

    def _lines(self, keys: Sequence[str], deadline: float) -> Steps[list[Line]]:
        by_shard: dict[str, Sequence[str]] = dict.fromkeys(map(self._tree.shard, keys), ())
        shards = list(by_shard)
        for start in range(0, len(shards), LISTED):
            some = shards[start : start + LISTED]
            answers = yield from self.ask([ask.children(shard) for shard in some], deadline)
            by_shard.update(
                (shard, () if isinstance(nodes, NoNodeError) else nodes)
                for shard, nodes in zip(some, answers.values, strict=True)
            )
        return [Line.of(key, by_shard[self._tree.shard(key)]) for key in keys]

    def _rest(self, key: str, deadline: float) -> Steps[FoundRest | None]:
        path = self._tree.rest(key)
        server_time = yield from self.server_time(deadline)
        [value] = (yield from self.ask([ask.read(path)], deadline)).values
        if isinstance(value, NoNodeError):
            return None
        data, stat = value
        return FoundRest(Rest.from_bytes(data, path), stat, server_time)

    def server_time(self, deadline: float) -> Steps[float]:
        """Unix time by the clock of the servers, which only a change shows."""
        while (now := self._client.server_time) is None:
            [stat] = (yield from self.ask([ask.write(self._tree.root, b"")], deadline)).values
            if isinstance(stat, NoNodeError):
                yield from self.ask([ask.ensure(self._tree.root)], deadline)
            else:
                self.note_server_time(stat.mtime)
        return now

    def note_server_time(self, milliseconds: int) -> None:
        """Note it from an answer that has just come."""
        self._client.note_server_time(milliseconds, clock())

    def _standing(self, about: Subject, line: Line, deadline: float, value: Any = None) -> Steps[LockInfo | None]:
        """The lock as others see it; None if nobody has it by now. ``value``: of the first node, if it is known."""
        rest, first = (yield from self._rest(about.key, deadline)) if line.rests else None, line.first
        if rest and not rest.is_over and not (first and first.token == rest.rest.token):
            return self._of_rest(about, rest)
        if first is None:
            if rest:
                yield from self.ask([ask.delete(self._tree.rest(about.key), rest.version)], deadline)
            return None
        if value is None:
            path = self._tree.place(about.key, first.node)
            [value] = (yield from self.ask([ask.read(path)], deadline)).values
        return None if isinstance(value, NoNodeError) else self._of_holder(about, first, value)

    def _of_holder(self, about: Subject, first: Place, value: tuple[bytes, Any]) -> LockInfo:
        data, stat = value
        held = Held.from_bytes(data, first.node)
        own, session = self._places.get(first.token), self._client.session
        if own and own.is_held:
            remaining = max(0.0, own.until - clock())
        else:  # the time left if its process is gone; until then it is renewed without a change in the store
            remaining = min(held.ttl, session.timeout) if session else held.ttl
        return self._info(about, first.token, held.holder, stat.czxid, remaining)

    def _of_line(self, about: Subject, line: Line, value: Any) -> LockInfo:
        """``value``: of its first node; None: not known."""
        first = line.places[0]
        return self._of_holder(about, first, value) if value else self._info(about, first.token, None, 0, 0.0)

    def _of_rest(self, about: Subject, found: FoundRest) -> LockInfo:
        rest = found.rest
        return self._info(about, rest.token, rest.holder, rest.fence, found.remaining, True)

    def _info(
        self, about: Subject, token: str, holder: Holder | None, fence: int, remaining: float, resting: bool = False
    ) -> LockInfo:
        return LockInfo(about.name, self._alias, holder, fence, remaining, resting, token, prefix=about.prefix)
