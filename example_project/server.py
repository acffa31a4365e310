"""The whole shop for one run: a Valkey server if it keeps the locks, a new database, and gunicorn. All is removed after
the run."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import django
from django.core.management import call_command

from .valkey import Valkey

ROOT = Path(__file__).resolve().parent.parent
STARTS_WITHIN = 120.0  # seconds
HOST = "127.0.0.1"


class Shop(NamedTuple):
    """An open shop."""

    port: int
    gunicorn: subprocess.Popen[bytes]


@contextmanager
def open_shop(port: int = 0) -> Iterator[Shop]:
    """Gives a shop at the port; 0 lets the kernel choose one. Sets up Django in this process, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with (
        tempfile.TemporaryDirectory(prefix="shop-") as folder,
        socket.create_server((HOST, port)) as listener,
        ExitStack() as running,
    ):
        if _backend() == "redis":
            print("Starting Valkey", flush=True)
            with hidden_from_ctrl_c():
                valkey = running.enter_context(Valkey())
            os.environ["SHOP_LOCKS"] = valkey.url
            os.environ["SHOP_BROKER"] = f"redis+socket://{valkey.socket}?virtual_host=1"
        os.environ["SHOP_DATABASE"] = str(Path(folder, "shop.sqlite3"))
        os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
        print("Making a database", flush=True)
        django.setup()
        call_command("migrate", verbosity=0)
        call_command("fill_shop")
        print("Starting gunicorn", flush=True)
        with hidden_from_ctrl_c():
            gunicorn = _gunicorn(listener)
            running.callback(stop, gunicorn)
        port = listener.getsockname()[1]
        _wait_until_open(gunicorn, port)
        yield Shop(port, gunicorn)


def _backend() -> str:
    backend = os.environ.get("SHOP_BACKEND") or "redis"
    if backend not in ("redis", "database"):
        sys.exit(f"BACKEND is {backend!r}; choose redis or database.")
    return backend


def _end(number: int, _: FrameType | None) -> NoReturn:
    """Exit through every ``finally``, so that no process is left."""
    sys.exit(128 + number)


@contextmanager
def hidden_from_ctrl_c() -> Iterator[None]:
    """Processes that are started in this context ignore the terminal's Ctrl-C. Their parent ends them, in order."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _gunicorn(listener: socket.socket) -> subprocess.Popen[bytes]:
    """Start gunicorn. It inherits the socket, so no other program can take the port."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "gunicorn", "--config", "python:example_project.gunicorn_settings",
            "--bind", f"fd://{listener.fileno()}",
        ],
        cwd=ROOT,
        pass_fds=[listener.fileno()],
    )  # fmt: skip


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(HOST, port, timeout=30)
        try:
            connection.request("GET", "/")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    raise RuntimeError("The shop did not open; what gunicorn says stands above.")


def stop(process: subprocess.Popen[Any]) -> None:
    with hidden_from_ctrl_c():  # impatient people press it twice
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()  # gunicorn's workers notice it and end by themselves
            process.wait()
