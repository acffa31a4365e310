"""``manage.py runlocked NAME -- program``: runs a program only while it holds a lock.

With ``--leader`` it keeps the program running, on one of all hosts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import SUPPRESS, ArgumentTypeError
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext, gettext_noop

from ... import Lock, locks
from ...core.leader import Leadership, unbounded
from ...core.lease import Lease
from ...exceptions import InvalidLockName, LockBackendError, LockNotAcquired
from ...names import stored_name
from ...options import settled
from ...types import State
from ...utils.clock import clock, sleep
from ..durations import METAVAR, Duration
from ..translated import TranslatedCommand

# Exit codes, as in sysexits.h and shells
STORE_DOWN = 69
BUSY = 75
LOST = 76
NOT_EXECUTABLE = 126
NOT_FOUND = 127
BY_SIGNAL = 128
EXIT_CODES = {
    "store_down": STORE_DOWN, "busy": BUSY, "lost": LOST, "not_executable": NOT_EXECUTABLE, "not_found": NOT_FOUND,
    "by_signal": BY_SIGNAL,
}  # fmt: skip

# Windows has the first and the third of these.
FORWARDED = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
SENT_BY_TERMINAL = [number for number in FORWARDED if number.name in ("SIGINT", "SIGQUIT")]
ENDING = {*SENT_BY_TERMINAL, signal.SIGTERM}  # after these the program is not started again
BOUNDS = ("wait", "min_hold", "max_hold", "on_busy", "busy_exit_code")  # options that a leader does not have
POLL_INTERVAL = 0.1  # seconds


class Command(TranslatedCommand):
    help = gettext_noop(
        "Runs a program while holding a lock. It finds the lock's name in DISTLOCK_NAME and the fencing number in"
        " DISTLOCK_FENCE. If the lock is lost the program is ended: SIGTERM, and SIGKILL after the grace."
    )
    requires_system_checks: list[str] = []  # noqa: RUF012 - Django's own way
    epilog = gettext_noop(
        "Exit codes: the program's own; %(by_signal)d + n if signal n ended it; %(busy)d the lock is busy, unless"
        " --on-busy or --busy-exit-code say otherwise; %(lost)d the lock was lost; %(store_down)d the store does not"
        " answer; %(not_found)d or %(not_executable)d no such program."
    )

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(prog_name, subcommand, epilog=gettext(self.epilog) % EXIT_CODES, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help=gettext("of the lock"))
        parser.add_argument("program", nargs="+", help=gettext("and its arguments, after --"))
        parser.add_argument("--using", default="default", metavar="ALIAS", help=gettext("of the backend"))
        parser.add_argument(
            "--leader", action="store_true",
            help=gettext(
                "keep the program running on one host of all: wait for the lock as long as it takes, start the program"
                " again when it ends, and stand by again when the lock is lost"
            ),
        )  # fmt: skip
        parser.add_argument(
            "--pause", type=Duration(most="1d"), default=5.0, metavar=METAVAR,
            help=gettext(
                "with --leader, after a program that ended by itself; another host may lead meanwhile; default: 5s"
            ),
        )  # fmt: skip
        parser.add_argument(
            "--wait",
            type=Duration(or_forever=True),
            default=SUPPRESS,
            metavar=METAVAR,
            help=gettext("for a busy lock; 'forever'; default: not at all"),
        )
        parser.add_argument(
            "--on-busy",
            choices=["fail", "skip"],
            default=SUPPRESS,
            help=gettext(
                "fail, the default, ends with exit code %(busy)d; skip ends with 0 and says so, but not with -v 0"
            )
            % EXIT_CODES,
        )
        parser.add_argument(
            "--busy-exit-code", type=_exit_code, default=SUPPRESS, metavar="CODE",
            help=gettext("to end with if the lock is busy, from 0 to 255"),
        )  # fmt: skip
        parser.add_argument(
            "--min-hold", type=Duration(), default=SUPPRESS, metavar=METAVAR,
            help=gettext("for which the lock stays taken after it was acquired, also when the program ends sooner"),
        )  # fmt: skip
        parser.add_argument(
            "--ttl", type=Duration(), default=SUPPRESS, metavar=METAVAR,
            help=gettext("that the store keeps it without renewal"),
        )  # fmt: skip
        parser.add_argument(
            "--max-hold", type=Duration(or_forever=True), default=SUPPRESS, metavar=METAVAR,
            help=gettext("after which it is renewed no more; 'forever': no bound"),
        )  # fmt: skip
        parser.add_argument(
            "--grace", type=Duration(most="1d"), default=10.0, metavar=METAVAR,
            help=gettext("between SIGTERM and SIGKILL; default: 10s"),
        )  # fmt: skip

    def handle(
        self, *, name: str, program: list[str], using: str, grace: float, leader: bool, pause: float, **options: Any
    ) -> None:
        if leader and (given := [f"--{option.replace('_', '-')}" for option in BOUNDS if option in options]):
            raise CommandError(f"{given[0]} is not for --leader, which waits and leads without a bound.", returncode=2)
        try:
            mutex = self._lock(name, using, Path(program[0]).name, leader, options)
        except (InvalidLockName, ValueError) as error:
            raise CommandError(str(error), returncode=2) from error
        try:
            with Signals() as signals:
                hold = partial(self._hold, mutex, program, signals, grace, pause if leader else None, options)
                try:
                    lease, code = hold()
                except LockBackendError as error:
                    if not locks[using].make_missing(error):
                        raise
                    lease, code = hold()
        except LockNotAcquired as error:
            self._end_busy(error, options)
            return
        except LockBackendError as error:
            raise CommandError(str(error), returncode=STORE_DOWN) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from error
        except Interrupted as error:
            raise CommandError("Ended without the lock.", returncode=BY_SIGNAL + error.number) from error
        if lease.state is State.LOST:
            raise CommandError(f"The lock {name!r} was lost while {program[0]} ran.", returncode=LOST)
        if code:
            raise CommandError(f"{program[0]} {_end(code)}.", returncode=code if code > 0 else BY_SIGNAL - code)

    def _lock(self, name: str, using: str, label: str, leader: bool, options: dict[str, Any]) -> Lock:
        names = ("wait", "ttl", "min_hold", "max_hold")
        given: dict[str, Any] = {option: options[option] for option in names if option in options}
        # "log": when the lock is released, the program has ended, and its exit code says more.
        given |= {"on_lost": "log", "label": label}
        if leader:
            return Leadership(stored_name(name, own=False), using, unbounded(**given))
        # "raise": a command whose name says "locked" never runs a program without its lock.
        return Lock(stored_name(name, own=False), using, settled(**{"wait": 0.0, "on_unavailable": "raise", **given}))

    def _hold(
        self,
        mutex: Lock,
        program: list[str],
        signals: Signals,
        grace: float,
        pause: float | None,
        options: dict[str, Any],
    ) -> tuple[Lease, int]:
        """Returns the last lease under which the program ran, and its exit code.

        ``pause``: seconds until a leader runs the program again; None: it is not a leader.
        """
        while True:
            with mutex as lease:
                if pause is not None and options["verbosity"]:
                    self.stderr.write(f"Leads {lease.name!r}, term {lease.fence}.", style_func=str)
                code = self._run(program, lease, signals, grace)
            if pause is None or signals.have_ended(code):
                return lease, code
            if lease.state is not State.LOST:
                self.stderr.write(f"{program[0]} {_end(code)}; standing by again in {pause:g} s.")
                sleep(pause)

    def _end_busy(self, error: LockNotAcquired, options: dict[str, Any]) -> None:
        is_skipped, code = options.get("on_busy") == "skip", options.get("busy_exit_code")
        if not is_skipped:
            raise CommandError(str(error), returncode=BUSY if code is None else code) from error
        if options["verbosity"] > 0:
            self.stderr.write(f"Skipped: {error}", style_func=str)
        if code:
            sys.exit(code)

    def _run(self, program: list[str], lease: Lease, signals: Signals, grace: float) -> int:
        environment = {**os.environ, "DISTLOCK_NAME": lease.name, "DISTLOCK_FENCE": str(lease.fence)}
        try:
            child = signals.start(program, environment)
        except FileNotFoundError as error:
            raise CommandError(f"There is no program {program[0]!r}.", returncode=NOT_FOUND) from error
        except OSError as error:
            raise CommandError(f"{program[0]!r} cannot be run: {error}.", returncode=NOT_EXECUTABLE) from error
        while True:
            try:
                return child.wait(POLL_INTERVAL)
            except subprocess.TimeoutExpired:
                if lease.state is State.LOST:
                    self.stderr.write(f"The lock {lease.name!r} was lost; ending process {child.pid}.")
                    return child.end(grace)


class Child:
    """The process of the program, and the processes that it has started.

    Without a terminal they are a process group of their own. A terminal has one foreground group, which reads from it.
    So with a terminal the program stays in our group, and the processes that it has started cannot be reached. On
    Windows they cannot be reached either.
    """

    def __init__(self, program: list[str], environment: dict[str, str]) -> None:
        self._is_group = hasattr(os, "killpg") and not _has_terminal()
        self._process = subprocess.Popen(program, env=environment, process_group=0 if self._is_group else None)
        self.pid = self._process.pid
        self.wait = self._process.wait

    def send_signal(self, number: int) -> None:
        if not self._is_group:
            self._process.send_signal(number)
        elif self._process.poll() is None:
            self._signal_group(number)

    def end(self, grace: float) -> int:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds. Returns the program's exit code."""
        deadline = clock() + grace
        self.send_signal(signal.SIGTERM)
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._is_group:
            while (is_alive := self._signal_group(0)) and clock() < deadline:
                sleep(POLL_INTERVAL)
            if is_alive:
                self._signal_group(signal.SIGKILL)
        return self._process.wait()

    def _signal_group(self, number: int) -> bool:
        """Send the signal to the group. Returns whether any process of the group is alive."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # all processes belong to other users, or have ended and were not waited for yet
            return number == 0
        return True


class Interrupted(BaseException):
    """A signal came during the wait for the lock. It is not an Exception, because other code might catch that."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """A context in which signals end the wait for the lock, or are forwarded to the program when it runs."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._forwarded: set[int] = set()
        self._starting = False
        self._pending: list[int] = []  # signals that came while the program was being started
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # so that nohup still works
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def start(self, program: list[str], environment: dict[str, str]) -> Child:
        self._starting = True
        self._child = Child(program, environment)
        self._starting = False
        while self._pending:
            self._child.send_signal(self._pending.pop(0))
        return self._child

    def have_ended(self, code: int) -> bool:
        """Note that the program has ended. Returns whether a signal told it to end, or ended it.

        If not, the next signal ends the next wait, as it does the first.
        """
        self._child = None
        return bool(self._forwarded & ENDING) or -code in self._forwarded

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._child is None and not self._starting:
            raise Interrupted(number)
        self._forwarded.add(number)
        if self._child is None:
            self._pending.append(number)
        elif not (number in SENT_BY_TERMINAL and _is_in_foreground()):
            self._child.send_signal(number)


def _has_terminal() -> bool:
    return _foreground() is not None


def _is_in_foreground() -> bool:
    """Returns whether Ctrl-C in the terminal reaches the program, too: it is in the same process group, or console."""
    return not hasattr(os, "getpgrp") or _foreground() == os.getpgrp()


def _foreground() -> int | None:
    """Returns the foreground process group of the terminal; None without a terminal, and on Windows."""
    if not hasattr(os, "tcgetpgrp"):
        return None
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return None
    finally:
        os.close(terminal)


def _end(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _exit_code(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 255):
        raise ArgumentTypeError(f"{text!r} is no exit code: write a number from 0 to 255.")
    return int(text)
