"""The admin's pages of locks and of beat. Each shows a snapshot of the stores. Nothing can be edited in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, router, transaction
from django.middleware.csrf import get_token
from django.shortcuts import redirect
from django.template.loader import get_template
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from .celery.config import is_beat_used
from .core.forced import force_release
from .exceptions import LockBackendError
from .models import BeatRun, HeldLock
from .monitoring import explain
from .monitoring.admin_filters import BackendFilter, HostFilter, PrefixFilter, inventory_of
from .monitoring.admin_pages import ABOUT_BACKEND, LONGEST_FIRST, HeldLockList, InventoryAdmin
from .monitoring.admin_querysets import BeatRuns, HeldLocks
from .monitoring.admin_runs import RunActions
from .monitoring.admin_texts import (
    as_list,
    as_table,
    breakable,
    described,
    moment,
    named,
    names_of,
    shortened,
    texts_of_aliases,
    texts_of_changes,
    ticking,
)
from .monitoring.inventory import held_for, holding_nodes, long_held, prefix_of
from .monitoring.situation import gather
from .monitoring.times import format_duration
from .utils.events import about_event

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

logger = logging.getLogger("django_distlock")

MOST_AT_ONCE = 1000  # locks on the confirmation page, if DATA_UPLOAD_MAX_NUMBER_FIELDS allows as many
OTHER_FIELDS = 10  # fields that the confirmation page sends beside one for each lock
_WARNING = _(
    "This does not stop the holder of a lock. It learns of this at its next renewal, and others may hold the lock by"
    " then."
)
# The frame of the site, in any theme. Some themes do not show ``content``, or do not style buttons.
QUESTION = """{% extends "admin/base_site.html" %}{% load static %}
{% block extrahead %}{{ block.super }}<link rel="stylesheet" href="{% static 'django_distlock/held_locks.css' %}"
{% if csp_nonce %}nonce="{{ csp_nonce }}"{% endif %}>{% endblock %}
{% block content %}{{ content }}{% endblock %}"""


@admin.register(HeldLock)
class HeldLockAdmin(InventoryAdmin):
    """Lists the locks that are held in all backends, and releases the selected ones.

    For a theme that needs its own ModelAdmin: ``class MyAdmin(HeldLockAdmin, theme.ModelAdmin)``.
    """

    list_title = _("Held locks")
    not_shown = _("The locks of “%(alias)s” are not shown, or not all of them: %(error)s")
    list_display = ("name", "held_by", "held_for", "left", "queue", "using")
    list_filter = (BackendFilter, PrefixFilter, HostFilter)
    search_fields = ("name", "label", "holder")
    search_help_text = _("Searches names, labels and holders.")
    actions = ("delete_selected", "release_hosts", "release_prefixes")
    fields = ("name", "using", "state", "label", "holder", "granted", "held_for", "left", "fence", "queue")
    explained = ("why", "waiters", "lately")
    readonly_fields = (*fields, "nodes", *explained, "release")

    # Columns

    @admin.display(description=_("holder"), ordering="label")
    def held_by(self, row: HeldLock) -> str:
        """Returns the holder without its thread, because the list has no room for it."""
        holder = row.info.holder
        process = f"{holder.host}, pid {holder.pid}" if holder else ""
        if row.state != HeldLock.State.HELD:
            process = f"{process} ({row.state_text})".lstrip()
        return format_html('{} <span class="distlock-process">{}</span>', breakable(row.label), process)

    @admin.display(description=_("granted at"))
    def granted(self, row: HeldLock) -> str | None:
        return moment(row.granted_at)

    @admin.display(description=_("held for"), ordering="held_for")
    def held_for(self, row: HeldLock) -> str | None:
        held = held_for(row.info)
        text, bound = ticking(held, 1), long_held(row.info, held)
        if text is None or bound is None:
            return text
        meaning = gettext("longer than LONG_HELD, %(time)s") % {"time": format_duration(bound)}
        return format_html('{} <strong class="distlock-long" title="{}">{}</strong>', text, meaning, gettext("long"))

    @admin.display(description=_("time left"), ordering="remaining")
    def left(self, row: HeldLock) -> str | None:
        return ticking(row.remaining, -1)

    @admin.display(description=_("waiting"))
    def queue(self, row: HeldLock) -> int | None:
        return row.waiting

    @admin.display(description=_("nodes"))
    def nodes(self, row: HeldLock) -> str:
        return holding_nodes(row.info)

    # Only on the page of a lock; empty if the backend does not answer

    @admin.display(description=_("why"))
    def why(self, row: HeldLock) -> str:
        return as_list(explain.why(row.situation)) if row.situation else ""

    @admin.display(description=_("waiters"))
    def waiters(self, row: HeldLock) -> str:
        return as_list(explain.waiters(row.situation)) if row.situation else ""

    @admin.display(description=_("lately"))
    def lately(self, row: HeldLock) -> str:
        return as_table(explain.lately(row.situation)) if row.situation and row.situation.entries is not None else ""

    @admin.display(description=_("release"))
    def release(self, row: HeldLock) -> str:
        question, text = self._url("delete", quote(row.pk)), gettext("Release this lock…")
        return format_html('<a class="button distlock-release" href="{}">{}</a>', question, text)

    # Rows and columns

    def get_list_display(self, request: HttpRequest) -> Any:
        shown = super().get_list_display(request)
        return (*shown, "nodes") if inventory_of(request).has_quorums and "nodes" not in shown else shown

    def get_fields(self, request: HttpRequest, obj: HeldLock | None = None) -> Any:
        shown = [*super().get_fields(request, obj)]
        if obj is not None and obj.info.nodes is not None:
            shown.append("nodes")
        shown += self.explained
        return [*shown, "release"] if self.has_release_permission(request) else shown

    def get_ordering(self, request: HttpRequest) -> Any:
        """The locks that are held longest come first; by name if there are too many to ask for their holders."""
        return () if inventory_of(request).holders() is None else LONGEST_FIRST

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Returns a class that also inherits the list of the theme, because themes have their own."""
        return type("HeldLockList", (HeldLockList, super().get_changelist(request, **kwargs)), {})

    def get_queryset(self, request: HttpRequest) -> Any:
        return HeldLocks(inventory_of(request))

    # Pages

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        response: Any = super().changelist_view(request, extra_context)
        if response.status_code == HTTPStatus.OK and "cl" in response.context_data:
            self._say_what_is_seen(request)
        return cast("HttpResponse", response)

    def _say_what_is_seen(self, request: HttpRequest) -> None:
        inventory = inventory_of(request)
        asked = [
            gettext("“%(alias)s”") % {"alias": alias} for alias in inventory.aliases if alias not in inventory.errors
        ]
        if asked and not inventory.keys():
            text = gettext("Nothing is locked in %(aliases)s. A lock is listed for as long as somebody holds it.")
            self.message_user(request, text % {"aliases": ", ".join(asked)}, messages.INFO, ABOUT_BACKEND)
        for text in texts_of_aliases(inventory):
            self.message_user(request, text, messages.INFO, f"{ABOUT_BACKEND} distlock-alias")
        if inventory.holders() is None:
            text = gettext(
                "There are too many locks to ask for each holder, so they are listed by name: search, or filter by"
                " prefix."
            )
            self.message_user(request, text, messages.INFO, ABOUT_BACKEND)
        for alias in inventory.local_aliases:
            text = gettext("“%(alias)s” is in local memory: locks that other processes hold cannot be seen here.")
            self.message_user(request, text % {"alias": alias}, messages.WARNING, ABOUT_BACKEND)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Leave out Django's link, which says "Delete"; see ``release``. The page asks the store only for this lock."""
        row: HeldLock = context["original"]
        ask = partial(gather, name=row.info.name, others=False)
        row.situation = inventory_of(request).ask_each({row.using: ask})[row.using]
        return super().render_change_form(request, context | {"show_delete": False}, *args, **kwargs)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Shows the releases under this name. The lease itself, which still exists, has no history."""
        response: Any = self._if_there(request, object_id, partial(super().history_view, extra_context=extra_context))
        if response.status_code == HTTPStatus.OK:
            entries = LogEntry.objects.filter(
                content_type=get_content_type_for_model(self.model),
                change_message__contains=named(response.context_data["object"]),
            )
            page = self.get_paginator(
                request, entries.select_related("user").order_by("action_time"), self.list_per_page
            ).get_page(request.GET.get(PAGE_VAR))
            response.context_data |= {
                "action_list": page,
                "page_range": page.paginator.get_elided_page_range(page.number),
                "pagination_required": page.has_other_pages(),
            }
        return cast("HttpResponse", response)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        view = partial(super().change_view, form_url=form_url, extra_context=extra_context)
        return self._if_there(request, object_id, view)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return self._if_there(request, object_id, partial(super().delete_view, extra_context=extra_context))

    def _if_there(
        self, request: HttpRequest, object_id: str, view: Callable[[HttpRequest, str], HttpResponse]
    ) -> HttpResponse:
        """Returns the page of a lease. If the lease is gone, returns to the list, with a message that says why."""
        if self.get_object(request, unquote(object_id)) is not None:
            return view(request, object_id)
        self._report_changed_locks(request, [unquote(object_id)])
        return redirect(self._url("changelist"))

    def _url(self, page: str, *arguments: str) -> str:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{page}"
        return reverse(name, args=arguments, current_app=self.admin_site.name)

    # Permissions. Only code acquires locks; people view and release them.

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
            # Only the leases that the confirmation page has shown
            ids = request.POST.getlist(ACTION_CHECKBOX_NAME)
            rows = HeldLocks(inventory_of(request)).filter(pk__in=ids).rows()
            self._report_changed_locks(request, ids)
            self._release(request, rows)
            return None
        return self._question_of_many(request, queryset, gettext("Release locks"))

    @admin.action(permissions=["release"], description=_("Release all that the hosts of the selected locks hold"))
    def release_hosts(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """In all backends, whatever the filter of the list, because such a host has failed or is to be removed."""
        holders = inventory_of(request).map_holders(queryset.keys(), lambda key, holder: holder).values()
        hosts = {holder.host for holder in holders if holder}
        if not hosts:
            self.message_user(request, gettext("Nobody holds the selected locks."), messages.WARNING)
            return None
        title = gettext("Release all that %(hosts)s holds") % {"hosts": shortened(sorted(hosts))}
        return self._question_of_many(request, HeldLocks(inventory_of(request)).filter(host__in=hosts), title)

    @admin.action(permissions=["release"], description=_("Release all locks with the prefixes of the selected ones"))
    def release_prefixes(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """In the same backends. A name without a colon has no prefix; an empty prefix would match all locks."""
        prefixes = {(key.using, prefix_of(key.name)) for key in queryset.keys() if prefix_of(key.name)}  # noqa: SIM118
        if not prefixes:
            self.message_user(request, gettext("The names of the selected locks have no prefix."), messages.WARNING)
            return None
        title = gettext("Release all of %(prefixes)s") % {
            "prefixes": shortened(sorted({prefix for _, prefix in prefixes}))
        }
        return self._question_of_many(request, HeldLocks(inventory_of(request)).filter(prefix__in=prefixes), title)

    def _question_of_many(self, request: HttpRequest, queryset: Any, title: str) -> HttpResponse:
        """Returns the confirmation page. Its form names each lease and sends them to ``delete_selected``."""
        most = min(MOST_AT_ONCE, (settings.DATA_UPLOAD_MAX_NUMBER_FIELDS or MOST_AT_ONCE) - OTHER_FIELDS)
        if (count := queryset.count()) > most:
            text = gettext("%(count)d locks are selected; the first %(most)d can be released now, the rest after that.")
            self.message_user(request, text % {"count": count, "most": most}, messages.WARNING)
            queryset = queryset[:most]
        rows = queryset.rows()
        fields = [("action", "delete_selected"), *((ACTION_CHECKBOX_NAME, row.pk) for row in rows)]
        return self._question(request, rows, fields, title)

    def render_delete_form(self, request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
        return self._question(request, [context["object"]], [], gettext("Release lock"))

    def _question(
        self, request: HttpRequest, rows: Sequence[HeldLock], fields: Sequence[tuple[str, str]], title: str
    ) -> HttpResponse:
        """Returns the page that asks whether to release these locks. ``fields``: what its form sends as well."""
        hidden = [("csrfmiddlewaretoken", get_token(request)), ("post", "yes"), *fields]
        content = format_html(
            '<div class="delete-confirmation"><p>{} {}</p><ul>{}</ul><form method="post"><div>{}'
            '<input type="submit" class="distlock-release" value="{}">'
            ' <a href="{}" class="button cancel-link">{}</a></div></form></div>',
            ngettext("Release this lock?", "Release these %(count)d locks?", len(rows)) % {"count": len(rows)},
            _WARNING,
            format_html_join("", "<li>{}</li>", ((described(row),) for row in rows)),
            format_html_join("", '<input type="hidden" name="{}" value="{}">', hidden),
            gettext("Yes, release"),
            self._url("changelist"),
            gettext("No, take me back"),
        )
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, "content": content}
        engine: Any = cast(Any, get_template("admin/base_site.html")).backend
        return TemplateResponse(request, engine.from_string(QUESTION), context)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> None:  # type: ignore[override]
        """Logs nothing: Django would log before the release, and a lock may have changed hands. See ``_release``."""

    def delete_model(self, request: HttpRequest, obj: HeldLock) -> None:
        self._release(request, [obj])

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        self._release(request, queryset)

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: Any) -> Any:
        """Return to the list. A message has already said what happened to the lock."""
        return redirect(self._url("changelist"))

    def _release(self, request: HttpRequest, rows: Iterable[HeldLock]) -> None:
        """Release each lock whose lease on the page still holds it. Only those are logged and reported as released."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        released: list[HeldLock] = []
        kept: list[HeldLock] = []
        failed: dict[str, str] = {}
        left: list[HeldLock] = []
        by = f"{cast(Any, request).user.get_username()} in the admin"
        try:
            for row in rows:
                if row.using in failed:
                    left.append(row)
                    continue
                try:
                    freed = force_release(row.info, by=by)
                except LockBackendError as error:
                    failed[row.using] = str(error)
                    left.append(row)
                else:
                    (released if freed else kept).append(row)
        finally:  # also after an error, released locks are logged
            is_logged = not released or self._log(request, released)
        if released:
            text = ngettext(
                "Released %(count)d lock: %(names)s.", "Released %(count)d locks: %(names)s.", len(released)
            )
            self.message_user(request, text % {"count": len(released), "names": names_of(released)}, messages.SUCCESS)
        if kept:
            text = gettext("Nothing to release: %(names)s was freed or changed hands meanwhile.")
            self.message_user(request, text % {"names": names_of(kept)}, messages.WARNING)
        if left:
            text = gettext("Not released: %(names)s. %(errors)s")
            about = {"names": names_of(left), "errors": " ".join(failed.values())}
            self.message_user(request, text % about, messages.ERROR)
        if not is_logged:
            text = gettext("The admin's log has no entry of this: %(names)s.")
            self.message_user(request, text % {"names": names_of(released)}, messages.ERROR)

    def _log(self, request: HttpRequest, rows: Sequence[HeldLock]) -> bool:
        """Log the releases in one entry. Returns whether it was written."""
        user = cast(Any, request).user
        held = [
            gettext("%(lock)s, held by %(holder)s")
            % {"lock": named(row), "holder": row.info.holder or gettext("nobody yet")}
            for row in rows
        ]
        try:
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                LogEntry.objects.create(
                    user_id=user.pk,
                    content_type=get_content_type_for_model(self.model),
                    object_repr=(gettext("Released: %(names)s") % {"names": names_of(rows)})[:200],
                    action_flag=CHANGE,
                    change_message=gettext("Released: %(locks)s.") % {"locks": "; ".join(held)},
                )
        except DatabaseError:
            logger.exception(
                "The release of %s by %s is not in the admin's log", ", ".join(map(named, rows)), user.get_username(),
                extra=about_event("admin-log-failed"),
            )  # fmt: skip
            return False
        return True

    def _report_changed_locks(self, request: HttpRequest, ids: Iterable[str]) -> None:
        """Show messages that say why leases which were on the page are gone."""
        for level, text in texts_of_changes(inventory_of(request), ids):
            self.message_user(request, text, level)


@admin.register(BeatRun)
class BeatRunAdmin(RunActions):
    """Lists the entries that beats know: when each last ran, on which host, and when it is expected again."""

    list_title = _("Beat runs")
    not_shown = _("The runs of “%(alias)s” are not shown, or not all of them: %(error)s")
    list_display = ("entry", "using", "last_run", "host", "next_run")
    list_filter = (BackendFilter,)
    search_fields = ("entry",)
    search_help_text = _("Searches the names of entries.")
    fields = list_display
    readonly_fields = fields

    @admin.display(description=_("last run"), ordering="last_run_at")
    def last_run(self, row: BeatRun) -> str | None:
        return moment(row.last_run_at)

    @admin.display(description=_("next expected"), ordering="next_run_at")
    def next_run(self, row: BeatRun) -> str | None:
        return moment(row.next_run_at)

    def get_queryset(self, request: HttpRequest) -> Any:
        return BeatRuns(inventory_of(request))

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """No permissions if beat is not used: then the index leaves the page out."""
        return super().get_model_perms(request) if is_beat_used() else {}

    def has_delete_permission(self, request: HttpRequest, obj: BeatRun | None = None) -> bool:
        return False
