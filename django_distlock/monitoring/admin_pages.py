"""The common parts of the admin's pages of locks and of beat."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from django.contrib import admin, messages
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.forms.widgets import Script
from django.utils.translation import gettext_lazy as _

from ..utils.events import about_event
from .admin_filters import inventory_of
from .admin_querysets import HeldLocks
from .admin_texts import silent_since, text_of_outage
from .times import LENGTHS

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.utils.functional import Promise

logger = logging.getLogger("django_distlock")

# The texts of the script, in the language of each request, so that no script is inside the page
TEXTS = {
    "pause": _("Pause"),
    "resume": _("Resume"),
    "paused": _("The page is not refreshed."),
    "refreshed": _("The page is refreshed every %(seconds)s s."),
    "failed": _("The page could not be refreshed: %(error)s. It is tried again."),
}
SCRIPT = Script("django_distlock/held_locks.js", **{f"data-{key}": text for key, text in {**TEXTS, **LENGTHS}.items()})
ABOUT_BACKEND = "distlock-backend"  # the CSS class of messages that a refresh removes or shows again


class InventoryAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """A page of rows from an inventory, with a message for each backend that does not answer.

    ``list_title``: the title of the list. ``not_shown``: the message, with the fields ``alias`` and ``error``.
    """

    list_title: Promise
    not_shown: Promise

    class Media:
        css: ClassVar[dict[str, Sequence[str]]] = {"all": ("django_distlock/held_locks.css",)}
        js = ("admin/js/actions.js", SCRIPT)  # in this order

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Check the permission first, because Django would first look up the object, and report one that is gone."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return super().get_object(request, object_id, from_field)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return queryset.search(search_term), False

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = super().get_list_display(request)
        return shown if len(inventory_of(request).aliases) > 1 else [name for name in shown if name != "using"]

    def get_sortable_by(self, request: HttpRequest) -> Any:
        """All but the backend, which has a filter: the mark of the order would take the room of a word."""
        return [name for name in super().get_sortable_by(request) if name != "using"]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response = super().changelist_view(request, {"title": self.list_title, **(extra_context or {})})
        self.show_errors(request, response)
        return response

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        response = super().changeform_view(request, *args, **kwargs)
        self.show_errors(request, response)
        return response

    def show_errors(self, request: HttpRequest, response: HttpResponse) -> None:
        """Show a message for each backend that did not answer; none with a redirect to a list, which asks again."""
        if response.status_code != HTTPStatus.OK:
            return
        inventory = inventory_of(request)
        outages = inventory.outages()
        for alias, error in sorted(inventory.errors.items()):
            if alias in inventory.misconfigured:  # only the log may show settings
                logger.error("%s", error, extra=about_event("settings-wrong", alias=alias))
            reason = _("its settings are wrong, see the log") if alias in inventory.misconfigured else error
            text = str(self.not_shown) % {"alias": alias, "error": reason}
            if alias in outages:
                text = f"{text.rstrip('.')}. {silent_since(outages.pop(alias))}"
            self.message_user(request, text, messages.ERROR, ABOUT_BACKEND)
        for alias, servers in outages.items():
            self.message_user(request, text_of_outage(alias, servers), messages.WARNING, ABOUT_BACKEND)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


LONGEST_FIRST = ("-held_for",)


class HeldLockList(ChangeList):
    """Marks the column of the order from ``get_ordering()``, because Django only knows ``ModelAdmin.ordering``."""

    def get_ordering_field_columns(self) -> dict[int, Literal["desc", "asc"]]:
        if ORDER_VAR in self.params or cast(HeldLocks, self.queryset).order[:1] != LONGEST_FIRST:
            return super().get_ordering_field_columns()
        return {index: "desc" for index, column in enumerate(self.list_display) if column == "held_for"}
