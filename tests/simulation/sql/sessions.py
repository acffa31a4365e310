"""Sessions with a database that go through the steps of one scenario: with a model, or with a real server."""

from __future__ import annotations

import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from django_distlock.backends.database.libpq import Libpq
from tests.support.tools import eventually

from ..engine.network import Network
from ..engine.scheduler import Host, Process, Scheduler
from ..engine.threads import SimpleQueue, Thread
from .server import Server

Work = Callable[[Any], Any]  # with a connection, as the package's statements know it

# What is another one each time, or in other versions of the servers and drivers.
OTHERS = (
    (r"\d{16}", "<moment>"),
    (r"\b(3000000000|29\d{8})\b", "<left>"),
    (r"[Pp]rocess \d+", "process <number>"),
    (r"transaction \d+", "transaction <number>"),
    (r"waiting for ShareLock on transaction <number>\n", ""),
    (r"during query \(\[Errno 32\] Broken pipe\)", "during query"),
    (r"tuple \(0,\d+\)", "tuple <place>"),
    (r"connection to server (on socket|at) .*? failed", "connection to server failed"),
)


def normalised(outcome: Any) -> str:
    text = repr(outcome)
    if isinstance(outcome, Exception):
        text = f"{type(outcome).__name__} {getattr(outcome, 'sqlstate', None)}: {outcome}"
    for pattern, name in OTHERS:
        text = re.sub(pattern, name, text)
    return text


class Sessions(ABC):
    """``outcomes``: what each step has led to, in words."""

    def __init__(self, connect: Callable[[], Any], driver: Any, vendor: str) -> None:
        self.vendor = vendor
        self.outcomes: list[str] = []
        self.raw: dict[str, Any] = {}  # connections of the driver
        self._connect, self._driver = connect, driver
        self._works: dict[str, Any] = {}
        self._results: dict[str, list[Any]] = {}

    def begin(self, name: str, work: Work) -> None:
        """The step waits for another session."""
        self.start(name, work)
        self.await_lock(name)

    def do(self, name: str, work: Work) -> Any:
        self.start(name, work)
        return self.end(name)

    def start(self, name: str, work: Work) -> None:
        works = self._works.get(name)
        if works is None:
            works = self._works[name] = self.new_queue()
            self._results[name] = []
            self.new_thread(partial(self._serve, name))
        works.put(work)  # of a session that was refused meanwhile nobody takes it

    def end(self, name: str) -> Any:
        self.wait_until(lambda: bool(self._results[name]))
        result = self._results[name].pop(0)
        self.outcomes.append(f"{len(self.outcomes)} {name}: {normalised(result)}")
        return result

    def close(self, name: str) -> None:
        """Its process has died."""
        self.raw[name].close()
        self.outcomes.append(f"{len(self.outcomes)} {name}: died")

    def fill(self) -> None:
        """Connect until the server refuses."""
        for number in range(500):
            if isinstance(result := self._connected(f"extra {number}"), Exception):
                self.outcomes.append(f"{len(self.outcomes)} full: {normalised(result)}")
                return
        raise AssertionError("it takes everybody")

    def _connected(self, name: str) -> Any:
        self.start(name, lambda connection: connection)
        self.wait_until(lambda: bool(self._results[name]))
        return self._results[name].pop(0)

    def _serve(self, name: str) -> None:
        try:
            raw = self.raw[name] = self._connect()
        except Exception as error:
            self._results[name].append(error)
            del self._works[name]
            return
        connection = SimpleNamespace(
            Database=self._driver,
            vendor=self.vendor,
            connection=raw,
            cursor=raw.cursor,
            wrap_database_errors=nullcontext(),
            libpq=Libpq(raw) if self.vendor == "postgresql" else None,
        )
        while work := self._works[name].get():
            try:
                self._results[name].append(work(connection))
            except Exception as error:
                self._results[name].append(error)
        with suppress(Exception):  # of one that is closed
            raw.close()
        del self._works[name]

    def finish(self) -> None:
        for works in list(self._works.values()):
            works.put(None)
        self.wait_until(lambda: not self._works)

    @abstractmethod
    def new_queue(self) -> Any: ...

    @abstractmethod
    def new_thread(self, work: Callable[[], object]) -> None: ...

    @abstractmethod
    def wait_until(self, is_so: Callable[[], bool]) -> None: ...

    @abstractmethod
    def restart(self) -> None:
        """The server crashes and comes back."""

    @abstractmethod
    def await_lock(self, name: str) -> None:
        """Return when the step of that session waits for a row."""


class RealSessions(Sessions):
    """``is_waiting(raw)``: whether the server says that the session waits for a row."""

    def __init__(
        self,
        connect: Callable[[], Any],
        driver: Any,
        vendor: str,
        is_waiting: Callable[[Any], bool],
        restart: Callable[[], object],
    ) -> None:
        super().__init__(connect, driver, vendor)
        self._is_waiting, self._restart = is_waiting, restart

    def restart(self) -> None:
        self._restart()

    def new_queue(self) -> Any:
        return queue.SimpleQueue()

    def new_thread(self, work: Callable[[], object]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        eventually(is_so)

    def await_lock(self, name: str) -> None:
        eventually(lambda: name in self.raw and self._is_waiting(self.raw[name]))


class ModelSessions(Sessions):
    """``new_server(network)``, and ``connect(network)``."""

    def __init__(
        self, new_server: Callable[[Network], Server], connect: Callable[[Network], Any], driver: Any, vendor: str
    ) -> None:
        self._scheduler = Scheduler(1)
        network = Network(self._scheduler)
        self.server = new_server(network)
        super().__init__(partial(connect, network), driver, vendor)
        self._process = Process("p", Host("h", self._scheduler))

    def restart(self) -> None:
        self.server.crash()
        self._scheduler.run(self._scheduler.now + 0.1)
        self.server.start()

    def new_queue(self) -> Any:
        return SimpleQueue(self._scheduler)

    def new_thread(self, work: Callable[[], object]) -> None:
        Thread(self._scheduler, self._process, target=work).start()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(600):
            if is_so():
                return
            self._scheduler.run(self._scheduler.now + 0.1)
        raise AssertionError("it waits for ever")

    def await_lock(self, name: str) -> None:
        self._scheduler.run(self._scheduler.now + 0.1)

    def close(self, name: str) -> None:
        self._scheduler.acting = self._process
        super().close(name)
        self._scheduler.run(self._scheduler.now + 0.1)
