"""A plugin for pytest: tests run in several processes, which are forked from one that has collected all of them.

Where each process collected them for itself, as with pytest-xdist, that would take six seconds of a processor each. So
there may be many more processes than processors: most tests wait, for servers and for time to pass. Each process makes
the fixtures of its session and of modules for itself. Other plugins see a worker of pytest-xdist in it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

FORK = multiprocessing.get_context("fork")
PER_PROCESSOR, MOST = 8, 32  # each has servers of its own
DEAR = "rabbitmq", "cluster", "zookeeper", "redlock"  # take seconds of a processor to start or while idle
AHEAD = 2  # tests that a process knows beside the one it runs: the next, for its fixtures, and one not to wait for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", default="0", help='how many run the tests; "auto"; 0, the default: this one does')


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    wanted = session.config.getoption("processes")
    processes = min(PER_PROCESSOR * (os.cpu_count() or 1), MOST) if wanted == "auto" else int(wanted)
    if not processes or not session.items or session.config.option.collectonly or session.testsfailed:
        return None
    Run(session, dealt(session.items, min(processes, len(session.items))))()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@pytest.fixture(scope="session")
def folder_of_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All processes of this run have it in common."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


def dealt(items: Sequence[pytest.Item], processes: int) -> list[list[pytest.Item]]:
    """So that each process begins with its share of slow modules, and quick tests are left to those who are done first.

    The tests of a dear server are dealt as those of one slow module, for few processes to start it.
    """
    of_servers: dict[str, list[pytest.Item]] = {server: [] for server in (*DEAR, "")}
    for item in items:
        of = " ".join((item.nodeid, *getattr(item, "fixturenames", ()))).lower()
        of_servers[next((server for server in DEAR if server in of), "")].append(item)
    modules = [list(tests) for _, tests in groupby(of_servers.pop(""), key=lambda item: item.path)]
    slow = [tests for tests in modules if any(item.get_closest_marker("slow") for item in tests)]
    quick = [item for tests in modules if tests not in slow for item in tests]
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for tests in sorted([*of_servers.values(), *slow], key=len, reverse=True):
        min(shares, key=len)[:0] = tests  # modules of a few tests come first: each of those takes long, as fleets do
    for number, share in enumerate(shares):
        left = len(quick) + sum(map(len, shares[number:]))
        room = max(left // (processes - number) - len(share), 0)
        share += quick[:room]
        del quick[:room]
    return shares


class Run:
    """Hands tests to processes, and reports what they tell. ``shares``: what each is to begin with, in its order."""

    def __init__(self, session: pytest.Session, shares: Sequence[Sequence[pytest.Item]]) -> None:
        self._session, self._hook = session, session.config.hook
        self._number_of = {item: number for number, item in enumerate(session.items)}
        self._left = [deque(share) for share in shares]
        self._workers: dict[Connection, Worker] = {}

    def __call__(self) -> None:
        if terminal := self._session.config.pluginmanager.getplugin("terminalreporter"):
            terminal.showfspath = False  # tests of many modules are reported in turn
        try:
            for share in self._left:
                self._start(share)
            while self._workers:
                for channel in wait(list(self._workers)):
                    self._hear(self._workers[channel])
        finally:
            for channel in self._workers:
                channel.close()  # which ends them
            for worker in self._workers.values():
                worker.process.join()

    def _start(self, share: deque[pytest.Item]) -> None:
        worker = Worker(self._session, share, [*self._workers])
        self._workers[worker.channel] = worker
        for _ in range(1 + AHEAD):
            self._hand(worker)

    def _hand(self, worker: Worker) -> None:
        """The next test of its share or, where that is done, of the second half of the longest; None: there is none."""
        if not worker.share:
            longest = max(self._left, key=len)
            worker.share.extendleft(longest.pop() for _ in range((len(longest) + 1) // 2))
        if worker.share and not self._session.shouldfail and not self._session.shouldstop:
            worker.handed.append(worker.share.popleft())
            worker.tell(self._number_of[worker.handed[-1]])
        else:
            worker.tell(None)

    def _hear(self, worker: Worker) -> None:
        """A report, or None: a test is done, with all its reports."""
        try:
            told = worker.channel.recv()
        except (EOFError, ConnectionResetError):
            self._end(worker)
            return
        if told is None:
            worker.handed.popleft()
            self._hand(worker)
            return
        report = self._hook.pytest_report_from_serializable(config=self._session.config, data=told)
        self._hook.pytest_runtest_logreport(report=report)

    def _end(self, worker: Worker) -> None:
        """It has done all, or died of the first test that it has still."""
        worker.process.join()
        del self._workers[worker.channel]
        if worker.handed:
            test = worker.handed.popleft()
            told = f"Its process ended, with {worker.process.exitcode}."
            report = pytest.TestReport(test.nodeid, test.location, {}, "failed", told, "call")
            self._hook.pytest_runtest_logreport(report=report)
            worker.share.extendleft(reversed(worker.handed))
            self._start(worker.share)
        elif worker.process.exitcode:
            raise RuntimeError(f"a process ended with {worker.process.exitcode} after its last test")


class Worker:
    """A process, its share, and what it was handed of that and has not done."""

    def __init__(self, session: pytest.Session, share: deque[pytest.Item], others: list[Connection]) -> None:
        self.share, self.handed = share, deque[pytest.Item]()
        folder = session.config._tmp_path_factory.mktemp("process")
        self.channel, channel = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(session, folder, channel, [self.channel, *others]))
        self.process.start()
        channel.close()

    def tell(self, test: int | None) -> None:
        with suppress(BrokenPipeError):  # it has died, of which Run hears
            self.channel.send(test)


def work(session: pytest.Session, folder: Path, channel: Connection, of_others: list[Connection]) -> None:
    """What a process does, until it is told that there is no other test or the one that was forked has ended."""
    for one in of_others:
        one.close()
    config, plugins = session.config, session.config.pluginmanager
    os.environ["PYTEST_XDIST_WORKER"] = folder.name
    config.workerinput = {"workerid": folder.name}
    config._tmp_path_factory._basetemp = folder
    plugins.unregister(name="terminalreporter")
    plugins.register(Reporter(config, channel))
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into files that all share
    capture.start_global_capturing()
    try:
        test = channel.recv()
        while test is not None:
            following = channel.recv()
            item, next_item = (None if one is None else session.items[one] for one in (test, following))
            config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            channel.send(None)
            test = following
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the run is over
    finally:
        status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK  # pytest keeps files then
        config.hook.pytest_sessionfinish(session=session, exitstatus=status)


class Reporter:
    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._channel.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
