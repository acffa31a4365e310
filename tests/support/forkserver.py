"""Python programs that start in a few milliseconds: forked from a process that has imported what they need.

Each is a process of its own, as one that ``subprocess`` starts, with its pid, arguments, environment, folder, streams,
session and exit code. Three things differ: its parent is the server, nothing happens before its first line, and its
libraries do nothing more when it exits (see ``kept_libraries``). Programs for which that counts are started by
``subprocess``. On other systems than Linux all are.

Run as a program, it is the server.
"""

from __future__ import annotations

import fcntl
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import types
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

LIBRARIES = """
asyncio celery.schedules django.contrib.admin.sites django.contrib.auth.hashers django.contrib.auth.management
django.contrib.auth.password_validation django.contrib.messages.context_processors django.contrib.sessions.backends.base
django.contrib.staticfiles.handlers django.core.management.commands.check django.core.management.commands.makemigrations
django.core.management.commands.migrate django.db.backends.postgresql.base django.db.backends.sqlite3.base
django.views.debug hiredis logging.config psycopg redis.asyncio tests.support.quick_redis uuid
"""
PACKAGE = """
django_distlock django_distlock.backends.redis django_distlock.backends.redis.cluster.backend django_distlock.checks
django_distlock.core.group django_distlock.core.journal_writer django_distlock.core.leader django_distlock.core.service
django_distlock.decorators django_distlock.monitoring.inventory
"""
CELERY = """
celery.apps.beat celery.apps.worker celery.backends.redis celery.bin.beat celery.bin.celery celery.bin.worker
celery.concurrency.prefork celery.concurrency.solo celery.concurrency.thread celery.fixups.django kombu.transport.redis
"""
IMPORTED = {
    "libraries": LIBRARIES,  # for programs with a copy of the package
    "simulation": "tests.simulation.engine.libraries",  # so, too, and with a hash seed that does not change
    "django": PACKAGE,
    "celery": CELERY,
}
FORKED_FROM = {"django": "libraries", "celery": "django"}  # which has imported what that has, too


