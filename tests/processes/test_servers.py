"""Responses that take their time, through gunicorn and uvicorn: the lock is held until they are made or closed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from django_distlock import lock, locks
from tests.support.programs import ROOT
from tests.support.tools import PATIENCE, eventually

SIZE = 8_000_000  # more than the buffers of a socket take

GUNICORN = ["-m", "gunicorn", "--bind", "unix:{socket}", "--config", "{config}", "tests.support.streaming_project:wsgi"]
SERVERS = {
    "gunicorn": [*GUNICORN, "--worker-class", "sync"],
    "gunicorn-threads": [*GUNICORN, "--worker-class", "gthread", "--threads", "4"],
    "uvicorn": ["-m", "uvicorn", "--uds", "{socket}", "tests.support.streaming_project:asgi"],
}


class Server:
    def __init__(self, kind, url, folder):
        self.folder, self.go, self.socket = folder, folder / "go", folder / "s"
        (folder / "file").write_bytes(b"x" * SIZE)
        self.resources = ExitStack()
        log = self.resources.enter_context((folder / "log").open("wb"))
        environment = {**os.environ, "LOCKS": url, "GO": str(self.go), "FILE": str(folder / "file")}
        config = folder / "gunicorn_settings.py"
        config.write_text("control_socket_disable = True\n")  # an option of newer releases
        command = [argument.format(socket=self.socket, config=config) for argument in SERVERS[kind]]
        self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=log)

    def answers(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            self.ask("nothing").close()
        except OSError:
            return False
        return True

    def ask(self, path):
        """A connection on which the beginning of the answer was read."""
        connection = self.send(path)
        assert connection.recv(10)
        return connection

    def send(self, path):
        connection = self.resources.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(PATIENCE)
        connection.connect(str(self.socket))
        connection.sendall(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return connection

    def stop(self):
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.resources.close()


@pytest.fixture(scope="module")
def running(request, valkey, tmp_path_factory):
    server = Server(request.param, valkey.url, tmp_path_factory.mktemp("s"))
    eventually(server.answers, 30)
    yield server
    server.stop()


@pytest.fixture
def server(running, valkey_locks):
    yield running
    running.go.touch()
    eventually(lambda: not is_held())
    running.go.unlink()


def on(*servers):
    return pytest.mark.parametrize("running", servers, indirect=True)


on_every = on(*SERVERS)
on_wsgi = on("gunicorn", "gunicorn-threads")  # under ASGI Django makes a list of a plain iterator before it is sent
on_asgi = on("uvicorn")


def is_held():
    return bool(list(locks["default"].held()))


def rest(connection):
    received = b""
    with connection:
        while more := connection.recv(1_000_000):
            received += more
    return received


@on_wsgi
def test_while_a_stream_is_sent(server):
    connection = server.ask("stream")
    assert is_held()
    server.go.touch()
    assert b"end" in rest(connection)
    eventually(lambda: not is_held())


@on_asgi
@pytest.mark.parametrize("path", ["astream", "async-view-astream"])
def test_while_an_async_stream_is_sent(server, path):
    connection = server.ask(path)
    assert is_held()
    assert b" 409 " in rest(server.send(path))
    server.go.touch()
    assert b"end" in rest(connection)
    eventually(lambda: not is_held())


@on_wsgi
def test_while_a_file_is_sent(server):
    connection = server.ask("file")
    assert is_held()
    assert len(rest(connection)) >= SIZE
    eventually(lambda: not is_held())


@on_asgi
def test_while_a_file_is_read(server):
    connection = server.ask("file")
    eventually(lambda: not is_held())
    assert len(rest(connection)) >= SIZE


@on_every
@pytest.mark.parametrize("path", ["template", "stream", "async-slow"])
def test_while_the_content_is_made(server, path):
    connection = server.send(path)
    eventually(is_held)
    server.go.touch()
    assert b"end" in rest(connection)
    eventually(lambda: not is_held())


@on_every
def test_a_template_that_fails(server):
    connection = server.send("failing-template")
    eventually(is_held)
    server.go.touch()
    assert b" 500 " in rest(connection)
    eventually(lambda: not is_held())


@on_every
@pytest.mark.parametrize("path", ["failing-stream", "failing-astream"])
def test_a_stream_that_fails(server, path):
    """Under ASGI nobody closes it, and a server that is idle collects no garbage."""
    rest(server.send(path))
    eventually(lambda: not is_held())


@on_every
def test_while_a_client_reads_slowly_what_was_rendered(server):
    """More than the buffers of a socket take."""
    connection = server.send("long-template")
    eventually(is_held)
    server.go.touch()
    eventually(lambda: not is_held())
    assert len(rest(connection)) >= SIZE


@on_wsgi
def test_a_client_that_goes_away_while_a_stream_is_sent(server):
    connection = server.ask("stream")
    assert is_held()
    connection.close()
    eventually(lambda: not is_held())
    assert not server.go.exists()


@on_asgi
@pytest.mark.parametrize("path", ["astream", "async-view-astream"])
def test_a_client_that_goes_away_while_an_async_stream_is_sent(server, path):
    connection = server.ask(path)
    assert is_held()
    connection.close()
    eventually(lambda: not is_held())
    assert not server.go.exists()


@on_every
def test_a_client_that_goes_away_while_a_file_is_sent(server):
    connection = server.ask("file")
    connection.close()
    eventually(lambda: not is_held())


@on_asgi
def test_a_client_that_goes_away_before_an_async_view_returns(server):
    connection = server.send("async-slow")
    eventually(is_held)
    connection.close()
    eventually(lambda: not is_held())
    assert not server.go.exists()


@on_asgi
def test_a_client_that_goes_away_before_a_plain_view_returns(server):
    """The view goes on in its thread, and nobody takes its response."""
    connection = server.send("slow")
    eventually(is_held)
    connection.close()
    server.go.touch()
    eventually(lambda: not is_held())


@on_wsgi
def test_hold_until_return(server):
    connection = server.ask("until-return")
    eventually(lambda: not is_held())
    with lock("name"):
        assert not server.go.exists()
    server.go.touch()
    assert b"end" in rest(connection)
