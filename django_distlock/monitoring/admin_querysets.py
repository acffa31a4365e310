"""Querysets over an inventory, with what Django's admin needs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isinf
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from django.core.exceptions import FieldError
from django.db.models import Model, Q
from django.utils.text import capfirst

from ..celery.schedule_store import RunInfo
from ..models import BeatRun, HeldLock
from ..types import Holder
from ..utils.text import printable
from .inventory import Inventory, Key, LeaseKey, SlotKey, prefix_of


class _Query:
    """The attributes of a query that the admin reads."""

    order_by: ClassVar[tuple[str, ...]] = ()
    select_related = False


M = TypeVar("M", bound=Model)
K = TypeVar("K", Key, SlotKey)  # the key of a row


@dataclass(frozen=True)
class InventoryQuerySet(Generic[M, K]):
    """Rows of a model without a table, from an inventory."""

    inventory: Inventory
    ids: frozenset[str] | None = None
    using: str | None = None
    words: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    window: tuple[int | None, int | None] = (None, None)

    model: ClassVar[type[Model]]
    query: ClassVar[_Query] = _Query()
    ordered: ClassVar[bool] = True
    totally_ordered: ClassVar[bool] = True
    db: ClassVar[str] = "default"

    def all(self) -> Self:
        return self

    def _clone(self) -> Self:
        return self

    def select_related(self, *fields: object) -> Self:
        return self

    def distinct(self) -> Self:
        return self

    def order_by(self, *fields: str) -> Self:
        return replace(self, order=fields)

    def search(self, text: str) -> Self:
        """Returns the rows whose texts contain each word, in upper or lower case."""
        return replace(self, words=(*self.words, *text.casefold().split()))

    def filter(self, *conditions: Q, **lookups: Any) -> Self:
        """Returns the rows that match all lookups of ``_where``. Raises FieldError for another lookup."""
        found = self
        for condition in conditions:
            if condition and (condition.connector != Q.AND or condition.negated):
                raise FieldError(f"{self._plural} can be filtered by lookups that all must fit, and by nothing else.")
            for child in cast("list[Q | tuple[str, Any]]", condition.children):
                found = found.filter(child) if isinstance(child, Q) else found._where(*child)
        for lookup, value in lookups.items():
            found = found._where(lookup, value)  # noqa: SLF001 - a copy
        return found

    def _where(self, lookup: str, value: Any) -> Self:
        match lookup.removesuffix("__exact"):
            case "pk" | "id":
                return self._where("pk__in", [value])
            case "pk__in" | "id__in":
                ids = frozenset(map(str, value))
                return replace(self, ids=ids if self.ids is None else self.ids & ids)
            case "using":
                return replace(self, using=str(value))
        raise FieldError(f"{self._plural} cannot be filtered by {lookup!r}.")

    @property
    def _plural(self) -> str:
        return capfirst(str(self.model._meta.verbose_name_plural))

    def get(self, **lookups: Any) -> M:
        rows = self.filter(**lookups).rows()
        if len(rows) != 1:
            raise self.model.DoesNotExist
        return rows[0]

    def count(self) -> int:
        return len(self.keys()) if self.window == (None, None) else len(self.rows())

    def exists(self) -> bool:
        return bool(self.count())

    def __len__(self) -> int:
        return len(self.rows())

    def __iter__(self) -> Iterator[M]:
        return iter(self.rows())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return replace(self, window=(index.start, index.stop))
        return self.rows()[index]

    def keys(self) -> Sequence[K]:
        """Returns the keys that match, in order."""
        every = replace(self, window=(None, None))
        found: Sequence[K] = every._once("keys", lambda: self._sorted(self._fitting()))  # noqa: SLF001 - a copy
        return found

    def rows(self) -> list[M]:
        """Returns the rows of the window that still exist."""
        found: list[M] = self._once("rows", lambda: self._rows(self.keys()[slice(*self.window)]))
        return found

    def _once(self, what: str, work: Callable[[], Any]) -> Any:
        """Returns the result of the work from a cache: for one page, copies of one object need it several times."""
        cache = self.inventory.__dict__.setdefault("_results", {})
        query = (what, type(self), *(getattr(self, field.name) for field in fields(self) if field.name != "inventory"))
        if query not in cache:
            cache[query] = work()
        return cache[query]

    def _fits(self, text: str) -> bool:
        folded = text.casefold()
        return all(word in folded for word in self.words)

    def _sorted(self, keys: Sequence[K]) -> Sequence[K]:
        fields = [field for field in self.order if field.lstrip("-") not in ("pk", "id")]  # added for a total order
        natural = list(cast("Sequence[str]", self.model._meta.ordering))
        if fields[-len(natural) :] == natural:  # the keys come in this order
            del fields[-len(natural) :]
        for field in reversed(fields):
            if order := self._order_by(field.removeprefix("-"), keys):
                keys = sorted(order, key=order.__getitem__, reverse=field.startswith("-"))
        return keys

    def _fitting(self) -> Sequence[K]:
        raise NotImplementedError

    def _order_by(self, field: str, keys: Sequence[K]) -> dict[K, Any]:
        """Returns the value by which each key is sorted; empty if rows cannot be sorted by that field."""
        raise NotImplementedError

    def _rows(self, keys: Sequence[K]) -> list[M]:
        raise NotImplementedError


# The values of holders by which leases can be sorted. A lease without a holder comes first, with a held time of zero.
HOLDER_VALUES: dict[str, Callable[[SlotKey, Holder | None], Any]] = {
    "granted_at": lambda key, holder: holder.since if holder else 0.0,
    "held_for": lambda key, holder: -holder.since if holder else -inf,
    "label": lambda key, holder: holder.label if holder else "",
    "holder": lambda key, holder: holder.process if holder else "",
}


@dataclass(frozen=True)
class HeldLocks(InventoryQuerySet[HeldLock, SlotKey]):
    """Rows of HeldLock. Counting and paging by name need only the slots; only the rows of a page are looked up.

    To search, or to sort by anything except name or backend, it looks up every lease that passes the filters. A search
    reads names, labels and holders.
    """

    prefix: str = ""
    prefixes: frozenset[tuple[str, str]] | None = None
    hosts: frozenset[str] | None = None

    model = HeldLock

    def _where(self, lookup: str, value: Any) -> Self:
        """Filters by ``pk``, ``pk__in``, ``using``, ``name__startswith``, ``host__in`` and ``prefix__in``.

        ``host__in`` is about holders. ``prefix__in`` has pairs of an alias and a prefix.
        """
        match lookup:
            case "name__startswith":
                return replace(self, prefix=str(value))
            case "prefix__in":
                return replace(self, prefixes=frozenset(value))
            case "host__in":
                return replace(self, hosts=frozenset(map(str, value)))
        return super()._where(lookup, value)

    def _fitting(self) -> Sequence[SlotKey]:
        if self.ids is None:
            keys: Sequence[SlotKey] = self.inventory.keys().only(self.using, self.prefix)
        else:
            keys = [key for key in self._selected(self.ids) if self.using in (None, key.using)]
            keys = [key for key in keys if key.name.startswith(self.prefix)]
        if self.prefixes is not None:
            keys = [key for key in keys if (key.using, prefix_of(key.name)) in self.prefixes]
        if self.hosts is not None:
            is_there = self.inventory.map_holders(keys, lambda key, holder: self._is_of_hosts(holder))
            keys = [key for key in keys if is_there.get(key)]
        return self._with_words(keys) if self.words else keys

    def _with_words(self, keys: Sequence[SlotKey]) -> list[SlotKey]:
        """Returns the keys with all words in the name or the holder. Looks up the holder only if the name lacks one."""
        by_name = {key for key in keys if self._fits(key.name)}
        others = [key for key in keys if key not in by_name]
        by_holder = self.inventory.map_holders(others, self._fits_holder)
        return [key for key in keys if key in by_name or by_holder.get(key)]

    def _is_of_hosts(self, holder: Holder | None) -> bool:
        return self.hosts is None or (holder is not None and holder.host in self.hosts)

    def _fits_holder(self, key: SlotKey, holder: Holder | None) -> bool:
        return holder is not None and self._fits(f"{key.name}\n{holder}")

    def _selected(self, ids: frozenset[str]) -> list[SlotKey]:
        leases = {lease for text in ids if (lease := LeaseKey.read(text))}
        seen = self.inventory.leases(sorted({lease.lock for lease in leases}, key=lambda key: (key.name, key.using)))
        return [one.key for one in seen if one.lease in leases]

    def _order_by(self, field: str, keys: Sequence[SlotKey]) -> dict[SlotKey, Any]:
        if field == "remaining":
            return self.inventory.free_at(keys)
        if field == "fence":
            return {key: seen.info.fence for key, seen in self.inventory.look(keys).items()}
        if field in HOLDER_VALUES:
            return self.inventory.map_holders(keys, HOLDER_VALUES[field])
        return {key: getattr(key, field) for key in keys} if field in Key._fields else {}

    def _rows(self, keys: Sequence[SlotKey]) -> list[HeldLock]:
        found = self.inventory.look(keys)
        waiting = self.inventory.count_waiters(key.lock for key in found)
        return [
            HeldLock.seen(
                seen.info,
                key=str(seen.lease),
                remaining=None if isinf(seen.remaining) else seen.remaining,
                waiting=waiting[key.lock],
            )
            for key, seen in found.items()
            if self._is_of_hosts(seen.info.holder)  # still, because a lock may change hands meanwhile
        ]


@dataclass(frozen=True)
class BeatRuns(InventoryQuerySet[BeatRun, Key]):
    """Rows of BeatRun. A search reads the names of entries."""

    model = BeatRun

    def _fitting(self) -> list[Key]:
        return [
            key
            for key in self.inventory.runs()
            if self.using in (None, key.using) and (self.ids is None or str(key) in self.ids) and self._fits(key.name)
        ]

    def _order_by(self, field: str, keys: Sequence[Key]) -> dict[Key, Any]:
        """Unknown times come first."""
        if field not in (known.name for known in fields(RunInfo)):
            return {}
        runs = self.inventory.runs()
        values = {key: getattr(runs[key], field) for key in keys}
        return {key: (value is not None, value) for key, value in values.items()}

    def _rows(self, keys: Sequence[Key]) -> list[BeatRun]:
        runs = self.inventory.runs()
        own = [field.attname for field in BeatRun._meta.fields if field.attname != "id"]
        found = [BeatRun(id=str(key), **_printable({name: getattr(runs[key], name) for name in own})) for key in keys]
        for row in found:
            row._state.adding = False  # noqa: SLF001 - of the documented Model API
        return found


def _printable(values: dict[str, Any]) -> dict[str, Any]:
    return {field: printable(value) if isinstance(value, str) else value for field, value in values.items()}
