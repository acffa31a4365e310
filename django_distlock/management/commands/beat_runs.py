"""``manage.py beat_runs``: shows when the entries of beat ran, and sends or resets them."""

from __future__ import annotations

from argparse import SUPPRESS
from datetime import datetime
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, DjangoHelpFormatter
from django.utils.translation import gettext, gettext_noop, ngettext, pgettext

from ... import locks
from ...celery.config import BeatSettings
from ...celery.schedule_store import RunInfo, recorded_runs, reset_run
from ...exceptions import LockBackendError
from ...monitoring.formatting import json_text, table
from ...utils.text import printable
from ..translated import TranslatedCommand

FAILED = 1  # there is no such entry, or its message could not be sent
UNREACHABLE = 3  # the backend does not answer, or its settings are wrong


class Command(TranslatedCommand):
    help = gettext_noop("Shows when the entries of beat ran, sends one now, and lets one begin anew.")
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own way; it must run when much is broken

    def add_arguments(self, parser: CommandParser) -> None:
        self._add_common(parser)
        actions = parser.add_subparsers(dest="action", metavar="list|run-now|reset", title=gettext("actions"))
        add_action = partial(actions.add_parser, formatter_class=DjangoHelpFormatter)
        listing = add_action("list", help=gettext("when each entry ran, and where it was sent (the default)"))
        running = add_action("run-now", help=gettext("send the message of an entry once; its schedule does not move"))
        resetting = add_action("reset", help=gettext("let an entry count from now on, as if it was new"))
        for action in (running, resetting):
            action.add_argument("name", help=gettext("of the entry, with or without the prefix of its app"))
        for action in (listing, running, resetting):
            self._add_common(action)

    @staticmethod
    def _add_common(parser: Any) -> None:
        # Without a default: the default of an action would replace an option that was given before its name.
        parser.add_argument(
            "--using", default=SUPPRESS, metavar="ALIAS", help=gettext("default: that of DISTRIBUTED_LOCKS_BEAT")
        )
        parser.add_argument("--json", action="store_true", default=SUPPRESS, help=gettext("for programs"))

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            self.using = options.get("using") or BeatSettings.read().alias
            if self.using not in locks:
                raise CommandError(f"There is no backend {self.using!r}. Known: {', '.join(locks)}.", returncode=2)
            self.as_json = options.get("json", False)
            match options.get("action"):
                case "run-now":
                    self._run_now(options["name"])
                case "reset":
                    self._reset(options["name"])
                case _:
                    self._list()
        except (ImproperlyConfigured, LockBackendError) as error:
            raise CommandError(printable(str(error)), returncode=UNREACHABLE) from error

    def _list(self) -> None:
        runs = sorted(recorded_runs(self.using), key=lambda run: run.entry)
        if self.as_json:
            self.stdout.write(json_text([_as_json(run) for run in runs]))
            return
        if runs:
            heading, *lines = table([_heading(), *map(_row, runs)])
            self.stdout.write("\n".join([self.style.MIGRATE_HEADING(heading), *lines]))
        self.stdout.write(ngettext("%(count)d entry", "%(count)d entries", len(runs)) % {"count": len(runs)})

    def _run_now(self, name: str) -> None:
        try:
            from ...celery.run_now import NotSent, run_now
        except ImportError as error:
            raise CommandError("Celery is not installed here.", returncode=FAILED) from error
        try:
            task_id = run_now(name, "manage.py beat_runs run-now")
        except NotSent as error:
            raise CommandError(printable(str(error)), returncode=FAILED) from error
        if self.as_json:
            self.stdout.write(json_text({"entry": name, "task_id": task_id}))
        else:
            done, what = gettext("sent"), gettext("as task %(id)s") % {"id": task_id}
            self.stdout.write(f"{self.style.SUCCESS(done)}  {printable(name)}  {what}")

    def _reset(self, name: str) -> None:
        entry = self._stored_name(name)
        if not reset_run(entry, self.using):
            raise CommandError(f"The backend {self.using!r} knows no entry {name!r}.", returncode=FAILED)
        if self.as_json:
            self.stdout.write(json_text({"entry": entry, "using": self.using, "outcome": "reset"}))
        else:
            done, what = gettext("reset"), gettext("counts from now on")
            self.stdout.write(f"{self.style.SUCCESS(done)}  {printable(entry)}  {what}")

    def _stored_name(self, name: str) -> str:
        """Returns the name with the prefix of its app, if such an entry exists; else the name as it was given, because
        its entry may be unreadable."""
        known = {run.entry for run in recorded_runs(self.using)}
        if name in known:
            return name
        prefix = BeatSettings.read().prefix
        fitting = [f"{prefix}{name}"] if prefix is not None else sorted(e for e in known if e.endswith(f":{name}"))
        fitting = [entry for entry in fitting if entry in known]
        if len(fitting) > 1:
            raise CommandError(f"Several apps have such an entry: {', '.join(fitting)}. Say which.", returncode=2)
        return fitting[0] if fitting else name


def _as_json(run: RunInfo) -> dict[str, Any]:
    return {
        "entry": run.entry, "using": run.using, "last_run_at": _iso(run.last_run_at), "host": run.host or None,
        "next_run_at": _iso(run.next_run_at), "unsent": [_iso(at) for at in run.unsent],
    }  # fmt: skip


def _heading() -> tuple[str, ...]:
    return (
        pgettext("heading of a column", "ENTRY"),
        pgettext("heading of a column", "LAST RUN"),
        pgettext("heading of a column", "SENT BY"),
        pgettext("heading of a column", "NEXT EXPECTED"),
        pgettext("heading of a column", "NOT SENT YET"),
    )


def _row(run: RunInfo) -> tuple[str, ...]:
    times = [at.isoformat(" ", "seconds") if at else "-" for at in (run.last_run_at, run.next_run_at)]
    return run.entry, times[0], run.host or "-", times[1], str(len(run.unsent) or "-")


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
