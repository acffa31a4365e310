"""What the admin's pages of locks and of beat have in common: each shows one snapshot, and nothing can be edited."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.utils.translation import gettext_lazy as _

from .inventory import Inventory

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.utils.functional import _StrPromise

logger = logging.getLogger("django_distlock")

BACKEND_DOWN = "distlock-down"  # class of a message, by which the script knows it


def inventory_of(request: HttpRequest) -> Inventory:
    """One snapshot per request."""
    if not hasattr(request, "_distlock_inventory"):
        request._distlock_inventory = Inventory()  # type: ignore[attr-defined]
    return cast(Inventory, request._distlock_inventory)  # type: ignore[attr-defined]


class CountedFilter(admin.SimpleListFilter):
    """Counts without a database."""

    def get_facet_queryset(self, changelist: Any) -> dict[str, int]:
        rows = changelist.get_queryset(self.request, exclude_parameters=self.expected_parameters())
        counted = Counter(map(self.choice_of, rows.keys()))
        return {f"{index}__c": counted[choice] for index, (choice, _) in enumerate(self.lookup_choices)}

    @staticmethod
    def choice_of(key: Any) -> str:
        raise NotImplementedError


class BackendFilter(CountedFilter):
    title = _("backend")
    parameter_name = "using"

    @staticmethod
    def choice_of(key: Any) -> str:
        return cast(str, key.using)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        aliases = inventory_of(request).aliases
        return [(alias, alias) for alias in aliases] if len(aliases) > 1 else []

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(using=self.value()) if self.value() is not None else None


class SnapshotAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # takes none at run time
    """Lists what an inventory tells, and names the backends that do not tell it.

    ``list_title`` stands above the list. ``not_shown`` says what is missing from the backend ``alias``, by ``error``.
    """

    list_title: _StrPromise
    not_shown: _StrPromise

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Django asks for the object first and for permission later, and tells of one that is gone."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return super().get_object(request, object_id, from_field)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return queryset.search(search_term), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response = super().changelist_view(request, {"title": self.list_title, **(extra_context or {})})
        self.tell_errors(request)
        return response

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        response = super().changeform_view(request, *args, **kwargs)
        self.tell_errors(request)
        return response

    def tell_errors(self, request: HttpRequest) -> None:
        inventory = inventory_of(request)
        for alias, error in inventory.errors.items():
            if alias in inventory.misconfigured:  # settings are for those who read the log
                logger.error("%s", error)
            told = _("its settings are wrong, see the log") if alias in inventory.misconfigured else error
            text = self.not_shown % {"alias": alias, "error": told}
            self.message_user(request, text, messages.ERROR, BACKEND_DOWN)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
