"""uWSGI and gunicorn, which load the application in a master and fork: what the master did with locks before."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from django_distlock import locks
from tests.support.programs import ROOT
from tests.support.requirements import missing
from tests.support.tools import eventually

pytestmark = pytest.mark.seconds(8)

STARTS_WITHIN = 60.0  # seconds


class Server:
    def __init__(self, command, folder, url, master):
        self.folder, self.socket = folder, folder / "s"
        environment = {
            **os.environ,
            "LOCKS": url,
            "MASTER": master,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        }
        command = [argument.format(socket=self.socket, folder=folder) for argument in command]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        eventually(self.answers, STARTS_WITHIN)

    def log(self):
        return (self.folder / "log").read_text(errors="replace")

    def answers(self):
        assert self.process.poll() is None, self.log()
        try:
            return self.ask("pid")
        except (OSError, ValueError):
            return False

    def ask(self, path):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(self.socket))
            connection.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
            with connection.makefile("rb") as answer:
                return json.loads(answer.read().partition(b"\r\n\r\n")[2])

    def ask_both(self, path):
        """Each of its two workers, at the same time."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self.ask, [path, path]))

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        print(self.log()[-3000:])  # shown when a test fails


@pytest.fixture
def serve(valkey, valkey_locks, tmp_path):
    started = []

    def start(*command, master):
        started.append(Server(command, tmp_path, valkey.url, master))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def uwsgi(serve):
    program = shutil.which("uwsgi", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        missing("uwsgi", "pip install uwsgi, which compiles it with a C compiler")

    def start(*options, master):
        return serve(
            program, "--master", "--processes", "2", "--http-socket", "{socket}", "--die-on-term",
            "--module", "tests.support.forking_app", "--need-app", *options, master=master,
        )  # fmt: skip

    return start


class TestUwsgi:
    """Forks in C, and calls Python's hooks by option alone."""

    @pytest.mark.parametrize("options", [[], ["--threads", "2"]], ids=["default", "threads"])
    def test_workers_never_hold_a_lock_together(self, uwsgi, options):
        server = uwsgi("--enable-threads", *options, master="contends")
        for found in server.ask_both("contend"):
            assert found.keys() == {"pid", "held"}

    def test_workers_renew(self, uwsgi):
        server = uwsgi("--enable-threads", master="holds")
        assert server.ask("renewed")["state"] == "held"

    def test_a_worker_that_ends_frees_nothing_of_its_master(self, uwsgi):
        server = uwsgi("--enable-threads", "--max-requests", "2", "--min-worker-lifetime", "1", master="holds")
        [[before]] = locks["default"].look(["leader"])
        pids = set()

        def has_ended():
            pids.add(server.ask("pid")["pid"])
            time.sleep(0.1)
            return len(pids) > 2

        eventually(has_ended, 60)
        assert locks["default"].look(["leader"])[0][0].token == before.token


class TestGunicorn:
    def test_workers_under_gevent_leave_the_lock_of_their_master_alone(self, serve, tmp_path):
        """A fork copies greenlets, and with them what the master has in the place of threads."""
        (tmp_path / "settings.py").write_text(
            "from gevent import monkey\nmonkey.patch_all()\ncontrol_socket_disable = True\n"
        )
        server = serve(
            sys.executable, "-m", "gunicorn", "--bind", "unix:{socket}", "--config", "{folder}/settings.py",
            "--worker-class", "gevent", "--workers", "2", "--preload", "tests.support.forking_app:application",
            master="holds",
        )  # fmt: skip
        [[before]] = locks["default"].look(["leader"])
        until = time.monotonic() + 4  # twice its TTL
        while time.monotonic() < until:
            assert locks["default"].look(["leader"])[0][0].token == before.token
            time.sleep(0.1)
        assert "was lost" not in server.log()
        assert "begins again" not in server.log()
