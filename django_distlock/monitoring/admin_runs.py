"""The actions of the admin's page of beat's runs, for the selected entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..celery.schedule_store import RunInfo, reset_run
from ..exceptions import LockBackendError
from ..models import BeatRun
from ..utils.text import printable
from .admin_filters import inventory_of
from .admin_pages import InventoryAdmin

if TYPE_CHECKING:
    from django.http import HttpRequest


class RunActions(InventoryAdmin):
    """Actions for users with the permission to operate beat, which includes the permission to view."""

    actions = ("run_now", "reset")

    @admin.action(permissions=["operate"], description=_("Send selected entries now, once"))
    def run_now(self, request: HttpRequest, queryset: Any) -> None:
        try:
            from ..celery.run_now import NotSent, run_now
        except ImportError:
            self.message_user(request, gettext("Celery is not installed here."), messages.ERROR)
            return
        for row, run in self._selected(request, queryset):
            try:
                task_id = run_now(run.entry, f"{request.user} by the admin")
            except NotSent as error:
                self.message_user(request, printable(str(error)), messages.ERROR)
            else:
                text = gettext("“%(entry)s” was sent as task %(id)s. Its schedule does not move.")
                self.log_change(request, row, gettext("Sent as task %(id)s.") % {"id": task_id})
                self.message_user(request, text % {"entry": row.entry, "id": task_id}, messages.SUCCESS)

    @admin.action(permissions=["operate"], description=_("Let selected entries count from now on"))
    def reset(self, request: HttpRequest, queryset: Any) -> None:
        for row, run in self._selected(request, queryset):
            try:
                was_there = reset_run(run.entry, run.using)
            except LockBackendError as error:
                self.message_user(request, printable(str(error)), messages.ERROR)
                continue
            if was_there:
                self.log_change(request, row, gettext("Reset."))
                text = gettext("“%(entry)s” counts from now on, as if it was new.")
                self.message_user(request, text % {"entry": row.entry}, messages.SUCCESS)
            else:
                self.message_user(request, gettext("“%(entry)s” is gone.") % {"entry": row.entry}, messages.WARNING)

    @staticmethod
    def _selected(request: HttpRequest, queryset: Any) -> list[tuple[BeatRun, RunInfo]]:
        """Returns the selected rows, with printable texts, and what the store has for them."""
        runs = {str(key): run for key, run in inventory_of(request).runs().items()}
        return [(row, runs[row.pk]) for row in queryset]

    def has_operate_permission(self, request: HttpRequest, obj: BeatRun | None = None) -> bool:
        """Returns whether the user may send and reset entries."""
        user: Any = request.user
        return bool(user.has_perm(f"{self.opts.app_label}.{get_permission_codename('operate', self.opts)}"))

    def has_view_permission(self, request: HttpRequest, obj: BeatRun | None = None) -> bool:
        return super().has_view_permission(request, obj) or self.has_operate_permission(request, obj)
