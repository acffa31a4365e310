"""A private RabbitMQ on ports of this machine that nobody else uses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.support.ports import free_port, kept_port
from tests.support.programs import processes_of
from tests.support.tools import eventually

PLACES = "/usr/lib/rabbitmq/bin", "/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/sbin"
STARTS_WITHIN = 240.0  # seconds, on a busy machine
CONF = {  # of Celery
    # Where it keeps messages for later. All who use it must agree, and queues of this kind are made sooner.
    "broker_native_delayed_delivery_queue_type": "classic",
    # Who publishes goes on when the node has the message. One that is on its way when the node ends would be lost.
    "broker_transport_options": {"confirm_publish": True},
}
NEVER_SPIN = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none"  # schedulers that wait for work leave the processor


def programs() -> tuple[Path, Path] | None:
    """The server, and the daemon by which nodes of Erlang find each other. Debian's wrapper changes the user."""
    server = shutil.which("rabbitmq-server", path=os.pathsep.join(PLACES))
    epmd = shutil.which("epmd")
    return (Path(server), Path(epmd)) if server and epmd else None


class RabbitMQ:
    """``with RabbitMQ(*programs()) as server: server.url``. Its node has a name and an epmd of its own.

    ``stop()`` and ``start()`` restart the node, with what it has written.
    """

    def __init__(self, server: Path, epmd: Path) -> None:
        self._server, self._epmd = server, epmd
        self.folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
        self._log = (self.folder / "log").open("wb")

    def __enter__(self) -> RabbitMQ:
        (self.port, keeper), (distribution, other), epmd_port = kept_port(), kept_port(), free_port()
        self._keepers = keeper, other
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._daemon = subprocess.Popen(
            [self._epmd, "-port", str(epmd_port), "-address", "127.0.0.1"], stdout=self._log, stderr=self._log
        )
        (self.folder / "plugins").write_text("[].")
        self._environment = {
            **os.environ,
            "HOME": str(self.folder),  # of the cookie
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"tests-{uuid.uuid4().hex[:12]}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(self.folder / "flags"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": NEVER_SPIN,
        }
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self._server], env=self._environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        eventually(self._answers, STARTS_WITHIN)

    def stop(self) -> None:
        """In order, as for an update: clients lose their connections, and what is durable stays."""
        [node] = (pid for pid in processes_of(self.process.pid) if _name_of(pid) == "beam.smp")
        os.kill(node, signal.SIGTERM)
        self.process.wait(STARTS_WITHIN)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True  # which is the last step of its start
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        """The session that was made for it: a script, the node, and what that started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._daemon.kill()
        self.process.wait(STARTS_WITHIN)
        self._daemon.wait(STARTS_WITHIN)
        for keeper in self._keepers:
            keeper.close()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
