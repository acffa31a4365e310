"""A terminal, in which commands run as somebody sees them who sits before it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios

from tests.support.forkserver import ROOT, Program
from tests.support.tools import PATIENCE

PYTHON = sys.executable

# Makes the terminal its own, as a login does, before it becomes the command.
LOGIN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class Terminal:
    """What runs in it is its session's leader and in its foreground. ``text``: all it was sent until now."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys, self._inside = pty.openpty()
        self.resize(80, 24)
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def start(self, *command: str) -> None:
        """What Python is to run of ``manage.py`` is forked from a process that has imported the most of it."""
        is_python = command[0] == PYTHON
        self.process = Program(
            command[1:] if is_python else ["-c", LOGIN, *command], like="celery" if is_python else None,
            terminal=is_python,
            cwd=ROOT, stdin=self._inside, stdout=self._inside, stderr=self._inside, start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")},
                "SHOP_LOCKS": self._url, "DJANGO_SETTINGS_MODULE": "example_project.settings", "TERM": "xterm",
            },
        )  # fmt: skip

    def press(self, key: str) -> None:
        os.write(self._keys, bytes([ord(key) & 0x1F]))

    def type(self, line: str) -> None:
        os.write(self._keys, f"{line}\n".encode())

    def shows(self, text: str) -> bool:
        while select.select([self._keys], [], [], 0)[0]:
            self.text += os.read(self._keys, 65536).decode()
        return text in self.text

    @property
    def lines(self) -> list[str]:
        """Without colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.text).splitlines()

    def ended(self) -> int:
        code = self.process.wait(2 * PATIENCE)
        self.shows("")
        return code

    def close(self) -> None:
        if hasattr(self, "process"):
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._keys)
        os.close(self._inside)
