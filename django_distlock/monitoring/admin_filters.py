"""The filters of the admin's lists. They count in an inventory."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from ..utils.text import printable
from .inventory import Inventory, prefix_of

MOST_CHOICES = 20  # prefixes or hosts to choose from: those with the most locks


def inventory_of(request: Any) -> Inventory:
    """Returns the snapshot of this request."""
    if not hasattr(request, "distlock_inventory"):
        request.distlock_inventory = Inventory()
    return cast(Inventory, request.distlock_inventory)


class CountedFilter(admin.SimpleListFilter):
    """A filter that counts its facets without a database."""

    def get_facet_queryset(self, changelist: Any) -> dict[str, int]:
        rows = changelist.get_queryset(self.request, exclude_parameters=self.expected_parameters())
        counted = Counter(map(self.choice_of, rows.keys()))
        return {f"{index}__c": counted[choice] for index, (choice, _) in enumerate(self.lookup_choices)}

    def choice_of(self, key: Any) -> str:
        raise NotImplementedError


class BackendFilter(CountedFilter):
    title = _("backend")
    parameter_name = "using"

    def choice_of(self, key: Any) -> str:
        return cast(str, key.using)

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        aliases = inventory_of(request).aliases
        return [(alias, alias) for alias in aliases] if len(aliases) > 1 else []

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset.filter(using=self.value()) if self.value() is not None else None


class PrefixFilter(CountedFilter):
    """A filter by the part of the name before the first colon."""

    title = _("prefix")
    parameter_name = "prefix"

    def choice_of(self, key: Any) -> str:
        return prefix_of(key.name)

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        counted = inventory_of(request).keys().count_by_prefix()
        counted.pop("", None)
        return [(prefix, printable(prefix)) for prefix in sorted(dict(counted.most_common(MOST_CHOICES)))]

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset.filter(name__startswith=self.value()) if self.value() else None


class HostFilter(CountedFilter):
    """A filter by the host of the holder, unless there are too many leases to ask for their holders."""

    title = _("host")
    parameter_name = "host"

    def choice_of(self, key: Any) -> str:
        holder = (inventory_of(self.request).holders() or {}).get(key)
        return holder.host if holder else ""

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        """Includes the chosen host even if it no longer holds a lock: Django ignores a filter without choices."""
        holders = (inventory_of(request).holders() or {}).values()
        counted = Counter([holder.host for holder in holders if holder])
        hosts = {host for host, _ in counted.most_common(MOST_CHOICES)}
        if self.value():
            hosts.add(cast(str, self.value()))
        return [(host, printable(host)) for host in sorted(hosts)]

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset.filter(host__in=[self.value()]) if self.value() else None
