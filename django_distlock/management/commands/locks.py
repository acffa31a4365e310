"""``manage.py locks``: which locks are held, by whom, and whether the stores are in order."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, DjangoHelpFormatter
from django.utils.translation import gettext, gettext_noop, ngettext

from ... import locks
from ...core.forced import force_release
from ...exceptions import InvalidLockName, LockBackendError
from ...models import title_of
from ...monitoring import formatting
from ...monitoring.diagnostics import capabilities_result
from ...monitoring.explain import NO_JOURNAL, as_data, is_empty
from ...monitoring.explain import lines as explained
from ...monitoring.formatting import (
    FLEXIBLE,
    OPTIONAL,
    as_json,
    counts,
    facts,
    in_portions,
    json_text,
    look_with_waiters,
    rows,
    with_waiters,
)
from ...monitoring.inventory import Inventory, Key, SeenLock
from ...monitoring.situation import Situation, gather
from ...names import stored_name
from ...types import CheckResult, Level
from ...utils.clock import sleep
from ...utils.parallel import ask_in_parallel
from ...utils.text import printable
from ..actions import Actions
from ..durations import METAVAR, Duration
from ..moments import moment_before
from ..translated import TranslatedCommand

FAILED = 1  # the lock is not held, the release did not free it, the check found errors, no backend keeps rows
UNREACHABLE = 3  # a backend does not answer, or its settings are wrong
MONTH = 30 * 86_400.0  # seconds
NO_ROWS = gettext_noop("%(backend)s keeps no rows of free locks.")


class Command(TranslatedCommand):
    help = gettext_noop("Shows what is locked, frees locks by force, and checks and tidies the stores that keep them.")
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own way; it must run when much is broken
    epilog = gettext_noop(
        "Exit codes: 0 done; 1 the lock is not held, was not freed, the check found errors, or there are no"
        " rows to prune; 2 wrong usage; 3 a backend does not answer."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        self.base_arguments: list[tuple[Any, Any]] = []
        return super().create_parser(prog_name, subcommand, epilog=gettext(self.epilog), **kwargs)

    def add_base_argument(self, parser: CommandParser, *args: Any, **kwargs: Any) -> None:
        """Keep Django's options, such as ``--settings``, for the actions: they may also stand after an action."""
        self.base_arguments.append((args, kwargs))
        super().add_base_argument(parser, *args, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        self._add_common(parser)
        actions = parser.add_subparsers(
            dest="action", metavar="list|show|explain|release|prune|check", title=gettext("actions"), action=Actions
        )
        add_action = partial(actions.add_parser, formatter_class=DjangoHelpFormatter)
        listing = add_action(
            "list", help=gettext("what is locked now (the default; 'locks PREFIX' is 'locks list PREFIX')")
        )
        listing.add_argument("prefix", nargs="?", default="", help=gettext("only names that begin with this"))
        listing.add_argument(
            "--watch",
            nargs="?",
            type=Duration("0.01s", "1d"),
            const=2.0,
            metavar=METAVAR,
            help=gettext("draw again, every 2 seconds or after this time"),
        )
        showing = add_action("show", help=gettext("one lock in full"))
        showing.add_argument("name", type=_name)
        explaining = add_action(
            "explain", help=gettext("why a lock is held: by whom, who waits, and what happened to it lately")
        )
        explaining.add_argument("name", type=_name)
        explaining.add_argument(
            "--at", type=moment_before, help=gettext("as it was then: 03:12, or 2026-11-26 03:12:30")
        )
        releasing = add_action("release", help=gettext("free locks, whoever holds them"))
        which = releasing.add_mutually_exclusive_group(required=True)
        which.add_argument("name", nargs="?", type=_name, help=gettext("exactly this lock"))
        which.add_argument("--prefix", help=gettext("all locks whose names begin with this"))
        releasing.add_argument(
            "--slot", type=int, metavar="N", help=gettext("of a lock that several may hold, this slot alone")
        )
        releasing.add_argument(
            "--no-input", "--noinput", action="store_false", dest="interactive", help=gettext("do not ask")
        )
        pruning = add_action(
            "prune", help=gettext("delete the rows that databases keep of free locks, old runs and journals")
        )
        pruning.add_argument(
            "--older-than",
            type=Duration(),
            default=MONTH,
            metavar=METAVAR,
            help=gettext("of locks that nobody has held, and runs that ran out, for this time; default: 30d"),
        )
        checking = add_action("check", help=gettext("whether the stores can be trusted with locks; asks them"))
        for action in (listing, showing, explaining, releasing, pruning, checking):
            self._add_common(action)
            for names, options in self.base_arguments:
                super().add_base_argument(action, *names, **{**options, "default": SUPPRESS})

    @staticmethod
    def _add_common(parser: Any) -> None:
        # Without a default: the default of an action would replace an option that was given before its name.
        parser.add_argument("--using", default=SUPPRESS, metavar="ALIAS", help=gettext("only this backend"))
        parser.add_argument("--json", action="store_true", default=SUPPRESS, help=gettext("for programs"))

    def handle(self, *args: Any, **options: Any) -> None:
        using = options.get("using")
        try:
            known = list(locks)
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=UNREACHABLE) from error
        if using is not None and using not in known:
            raise CommandError(f"There is no backend {using!r}. Known: {', '.join(known)}.", returncode=2)
        self.aliases = None if using is None else [using]
        self.as_json = options.get("json", False)
        action: Callable[..., None] = getattr(self, f"do_{options.get('action') or 'list'}")
        try:
            action(options)
            self.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe; at exit Python would write the buffered rest again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def do_list(self, options: dict[str, Any]) -> None:
        prefix, every = options.get("prefix", ""), options.get("watch")
        if every is None:
            return self._list(prefix)
        try:
            while True:
                self._list(prefix, watched=True)
                sleep(every)
        except KeyboardInterrupt:
            return None

    def _list(self, prefix: str, *, watched: bool = False) -> None:
        inventory = Inventory(self.aliases, prefix)
        if self.as_json:
            self._print_json_list([as_json(*lock) for lock in portion] for portion in in_portions(inventory))
        else:
            columns, lines = shutil.get_terminal_size()
            keys = inventory.keys()
            # With --watch, only the locks that fit on the screen are looked up.
            shown = keys[: max(1, lines - 5)] if watched and self.stdout.isatty() else keys
            found = look_with_waiters(inventory, shown)
            text = self._table(found, columns if self.stdout.isatty() else None)
            summary: list[str] = []
            if set(inventory.errors) != set(inventory.aliases):  # otherwise nobody could be asked
                summary += counts(len(found), len(keys) - len(shown), "" if keys else prefix)
            if watched:
                summary.append(gettext("at %(time)s. Ctrl-C ends.") % {"time": time.strftime("%H:%M:%S")})
            if summary:
                text.append(", ".join(summary))
            clear = "\033[H\033[2J" if watched and self.stdout.isatty() else ""
            self.stdout.write(clear + "\n".join(text), ending="\n" if text else "")
        if watched:
            self.stdout.flush()
            for error in inventory.errors.values():
                self.stderr.write(printable(error))
        else:
            self._raise_errors(inventory)

    def _table(self, found: list[tuple[SeenLock, int | None]], columns: int | None) -> list[str]:
        if not found:
            return []
        heading, *lines = formatting.table(rows(found), columns, FLEXIBLE, OPTIONAL)
        return [self.style.MIGRATE_HEADING(heading), *lines]

    def do_show(self, options: dict[str, Any]) -> None:
        inventory = Inventory(self.aliases)
        name = options["name"]
        found = with_waiters(inventory, inventory.leases(Key(alias, name) for alias in inventory.aliases))
        if self.as_json:
            self._print_json([as_json(*lock) for lock in found])
        else:
            self.stdout.write("\n\n".join(map(self._facts, found)), ending="\n" if found else "")
        self._raise_errors(inventory)
        if not found:
            raise CommandError(f"Nobody holds the lock {name!r}.", returncode=FAILED)

    def _facts(self, lock: tuple[SeenLock, int | None]) -> str:
        heading = self.style.MIGRATE_HEADING(title_of(lock[0].info))
        return "\n".join([heading, *formatting.table([(f"  {about}", text) for about, text in facts(*lock)])])

    def do_explain(self, options: dict[str, Any]) -> None:
        inventory, name = Inventory(self.aliases), options["name"]
        asked = inventory.ask_pinned(lambda backend: gather(backend, name, options["at"]))
        found = [situation for situation in asked.values() if situation and not is_empty(situation)]
        if self.as_json:
            self._print_json([as_data(situation) for situation in found])
        else:
            for situation in found:
                self._explain(situation)
        self._raise_errors(inventory)
        if not found:
            raise CommandError("\n".join(_unknown(name, options["at"], asked.values())), returncode=FAILED)

    def _explain(self, situation: Situation) -> None:
        self.stdout.write(self.style.MIGRATE_HEADING(printable(f"{situation.name} ({situation.using})")))
        for heading, lines in explained(situation):
            self.stdout.write(heading)
            for line in lines:
                self.stdout.write(f"  {printable(line)}")

    def do_release(self, options: dict[str, Any]) -> None:
        if options["prefix"] == "" and not options["interactive"]:
            raise CommandError("An empty --prefix means all locks. They are freed after asking alone.", returncode=2)
        if options["prefix"] is not None and options["slot"] is not None:
            raise CommandError("--slot is for one lock, which is given by its name.", returncode=2)
        inventory = Inventory(self.aliases, options["prefix"] or "")
        if options["prefix"] is None:
            leases = inventory.leases(Key(alias, options["name"]) for alias in inventory.aliases)
            leases = [seen for seen in leases if options["slot"] in (None, seen.info.slot)]
            found = with_waiters(inventory, leases)
        else:
            found = look_with_waiters(inventory, inventory.keys())
        if self.as_json and (inventory.errors or not found):
            self._print_json([])
        self._raise_errors(inventory)
        self._require_one_backend({seen.info.using for seen, _ in found})
        if not found:
            what = options["name"] if options["prefix"] is None else f"{options['prefix']}…"
            raise CommandError(f"Nobody holds the lock {what!r}.", returncode=FAILED)
        if options["interactive"]:
            self._ask(found)
        self._report([(seen, self._free(seen)) for seen, _ in found])

    def _require_one_backend(self, aliases: set[str]) -> None:
        if len(aliases) > 1:
            raise CommandError(
                f"There are such locks in {' and '.join(map(repr, sorted(aliases)))}. Say which by --using.",
                returncode=2,
            )

    def _ask(self, found: list[tuple[SeenLock, int | None]]) -> None:
        stream = self.stderr if self.as_json else self.stdout
        question = ngettext(
            "Free %(count)d lock, although somebody may be at work under it? [yes/no]",
            "Free %(count)d locks, although somebody may be at work under them? [yes/no]",
            len(found),
        )
        question %= {"count": len(found)}
        text = "\n".join([*self._table(found, shutil.get_terminal_size().columns), f"{question} "])
        try:
            stream.write(text, style_func=str, ending="")
            stream.flush()
            answer = input()
        except EOFError:
            stream.write("")
            raise CommandError("There is nobody to ask; say --no-input.", returncode=2) from None
        except KeyboardInterrupt:
            stream.write("")
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was freed.", returncode=FAILED)

    @staticmethod
    def _free(seen: SeenLock) -> bool | str:
        try:
            return force_release(seen.info, by="manage.py locks release")
        except LockBackendError as error:
            return printable(str(error))

    def _report(self, outcomes: list[tuple[SeenLock, bool | str]]) -> None:
        errors = [freed for _, freed in outcomes if isinstance(freed, str)]
        if self.as_json:
            words = {True: "freed", False: "changed hands"}
            self._print_json(
                [
                    {**as_json(seen, None), "outcome": words.get(freed, "unknown") if freed in words else "unknown"}
                    for seen, freed in outcomes
                ]
            )
        else:
            for seen, freed in outcomes:
                self._print_outcome(seen, freed)
        if errors:
            raise CommandError("\n".join(dict.fromkeys(errors)), returncode=UNREACHABLE)
        if not all(freed for _, freed in outcomes):
            raise CommandError("Not all were freed.", returncode=FAILED)

    def _print_outcome(self, seen: SeenLock, freed: bool | str) -> None:
        name, word = title_of(seen.info), gettext("freed")
        if freed is True:
            was = gettext("was held by %(holder)s") % {"holder": seen.info.holder or gettext("nobody yet")}
            self.stdout.write(f"{self.style.SUCCESS(word)}  {name}  {was}")
        elif freed is False:
            kept, was = gettext("kept"), gettext("was freed or changed hands meanwhile")
            self.stdout.write(f"{self.style.WARNING(formatting.padded(kept, formatting.width(word)))}  {name}  {was}")
        else:
            word = gettext("unknown")
            self.stdout.write(f"{self.style.ERROR(word)}  {name}")

    def do_prune(self, options: dict[str, Any]) -> None:
        inventory, age = Inventory(self.aliases), options["older_than"]
        deleted = inventory.ask_each(dict.fromkeys(inventory.aliases, lambda backend: backend.prune(age)))
        if self.as_json:
            reasons = {alias: NO_ROWS % {"backend": type_of(alias)} for alias in deleted} | inventory.errors
            self._print_json(
                [
                    {"using": alias, "deleted": rows, "reason": reasons[alias] if rows is None else None}
                    for alias, rows in deleted.items()
                ]
            )
        else:
            for alias, rows in deleted.items():
                if rows is not None:
                    text = formatting.deleted(rows, age)
                else:
                    text = inventory.errors.get(alias) or gettext(NO_ROWS) % {"backend": type_of(alias)}
                self.stdout.write(f"{alias}: {text}")
        self._raise_errors(inventory)
        if not any(rows is not None for rows in deleted.values()):
            raise CommandError("There is nothing to prune: only the database backend keeps rows.", returncode=FAILED)

    def do_check(self, options: dict[str, Any]) -> None:
        inventory = Inventory(self.aliases)
        found = ask_in_parallel({alias: partial(_check, alias) for alias in inventory.aliases})
        if self.as_json:
            self._print_json(
                {
                    alias: [
                        {
                            "level": item.level,
                            "about": item.about,
                            "message": item.message,
                            "hint": item.hint,
                            **({"data": item.data} if item.data else {}),
                        }
                        for item in results
                    ]
                    for alias, results in found.items()
                }
            )
        else:
            for alias, results in found.items():
                self.stdout.write(self.style.MIGRATE_HEADING(printable(f"{alias}: {type_of(alias)}")))
                for item in results:
                    self._print_result(item)
        self._raise_errors(inventory)
        if errors := sum(item.is_error for results in found.values() for item in results):
            raise CommandError(f"{errors} error(s).", returncode=FAILED)

    def _print_result(self, item: CheckResult) -> None:
        styles = {Level.OK: self.style.SUCCESS, Level.WARNING: self.style.WARNING, Level.ERROR: self.style.ERROR}
        level = formatting.padded(item.level, 7)
        styled = styles[item.level](level) if item.level in styles else level
        self.stdout.write(f"  {styled}  {formatting.padded(item.about, 11)}  {printable(item.message)}")
        if item.hint and item.level is not Level.OK:
            self.stdout.write(f"{' ' * 24}{printable(item.hint)}")

    def _print_json(self, data: Any) -> None:
        self.stdout.write(json_text(data))

    def _print_json_list(self, portions: Iterable[list[Any]]) -> None:
        """Print one list in portions, because all of it might not fit into memory."""
        between = "["
        try:
            for items in filter(None, portions):
                self.stdout.write(f"{between}{json_text(items)[1:-1]}", ending="")
                between = ", "
        finally:  # the output is valid JSON even after a failure
            self.stdout.write("[]" if between == "[" else "]")

    def _raise_errors(self, inventory: Inventory) -> None:
        if inventory.errors:
            raise CommandError("\n".join(map(printable, inventory.errors.values())), returncode=UNREACHABLE)


def _unknown(name: str, at: float | None, asked: Iterable[Situation | None]) -> Iterator[str]:
    """Yields the sentences about a lock of which nothing is known."""
    if at is None:
        yield f"Nobody holds the lock {name!r} or waits for it, and no journal has it."
    else:
        yield f"No journal tells of the lock {name!r} by then."
    yield from (NO_JOURNAL % {"using": one.using} for one in asked if one and one.entries is None)


def type_of(alias: str) -> str:
    try:
        return type(locks[alias]).__name__
    except ImproperlyConfigured:
        return "not usable"


def _check(alias: str) -> list[CheckResult]:
    try:
        return [*locks[alias].check(), capabilities_result(locks[alias])]
    except ImproperlyConfigured as error:
        return [CheckResult(Level.ERROR, "settings", str(error))]


def _name(text: str) -> str:
    try:
        return stored_name(text)
    except InvalidLockName as error:
        raise ArgumentTypeError(str(error)) from error