class Program(subprocess.Popen[Any]):
    """``Popen([sys.executable, *arguments], …)``.

    ``like``: what its process has imported; None: nothing. ``terminal``: stdin is one, and becomes that of its session.
    """

    _told: socket.socket | None = None  # of its end; None: it is a child of this process

    def __init__(
        self, arguments: Sequence[object], *, like: str | None = "django", terminal: bool = False, **options: Any
    ) -> None:
        self._like, self._terminal = like, terminal
        super().__init__([sys.executable, *map(str, arguments)], **options)

    def _execute_child(self, *arguments: Any) -> None:
        if sys.platform != "linux" or self._like is None:
            super()._execute_child(*arguments)
            return
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid, self._told = server(self._like).start(
            [number if stream == -1 else stream for number, stream in enumerate(streams)],
            arguments=self.args[1:],
            environment=dict(os.environ if given["env"] is None else given["env"]),
            folder=str(given["cwd"] or Path.cwd()),
            new_session=given["start_new_session"],
            terminal=self._terminal,
        )
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in PIPES))

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._told is None:
            return super()._internal_poll(*arguments, **more)
        with suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._told is None:
            return super()._try_wait(wait_flags)
        try:
            status = self._told.recv(SIZE, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        assert status, "the server of programs has ended"
        self._told.close()
        return self.pid, int.from_bytes(status, "big")


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
SIZE = 8  # bytes, of a number that is told


def run(arguments: Sequence[object], *, timeout: float, check: bool = True, **options: Any) -> Any:
    """``subprocess.run([sys.executable, *arguments], …)`` of such a program, whose output is captured as text."""
    with Program(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as program:
        try:
            said = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(program.args, program.returncode, *said)
    if check:
        done.check_returncode()
    return done


def end_all(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Whatever they do; and close what tests read of them."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


class ForkServer:
    """Forks for this process and for those that are forked from it, and ends with the last of them."""

    def __init__(self, like: str) -> None:
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = Program(
                [__file__, *IMPORTED[like].split()],
                like=FORKED_FROM.get(like),
                cwd=ROOT,
                stdin=other,
                env={**os.environ, "PYTHONHASHSEED": "0"} if like == "simulation" else None,
            )

    def start(self, streams: Sequence[int], **program: Any) -> tuple[int, socket.socket]:
        """The pid, and what tells the status with which the program ends."""
        request = json.dumps(program).encode()
        told, tell = socket.socketpair()
        try:
            with tell:
                socket.send_fds(self._channel, [b"!"], [tell.fileno(), *streams])
            told.sendall(len(request).to_bytes(SIZE, "big") + request)
            return int.from_bytes(_read(told, SIZE), "big"), told
        except BaseException:
            told.close()
            raise


_servers: dict[str, ForkServer] = {}
_starting = threading.RLock()  # two threads may ask for the first program at once; one server may start another


def server(like: str) -> ForkServer:
    with _starting:
        return _servers.get(like) or _servers.setdefault(like, ForkServer(like))


def _read(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            raise EOFError("the other side has ended")
        parts += part
    return bytes(parts)


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Returns in a forked program, with what it is; else never."""
    living: dict[int, tuple[int, socket.socket]] = {}  # by what becomes readable at its end: pid, and whom to tell
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in living:
                poll.unregister(ready)
                os.close(ready)
                _tell_of_end(*living.pop(ready))
                continue
            _, files, _, _ = socket.recv_fds(channel, 1, 4)
            if not files:
                os._exit(0)  # all who wanted programs have ended
            tell, streams = socket.socket(fileno=files[0]), files[1:]
            program = _wanted(tell)
            if program and not (pid := os.fork()):
                for one in (channel, tell, *(other for _, other in living.values())):
                    one.close()
                for end in living:
                    os.close(end)
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return program
            for stream in streams:
                os.close(stream)
            if program:
                _tell(tell, pid)
                end = os.pidfd_open(pid)
                living[end] = pid, tell
                poll.register(end, select.POLLIN)


def _wanted(tell: socket.socket) -> dict[str, Any] | None:
    """What the program is; None: who wants it ended before it had said so."""
    try:
        return json.loads(_read(tell, int.from_bytes(_read(tell, SIZE), "big")))
    except EOFError:
        tell.close()
        return None


def _tell_of_end(pid: int, tell: socket.socket) -> None:
    with tell:
        _tell(tell, os.waitpid(pid, 0)[1])


def _tell(who: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # it has ended
        who.sendall(number.to_bytes(SIZE, "big"))


def _become(program: dict[str, Any]) -> None:
    """What the interpreter does before the first line of a program, and the program itself."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if program["new_session"]:
        os.setsid()
    if program["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    time.tzset()
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        stream = open(number, mode, closefd=False, errors="backslashreplace" if number == 2 else None)  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper) and number == 2:
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    arguments = program["arguments"]
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])
        del arguments[:2]
    match arguments:
        case ["-c", code, *rest]:
            sys.argv, file, place = ["-c", *rest], "<string>", ""
        case ["-m", *_]:
            sys.argv, place = arguments[1:], program["folder"]
        case [file, *_]:
            sys.argv, code, place = arguments, Path(file).read_text(encoding="utf-8"), str(Path(file).parent)
    sys.path[:0] = [*([] if "PYTHONSAFEPATH" in os.environ else [place]), *_paths()]
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = file
            exec(compile(code, file, "exec"), main.__dict__)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            end_with(error.code or 0)
        raise
    end_with(0)


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the tests
    if not sys.flags.safe_path:
        sys.path[0] = str(ROOT)
    from tests.support.kept_libraries import end_with, keep_libraries

    for one_module in sys.argv[1:]:
        __import__(one_module)
    assert threading.active_count() == 1
    sys.path[:] = [path for path in sys.path if path not in (str(ROOT), *_paths())]
    import gc

    keep_libraries()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # as in tests/conftest.py
    _become(_serve(socket.socket(fileno=0)))
