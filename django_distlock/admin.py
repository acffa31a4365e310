"""The admin's pages of locks and of beat. Each shows a snapshot of the stores, in which nothing can be edited."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, cast

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin import actions
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import DELETION, LogEntry
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, router, transaction
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as __
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from .exceptions import LockBackendError
from .models import BeatRun, HeldLock
from .monitoring.admin_querysets import BeatRuns, HeldLocks
from .monitoring.inventory import (
    Inventory,
    LeaseKey,
    force_release,
    format_duration,
    held_for,
    holding_nodes,
    long_held,
)
from .utils.text import printable

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.utils.functional import _StrPromise

logger = logging.getLogger("django_distlock")

BACKEND_DOWN = "distlock-down"  # the CSS class of such a message, which the script looks for


def inventory_of(request: HttpRequest) -> Inventory:
    """The snapshot of this request."""
    if not hasattr(request, "distlock_inventory"):
        request.distlock_inventory = Inventory()  # type: ignore[attr-defined]
    return cast(Inventory, request.distlock_inventory)  # type: ignore[attr-defined]


class CountedFilter(admin.SimpleListFilter):
    """A filter whose facets are counted without a database."""

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


class InventoryAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # takes none at run time
    """A page of rows from an inventory, with a message for each backend that does not answer.

    ``list_title``: the title of the list. ``not_shown``: the message, with the fields ``alias`` and ``error``.
    """

    list_title: _StrPromise
    not_shown: _StrPromise

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """Check the permission first: Django looks up the object before, and reports one that is gone."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return super().get_object(request, object_id, from_field)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return queryset.search(search_term), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response = super().changelist_view(request, {"title": self.list_title, **(extra_context or {})})
        self.show_errors(request)
        return response

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        response = super().changeform_view(request, *args, **kwargs)
        self.show_errors(request)
        return response

    def show_errors(self, request: HttpRequest) -> None:
        inventory = inventory_of(request)
        for alias, error in inventory.errors.items():
            if alias in inventory.misconfigured:  # settings are shown to readers of the log alone
                logger.error("%s", error)
            reason = _("its settings are wrong, see the log") if alias in inventory.misconfigured else error
            text = self.not_shown % {"alias": alias, "error": reason}
            self.message_user(request, text, messages.ERROR, BACKEND_DOWN)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


MOST_PREFIXES = 20  # in the filter, those with the most locks
MOST_AT_ONCE = 1000  # locks on the confirmation page, if DATA_UPLOAD_MAX_NUMBER_FIELDS allows as many
OTHER_FIELDS = 10  # that the confirmation page sends beside one for each lock
_WARNING = _(
    "Whoever holds a lock is not stopped by this: it learns of it when it renews, and others may hold it before."
)


