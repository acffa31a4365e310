"""Starts workers as Celery's own command, sends them tasks, and reads what became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from pathlib import Path

import redis
from celery import Celery

from example_project.valkey import Valkey
from tests.support import rabbitmq, tools
from tests.support.forkserver import Program
from tests.support.programs import ROOT
from tests.support.tools import eventually

PATIENCE = 4 * tools.PATIENCE  # seconds, also for a worker to start: several may start at once on a busy machine


class Worker:
    """One worker with its pool, and a queue of its own."""

    def __init__(
        self,
        server: Valkey,
        folder: Path,
        pool: str,
        *,
        concurrency=2,
        visibility_timeout=3600,
        queue=None,
        broker=None,
        queue_type=None,
    ) -> None:
        self.server, self.pool = server, pool
        self.name = f"{pool}@{uuid.uuid4().hex[:8]}"
        self.queue = queue or self.name
        self.late = folder / "late"  # where the server can be reached once it is linked there
        self.plan = {
            "locks": server.url,
            "late": f"unix://{self.late}?db=0",
            "journal": f"unix://{server.socket}?db=3",
            "broker": broker or f"redis+socket://{server.socket}?virtual_host=1",
            "results": f"redis+socket://{server.socket}?virtual_host=2",
            "visibility_timeout": visibility_timeout,
            "queue": self.queue,
            "conf": {"task_default_queue_type": queue_type, **rabbitmq.CONF} if queue_type else {},
            "start_method": "spawn" if pool == "spawn" else "",
        }
        self._log = folder / f"{self.name}.log"
        self._arguments = [
            f"--pool={'prefork' if pool == 'spawn' else pool}", f"--concurrency={concurrency}",
            f"--hostname={self.name}", "--without-gossip", "--without-mingle", "--without-heartbeat",
            "--loglevel=info", "--pidfile=",
        ]  # fmt: skip
        self._book = redis.Redis.from_url(self.plan["journal"], socket_timeout=5, decode_responses=True)
        self._results = redis.Redis.from_url(f"unix://{server.socket}?db=2", socket_timeout=5, decode_responses=True)
        # Results are read from the store: to wait for them as Celery does leaves connections open.
        self.app = Celery("tests", broker=self.plan["broker"], backend="disabled://", set_as_current=False)
        self.app.conf.update(self.plan["conf"], task_default_queue=self.queue)

    def start(self) -> Worker:
        environment = {
            **os.environ,
            "WORKERS": json.dumps(self.plan),
            "DJANGO_SETTINGS_MODULE": "tests.support.workers.settings",
            "PYTHONPATH": str(ROOT),
        }
        with self._log.open("ab") as log:
            self.process = Program(
                ["-m", "celery", "-A", "tests.support.workers.app", "worker", *self._arguments],
                like="celery" if self.pool in ("prefork", "solo", "threads") else None,
                cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            eventually(lambda: self.journal(self.name) or self._died(), PATIENCE)
        except BaseException:
            self.stop()
            raise AssertionError(f"the worker did not start: {self.log()[-3000:]}") from None
        return self

    def _died(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the worker ended with {self.process.returncode}")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def send(self, task: str, *args: object, **options: object) -> str:
        """The task's id."""
        return self.app.send_task(task, args, **options).id

    def journal(self, name: str, what: str | None = None) -> list[dict]:
        lines = [json.loads(line) for line in self._book.lrange(f"journal:{name}", 0, -1)]
        return [line for line in lines if what in (None, line["what"])]

    def ran(self, name: str, times: int = 1, patience: float = PATIENCE) -> dict:
        """Waits for that many runs and returns the last."""
        return eventually(lambda: len(runs := self.journal(name, "run")) >= times and runs, patience)[-1]

    def go(self, name: str) -> float:
        self._book.set(f"go:{name}", 1)
        return time.monotonic()

    def result(self, task_id: str) -> dict:
        """What the task's end left in the result backend: status and result."""
        stored = self._results.get(f"celery-task-meta-{task_id}")
        return json.loads(stored) if stored else {"status": "PENDING"}

    def ended(self, task_id: str, patience: float = PATIENCE) -> dict:
        return eventually(
            lambda: (result := self.result(task_id))["status"] in ("SUCCESS", "FAILURE", "REVOKED") and result, patience
        )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the session that was made for it: the worker and what it forked.

        By a signal that leaves it no time, except where coverage is measured, which a process notes when it ends.
        """
        if "COVERAGE_PROCESS_CONFIG" in os.environ and self.is_alive:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        print(f"--- {self.name}\n{self.log()[-3000:]}")  # shown by pytest when a test fails
        self.app.close()
        self._book.close()
        self._results.close()
