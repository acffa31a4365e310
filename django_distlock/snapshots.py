"""An inventory in the shape of a queryset, as far as Django's admin asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isinf
from typing import Any, ClassVar, cast

from django.core.exceptions import FieldError
from django.db.models import Q, QuerySet

from .inventory import Inventory, Key, Lease, Seen
from .models import HeldLock


class _Query:
    """What the admin wants to know of a query."""

    order_by: ClassVar[tuple[str, ...]] = ()
    select_related = False


# By what rows can be sorted that must be looked at first. A lock without a holder comes first.
ORDERS: dict[str, Callable[[Seen], Any]] = {
    "remaining": lambda seen: seen.free_at,
    "granted_at": lambda seen: seen.info.holder.since if seen.info.holder else 0.0,
    "fence": lambda seen: seen.info.fence,
    "label": lambda seen: seen.info.holder.label if seen.info.holder else "",
    "holder": lambda seen: seen.info.holder.process if seen.info.holder else "",
}


@dataclass(frozen=True)
class HeldLocks:
    """Rows of HeldLock. Counting and paging by name need the names alone; only the rows of a page are looked at.

    Searching, and sorting by anything but name or backend, looks at every lock that the filters leave.
    """

    inventory: Inventory
    ids: frozenset[str] | None = None
    using: str | None = None
    prefix: str = ""
    words: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    window: tuple[int | None, int | None] = (None, None)

    model: ClassVar[type[HeldLock]] = HeldLock
    query: ClassVar[_Query] = _Query()
    ordered: ClassVar[bool] = True
    totally_ordered: ClassVar[bool] = True
    db: ClassVar[str] = "default"

    def all(self) -> HeldLocks:
        return self

    def _clone(self) -> HeldLocks:
        return self

    def select_related(self, *fields: object) -> HeldLocks:
        return self

    def distinct(self) -> HeldLocks:
        return self

    def order_by(self, *fields: str) -> HeldLocks:
        return replace(self, order=fields)

    def search(self, text: str) -> HeldLocks:
        """The locks in whose name, label or holder each word occurs, in small or capital letters."""
        return replace(self, words=(*self.words, *text.casefold().split()))

    def filter(self, *conditions: Q, **lookups: Any) -> HeldLocks:
        """By ``pk``, ``pk__in``, ``using`` and ``name__startswith``; FieldError for another lookup."""
        found = self
        for condition in conditions:
            if condition and (condition.connector != Q.AND or condition.negated):
                raise FieldError("Held locks can be filtered by lookups that all must fit, and by nothing else.")
            for child in cast("list[Q | tuple[str, Any]]", condition.children):
                found = found.filter(child) if isinstance(child, Q) else found._where(*child)
        for lookup, value in lookups.items():
            found = found._where(lookup, value)
        return found

    def _where(self, lookup: str, value: Any) -> HeldLocks:
        match lookup.removesuffix("__exact"):
            case "pk" | "id":
                return self._where("pk__in", [value])
            case "pk__in" | "id__in":
                ids = frozenset(map(str, value))
                return replace(self, ids=ids if self.ids is None else self.ids & ids)
            case "using":
                return replace(self, using=str(value))
            case "name__startswith":
                return replace(self, prefix=str(value))
        raise FieldError(f"Held locks cannot be filtered by {lookup!r}.")

    def get(self, **lookups: Any) -> HeldLock:
        rows = self.filter(**lookups).rows()
        if len(rows) != 1:
            raise HeldLock.DoesNotExist
        return rows[0]

    def count(self) -> int:
        return len(self.keys()) if self.window == (None, None) else len(self.rows())

    def exists(self) -> bool:
        return bool(self.count())

    def __len__(self) -> int:
        return len(self.rows())

    def __iter__(self) -> Iterator[HeldLock]:
        return iter(self.rows())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return replace(self, window=(index.start, index.stop))
        return self.rows()[index]

    def keys(self) -> list[Key]:
        """The locks that fit, in order."""
        found: list[Key] = self._once("keys", self._fitting)
        return found

    def rows(self) -> list[HeldLock]:
        """Those of the window that are still held."""
        found: list[HeldLock] = self._once("rows", self._rows)
        return found

    def as_queryset(self) -> QuerySet[HeldLock]:
        """The rows in a real one, for code that asks for its class."""
        queryset = HeldLock.objects.none()
        queryset._result_cache = self.rows()
        return queryset

    def _once(self, what: str, work: Callable[[], Any]) -> Any:
        """The same question is asked several times for one page, by copies of one object."""
        done = self.inventory.__dict__.setdefault("_answers", {})
        asked = (what, self.ids, self.using, self.prefix, self.words, self.order, self.window)
        if asked not in done:
            done[asked] = work()
        return done[asked]

    def _fitting(self) -> list[Key]:
        keys = self._asked_for()
        if self.using is not None:
            keys = [key for key in keys if key.using == self.using]
        if self.prefix:
            keys = [key for key in keys if key.name.startswith(self.prefix)]
        if self.words:
            keys = [key for key, seen in self.inventory.look(keys).items() if self._is_sought(seen)]
        return self._sorted(keys)

    def _asked_for(self) -> list[Key]:
        if self.ids is None:
            return self.inventory.keys()
        leases = {lease.lock: lease for text in self.ids if (lease := Lease.read(text))}
        seen = self.inventory.look(sorted(leases, key=lambda key: (key.name, key.using)))
        return [key for key, seen in seen.items() if seen.lease == leases[key]]

    def _is_sought(self, seen: Seen) -> bool:
        text = f"{seen.info.name}\n{seen.info.holder or ''}".casefold()
        return all(word in text for word in self.words)

    def _sorted(self, keys: list[Key]) -> list[Key]:
        for field in reversed(self.order):
            name, backwards = field.removeprefix("-"), field.startswith("-")
            if name in ORDERS:
                looked = self.inventory.look(keys)
                order = ORDERS[name]
                keys = sorted(looked, key=lambda key: order(looked[key]), reverse=backwards)
            elif name in ("name", "using"):
                keys = sorted(keys, key=lambda key: getattr(key, name), reverse=backwards)
        return keys

    def _rows(self) -> list[HeldLock]:
        start, stop = self.window
        looked = self.inventory.look(self.keys()[start:stop])
        waiting = self.inventory.count_waiters(list(looked))
        return [
            HeldLock.seen(
                seen.info,
                key=str(seen.lease),
                remaining=None if isinf(seen.remaining) else seen.remaining,
                waiting=waiting[key],
            )
            for key, seen in looked.items()
        ]


def held_for(row: HeldLock) -> float | None:
    """Seconds since the grant, by the clocks of this machine and the holder's."""
    return max(0.0, time.time() - row.granted_at.timestamp()) if row.granted_at else None
