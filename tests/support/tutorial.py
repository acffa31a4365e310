"""A reader of a tutorial, who does what the page says, in its order: writes files, types in terminals, looks at pages.

These sentences are understood. The block below one is its file, what is typed, or what is shown:

- Create `path`. Add this to the end of `path`.
- In terminal N: what follows each ``$`` is typed, and must exit with 0; the lines below it are all that it prints.
  "and leave it running": the lines are what it prints at first.
- Terminal N shows: it prints these lines after those that were shown before.
- Press Ctrl-C in terminal N.
- Open <address>: the page has these lines in its text. The login of the admin is filled in.
- Choose *action*: all that the page of the admin lists is selected, and the action confirmed.

``…`` stands for anything within a line, and alone in a line for any number of lines. Columns may have other widths.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from html import unescape
from pathlib import Path
from types import TracebackType
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

from django.utils.html import strip_tags

from tests.support import tools
from tests.support.tools import eventually

PATIENCE = 6 * tools.PATIENCE  # seconds; a command may install packages

STEPS = re.compile(
    "|".join(
        (
            r"Create `(?P<create>[^`]+)`",
            r"Add this to the end of `(?P<append>[^`]+)`",
            r"[Ii]n terminal (?P<start>\d), and leave it running:",
            r"[Ii]n terminal (?P<run>\d):",
            r"Terminal (?P<look>\d) shows",
            r"Press Ctrl-C in terminal (?P<interrupt>\d)",
            r"Open <(?P<open>[^>]+)>",
            r"choose \*(?P<choose>[^*]+)\*",
            r"^```\w+\n(?P<block>(?:.*\n)*?)```$",
        )
    ),
    re.MULTILINE,
)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """Kind of each step, what its sentence names, and its block."""
    sentence = ("", "")
    for found in STEPS.finditer(page):
        kind = str(found.lastgroup)
        if kind == "block":
            assert sentence[0], f"no sentence says what this is for:\n{found[kind]}"
            yield *sentence, found[kind]
        assert kind == "block" or not sentence[0], f"{sentence} has no block"
        sentence = ("", "") if kind in ("block", "interrupt") else (kind, found[kind])
        if kind == "interrupt":
            yield kind, found[kind], ""


def comparable(text: str) -> str:
    return "".join(re.sub(r"  +", "  ", line).rstrip() + "\n" for line in text.splitlines())


def pattern_of(shown: str) -> str:
    any_lines, within_a_line = r"(?:.*\n)*?", ".*?"
    return "".join(
        any_lines if line == "…" else within_a_line.join(map(re.escape, line.split("…"))) + r"\n"
        for line in comparable(shown).splitlines()
    )


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Each with what is shown below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


class Terminal:
    """One command at a time; what it prints goes to a file."""

    def __init__(self, folder: Path, log: Path, environment: dict[str, str]) -> None:
        self._folder, self._log, self._environment = folder, log, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = 0

    def start(self, command: str) -> subprocess.Popen[bytes]:
        if self._process:
            self._process.wait(PATIENCE)
        with self._log.open("wb") as log:
            self._seen = 0
            self._process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self._folder, env=self._environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self._process

    def run(self, command: str, shown: str) -> None:
        code = self.start(command).wait(PATIENCE)
        assert code == 0, f"{command} ended with {code}:\n{self._printed()}"
        assert not shown or re.fullmatch(pattern_of(shown), self._printed()), (
            f"{command} is to print\n{shown}\nnot\n{self._printed()}"
        )

    def see(self, shown: str) -> None:
        def found() -> re.Match[str] | None:
            return re.compile(pattern_of(shown)).match(self._printed(), self._seen)

        try:
            self._seen = eventually(found, PATIENCE).end()
        except AssertionError as error:
            raise AssertionError(f"to be printed:\n{shown}\nin\n{self._printed()[self._seen :]}") from error

    def _printed(self) -> str:
        """Whole lines."""
        return comparable(self._log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0])

    def interrupt(self) -> None:
        """As Ctrl-C does: all that runs there."""
        assert self._process
        assert self._process.poll() is None, f"nothing is there to interrupt:\n{self._printed()}"
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(PATIENCE)
        self._seen = len(self._printed())

    def close(self) -> None:
        if self._process and self._process.poll() is None:
            try:
                self.interrupt()  # so that it can end what it has started
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


class Browser:
    """Has cookies, and no scripts."""

    def __init__(self) -> None:
        self._opener = build_opener(HTTPCookieProcessor())
        self._address = self._page = ""

    def open(self, address: str, form: list[tuple[str, str]] | None = None) -> None:
        try:
            answer = self._opener.open(address, urlencode(form).encode() if form else None, timeout=PATIENCE)
        except HTTPError as error:  # which has a page, too
            answer = error
        with answer:
            self._address, self._page = answer.geturl(), answer.read().decode()

    def send(self, **fields: str) -> None:
        """The form of the page, with what it brings."""
        inputs = re.findall(r"<input\b[^>]*>", self._page)
        given = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in inputs]
        brought = [one for one in given if one.get("type") == "hidden" or one.get("name") == "_selected_action"]
        form = {(one["name"], unescape(one["value"])) for one in brought if one["name"] not in fields}
        self.open(self._address, [*form, *fields.items()])

    def log_in(self, name: str, password: str) -> None:
        if 'name="password"' in self._page:
            self.send(username=name, password=password)

    def choose(self, action: str) -> None:
        values = {
            unescape(label): value for value, label in re.findall(r'<option value="(\w+)"[^>]*>([^<]+)', self._page)
        }
        self.send(action=values[action])
        self.send(post="yes")

    @property
    def text(self) -> str:
        lines = unescape(strip_tags(re.sub("</t[dh]>", "  ", self._page))).splitlines()
        return "".join(line.strip() + "\n" for line in lines if line.strip())


class Reader:
    """``with Reader(folder, environment) as reader: reader.follow(page)``. ``folder``: empty, and left full."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._project, logs = folder / "project", folder / "printed"
        self._project.mkdir()
        logs.mkdir()
        self._terminals = {
            str(number): Terminal(self._project, logs / f"terminal{number}", environment) for number in range(1, 5)
        }
        self._browser = Browser()

    def follow(self, page: str) -> None:
        for kind, what, block in steps(page):
            match kind:
                case "create":
                    (self._project / what).write_text(block, encoding="utf-8")
                case "append":
                    with (self._project / what).open("a", encoding="utf-8") as file:
                        file.write("\n" + block)
                case "run" | "start":
                    self._type(self._terminals[what], block, leave_running=kind == "start")
                case "look":
                    self._terminals[what].see(block)
                case "interrupt":
                    self._terminals[what].interrupt()
                case "open":
                    self._browser.open(what)
                    self._browser.log_in("demo", "demo")
                    self._read(block)
                case "choose":
                    self._browser.choose(what)
                    self._read(block)

    @staticmethod
    def _type(terminal: Terminal, block: str, *, leave_running: bool) -> None:
        *first, (last, shown) = commands(block)
        for command, its_lines in first:
            terminal.run(command, its_lines)
        if leave_running:
            terminal.start(last)
            terminal.see(shown)
        else:
            terminal.run(last, shown)

    def _read(self, shown: str) -> None:
        text = comparable(self._browser.text)
        found = re.search("^" + pattern_of(shown), text, re.MULTILINE)
        assert found, f"to be shown:\n{shown}\nin\n{text}"

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as all_of_them:
            for terminal in self._terminals.values():
                all_of_them.callback(terminal.close)