class PrefixFilter(CountedFilter):
    """A filter by the part of the name before the first colon."""

    title = _("prefix")
    parameter_name = "prefix"

    @staticmethod
    def choice_of(key: Any) -> str:
        return cast(str, key.name[: key.name.find(":") + 1])

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = chain.from_iterable(inventory_of(request).keys().names.values())
        counted = Counter([name[: name.find(":") + 1] for name in names])
        counted.pop("", None)
        return [(prefix, printable(prefix)) for prefix in sorted(dict(counted.most_common(MOST_PREFIXES)))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(name__startswith=self.value()) if self.value() else None


@admin.register(HeldLock)
class HeldLockAdmin(InventoryAdmin):
    """Lists what is locked in all backends, and releases what is selected.

    For a theme that wants a ModelAdmin of its own: ``class MyAdmin(HeldLockAdmin, theme.ModelAdmin)``.
    """

    list_title = _("Held locks")
    not_shown = _("The locks of “%(alias)s” are not shown, or not all of them: %(error)s")
    list_display = ("name", "left", "held_for", "queue", "label", "process", "using", "fence")
    list_filter = (BackendFilter, PrefixFilter)
    search_fields = ("name", "label", "holder")
    search_help_text = _("Searches names, labels and holders.")
    actions = ("delete_selected",)
    fields = ("name", "using", "state", "label", "holder", "granted_at", "held_for", "left", "fence", "queue")
    readonly_fields = (*fields, "nodes")

    class Media:
        css: ClassVar[dict[str, Sequence[str]]] = {"all": ("django_distlock/held_locks.css",)}
        js = ("admin/js/actions.js", "django_distlock/held_locks.js")  # in this order

    # Columns

    @admin.display(description=_("holder"), ordering="holder")
    def process(self, row: HeldLock) -> str:
        """Without the thread, for which there is no room in the list."""
        holder = row.info.holder
        process = f"{holder.host}, pid {holder.pid}" if holder else ""
        return process if row.state == HeldLock.State.HELD else f"{process} ({row.state_text})".lstrip()

    @admin.display(description=_("held for"), ordering="-granted_at")
    def held_for(self, row: HeldLock) -> str | None:
        ticking, bound = _ticking(held_for(row.info), 1), long_held(row.info)
        if ticking is None or bound is None:
            return ticking
        meaning = __("longer than LONG_HELD, %(time)s") % {"time": format_duration(bound)}
        return format_html('{} <strong class="distlock-long" title="{}">{}</strong>', ticking, meaning, __("long"))

    @admin.display(description=_("time left"), ordering="remaining")
    def left(self, row: HeldLock) -> str | None:
        return _ticking(row.remaining, -1)

    @admin.display(description=_("waiting"))
    def queue(self, row: HeldLock) -> int | None:
        return row.waiting

    @admin.display(description=_("nodes"))
    def nodes(self, row: HeldLock) -> str:
        return holding_nodes(row.info)

    # Rows and columns

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = super().get_list_display(request)
        return (*shown, "nodes") if inventory_of(request).has_quorums and "nodes" not in shown else shown

    def get_fields(self, request: HttpRequest, obj: HeldLock | None = None) -> Any:
        shown = super().get_fields(request, obj)
        return shown if obj is None or obj.info.nodes is None else (*shown, "nodes")

    def get_queryset(self, request: HttpRequest) -> Any:
        return HeldLocks(inventory_of(request))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> HeldLock | None:
        row: HeldLock | None = super().get_object(request, object_id, from_field)
        if row is None:
            self._report_changed_locks(request, [object_id])
        return row

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        response = super().delete_view(
            request, object_id, {"title": __("Release lock"), "subtitle": _WARNING, **(extra_context or {})}
        )
        self.show_errors(request)
        return response

    # Permissions. Only code acquires locks; people look, and release.

    def has_release_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        user = cast(Any, request).user
        return bool(user.has_perm(f"{self.opts.app_label}.release_{self.opts.model_name}"))

    def has_delete_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return self.has_release_permission(request, obj)

    def has_view_permission(self, request: HttpRequest, obj: HeldLock | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_release_permission(request, obj)

    # Release

    # The name is the one that Django's confirmation page sends back.
    @admin.action(permissions=["release"], description=_("Release selected locks"))
    def delete_selected(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        if request.POST.get("post"):
            # Only those that the confirmation page has shown.
            ids = request.POST.getlist(ACTION_CHECKBOX_NAME)
            rows = HeldLocks(inventory_of(request)).filter(pk__in=ids).rows()
            self._report_changed_locks(request, ids)
            self._release(request, rows)
            self.show_errors(request)
            return None
        most = min(MOST_AT_ONCE, (settings.DATA_UPLOAD_MAX_NUMBER_FIELDS or MOST_AT_ONCE) - OTHER_FIELDS)
        if (count := queryset.count()) > most:
            text = __("%(count)d locks are selected; the first %(most)d can be released now, the rest after that.")
            self.message_user(request, text % {"count": count, "most": most}, messages.WARNING)
            queryset = queryset[:most]
        response: Any = actions.delete_selected(self, request, queryset.as_queryset())
        if response is not None:
            response.context_data |= {"title": __("Release locks"), "subtitle": _WARNING}
        return cast("HttpResponse | None", response)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        lines = [_described(row) for row in objs]
        lacking = set() if self.has_release_permission(request) else {str(self.opts.verbose_name)}
        return lines, {str(self.opts.verbose_name_plural): len(lines)}, lacking, []

    def log_deletions(self, request: HttpRequest, queryset: Any) -> None:  # type: ignore[override]
        """Nothing: Django logs before it deletes, and a lock may have changed hands. See ``_release``."""

    def delete_model(self, request: HttpRequest, obj: HeldLock) -> None:
        self._release(request, [obj])

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        self._release(request, queryset)

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> Any:
        """Back to the list; what became of the lock is said already."""
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
        return redirect(reverse(name, current_app=self.admin_site.name))

    def _release(self, request: HttpRequest, rows: Iterable[HeldLock]) -> None:
        """Release each lock whose lease on the page still holds it. Only those are logged and reported as released."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        released: list[HeldLock] = []
        kept: list[HeldLock] = []
        unlogged: list[HeldLock] = []
        by = f"{cast(Any, request).user.get_username()} in the admin"
        errors = inventory_of(request).errors
        for row in rows:
            if row.using in errors:
                continue
            try:
                freed = force_release(row.info, by=by)
            except LockBackendError as error:
                errors[row.using] = str(error)
            else:
                (released if freed else kept).append(row)
                if freed and not self._log(request, row):
                    unlogged.append(row)
        if released:
            text = ngettext(
                "Released %(count)d lock: %(names)s.", "Released %(count)d locks: %(names)s.", len(released)
            )
            self.message_user(request, text % {"count": len(released), "names": _names(released)}, messages.SUCCESS)
        if kept:
            text = __("Nothing to release: %(names)s was freed or changed hands meanwhile.")
            self.message_user(request, text % {"names": _names(kept)}, messages.WARNING)
        if unlogged:
            text = __("The admin's log has no entry of this: %(names)s.")
            self.message_user(request, text % {"names": _names(unlogged)}, messages.ERROR)

    def _log(self, request: HttpRequest, row: HeldLock) -> bool:
        """One entry at once, so that a later error keeps no release from the log. Whether it was written."""
        user = cast(Any, request).user
        message = __("Released while held by %(holder)s.") % {"holder": row.info.holder or __("nobody yet")}
        try:
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                LogEntry.objects.log_actions(user.pk, cast(Any, [row]), DELETION, message, single_object=True)
        except DatabaseError:
            logger.exception(
                "The release of lock %r (%s) by %s is not in the admin's log",
                row.info.name,
                row.using,
                user.get_username(),
            )
            return False
        return True

    def _report_changed_locks(self, request: HttpRequest, ids: Iterable[str]) -> None:
        """Say why leases that were on the page are gone."""
        inventory = inventory_of(request)
        leases = [lease for text in ids if (lease := LeaseKey.read(text)) and lease.lock.using not in inventory.errors]
        now = inventory.look([lease.lock for lease in leases])
        others = [lease.lock.name for lease in leases if (seen := now.get(lease.lock)) and seen.lease != lease]
        free = [
            lease.lock.name for lease in leases if lease.lock not in now and lease.lock.using not in inventory.errors
        ]
        if others:
            text = __("Kept, because others hold them by now: %(names)s.")
            self.message_user(request, text % {"names": _shortened(others)}, messages.WARNING)
        if free:
            text = __("Free already: %(names)s.")
            self.message_user(request, text % {"names": _shortened(free)}, messages.INFO)


@admin.register(BeatRun)
class BeatRunAdmin(InventoryAdmin):
    """Lists the entries that beats know: when each ran, by which host, and when it is expected again."""

    list_title = _("Beat runs")
    not_shown = _("The runs of “%(alias)s” are not shown, or not all of them: %(error)s")
    list_display = ("entry", "using", "last_run_at", "host", "next_run_at")
    list_filter = (BackendFilter,)
    search_fields = ("entry",)
    search_help_text = _("Searches the names of entries.")
    actions = None
    fields = list_display
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> Any:
        return BeatRuns(inventory_of(request))

    def has_delete_permission(self, request: HttpRequest, obj: BeatRun | None = None) -> bool:
        return False


def _ticking(seconds: float | None, step: int) -> str | None:
    """Text that the script counts up (1) or down (-1)."""
    if seconds is None:
        return None
    attributes = '<span class="distlock-seconds" data-seconds="{}" data-step="{}">{}</span>'
    return format_html(attributes, f"{seconds:.3f}", step, format_duration(seconds))


def _described(row: HeldLock) -> str:
    line = f"{row.name} ({row.using}): {row.info.holder or row.state_text}"
    if row.granted_at:
        line += __(", for %(time)s") % {"time": format_duration(held_for(row.info) or 0.0)}
    return line


def _names(rows: Sequence[HeldLock]) -> str:
    return _shortened([row.name for row in rows])


def _shortened(names: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(map(printable, names[:most]))
    return shown if len(names) <= most else f"{shown}, … ({len(names)})"
