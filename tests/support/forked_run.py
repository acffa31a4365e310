"""A plugin for pytest: tests run in several processes, which are forked from one that has collected all of them.

Where each process collected them for itself, as with pytest-xdist, that would take six seconds of a processor each. So
there may be many more processes than processors: most tests wait, for servers and for time to pass. Each process makes
the fixtures of its session and of modules for itself; what the first of them has made before, such as the databases of
Django (see ``tests/conftest.py``), all have. Other plugins see a worker of pytest-xdist in each.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Container, Iterable, Sequence, Set
from contextlib import suppress
from functools import cache
from itertools import accumulate, groupby
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from threading import Thread

import pytest

from tests.support import forkserver

FORK = multiprocessing.get_context("fork")
PER_PROCESSOR, MOST = 9, 32  # each has servers of its own
SLOW, QUICK = 0.4, 0.15  # seconds that a test takes about which has no mark for that
LONG = 5.0  # seconds; what takes longer is begun before all else
DEAR = "rabbitmq", "cluster", "zookeeper", "redlock", "mariadb"  # take seconds of a processor to start or while idle
OF_DEAR = 0.75  # of a share, at most: the end would wait for one process, from which few others may take over
OF_ALL = ("libraries", "django", "celery") if sys.platform == "linux" else ()  # servers of programs, for all processes
STARTING = pytest.StashKey[Thread]()
AHEAD = 2  # tests that a process knows beside the one it runs: the next, for its fixtures, and one not to wait for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", default="0", help='how many run the tests; "auto"; 0, the default: this one does')


def pytest_sessionstart(session: pytest.Session) -> None:
    """Servers of programs import while tests are collected, one after the other: each is forked from the one before."""
    if session.config.getoption("processes") != "0" and not session.config.option.collectonly:
        session.stash[STARTING] = Thread(target=start_servers, daemon=True)
        session.stash[STARTING].start()


def start_servers() -> None:
    for like in OF_ALL:
        forkserver.server(like)


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
    """So that each process has as much to do, and the end does not wait for one of them.

    A module stays together, for its fixtures. So do the tests of a dear server, for few processes to start it. What
    takes long comes first, then those of dear servers, because few can take them over. What takes long mostly waits. So
    every other process of the rest begins with the quicker half of its tests, which keep processors busy.
    """
    of_servers: dict[str, list[pytest.Item]] = {server: [] for server in (*DEAR, "")}
    for item in items:
        of_servers[dear_server(item)].append(item)
    modules = (list(tests) for _, tests in groupby(of_servers.pop(""), key=lambda item: item.path))
    most = load(items) / processes
    together = [part for tests in modules for part in parts(tests, most)]
    together += [part for tests in of_servers.values() for part in parts(tests, most * OF_DEAR)]
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for tests in sorted(together, key=load, reverse=True):
        min(shares, key=load).extend(tests)
    for share in shares:
        share.sort(key=precedence, reverse=True)
    for share in [share for share in shares if not any(map(dear_server, share))][::2]:
        begin = len(share) // 2
        share[:] = share[begin:] + share[:begin]
    return shares


def parts(tests: Sequence[pytest.Item], most: float) -> list[list[pytest.Item]]:
    """Some that take as long as each other, about, and none longer than ``most`` seconds by much."""
    each = load(tests) / max(math.ceil(load(tests) / most), 1)
    begun_at = accumulate(map(seconds, tests), initial=0.0)
    numbered = zip(tests, (begin // each for begin in begun_at), strict=False)
    return [[test for test, _ in part] for _, part in groupby(numbered, key=itemgetter(1))]


@cache
def seconds(test: pytest.Item) -> float:
    """What it takes, about: the mark says it of those that take long."""
    mark = test.get_closest_marker("seconds")
    return float(mark.args[0]) if mark else SLOW if test.get_closest_marker("slow") else QUICK


def precedence(test: pytest.Item) -> tuple[bool, bool, float]:
    return seconds(test) > LONG, bool(dear_server(test)), seconds(test)


@cache
def dear_server(test: pytest.Item) -> str:
    """The one of its process that it needs; "": none, or the module starts its own."""
    of = " ".join((test.nodeid.partition("::")[2], *getattr(test, "fixturenames", ()))).lower()
    return next((server for server in DEAR if server in of), "")


def load(tests: Iterable[pytest.Item]) -> float:
    return sum(map(seconds, tests))


def to_give(share: Iterable[pytest.Item], servers: Container[str]) -> list[pytest.Item]:
    """What a process may take over that has these dear servers. It would start any other for a few quick tests."""
    return [test for test in share if dear_server(test) in servers]


def given_away(share: deque[pytest.Item], servers: Container[str]) -> list[pytest.Item]:
    """The second half of what such a process may take over. It is taken out of the share."""
    given: list[pytest.Item] = []
    left = to_give(share, servers)
    half = load(left) / 2
    while half > 0:
        given.insert(0, left.pop())
        half -= seconds(given[0])
        share.remove(given[0])
    return given


def taken_over(shares: Sequence[deque[pytest.Item]], servers: Set[str]) -> list[pytest.Item]:
    """What a process with these dear servers is given of the others' shares: first what few can take over."""
    for kind in (servers - {""}, {""}):
        if given := given_away(max(shares, key=lambda share, kind=kind: load(to_give(share, kind))), kind):
            return given
    return []


class Run:
    """Hands tests to processes, and reports what they tell. ``shares``: what each is to begin with, in its order."""

    def __init__(self, session: pytest.Session, shares: Sequence[Sequence[pytest.Item]]) -> None:
        self._session, self._hook = session, session.config.hook
        self._number_of = {item: number for number, item in enumerate(session.items)}
        self._left = [deque(share) for share in shares]
        self._workers: dict[Connection, Worker] = {}

    def __call__(self) -> None:
        self._session.stash[STARTING].join()
        start_servers()  # what failed in the thread fails here
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
        """The next test of its share or, where that is done, of what another one may give; None: there is none."""
        if not worker.share:
            worker.share.extend(taken_over(self._left, worker.servers))
        if worker.share and not self._session.shouldfail and not self._session.shouldstop:
            worker.handed.append(worker.share.popleft())
            worker.servers.add(dear_server(worker.handed[-1]))
            worker.tell(self._number_of[worker.handed[-1]])
        else:
            worker.tell(None)

    def _hear(self, worker: Worker) -> None:
        """The reports of a test that is done."""
        try:
            told = worker.channel.recv()
        except (EOFError, ConnectionResetError):
            self._end(worker)
            return
        worker.handed.popleft()
        for data in told:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
            self._hook.pytest_runtest_logreport(report=report)
        self._hand(worker)

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
    """A process, its share, what it was handed of that and has not done, and the dear servers that it has."""

    def __init__(self, session: pytest.Session, share: deque[pytest.Item], others: list[Connection]) -> None:
        self.share, self.handed = share, deque[pytest.Item]()
        self.servers = {""}  # tests that need none are for each process
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
    os.register_at_fork(after_in_child=channel.close)  # that ends with this process, whatever it leaves behind
    config, plugins = session.config, session.config.pluginmanager
    os.environ["PYTEST_XDIST_WORKER"] = folder.name
    config.workerinput = {"workerid": folder.name}
    config._tmp_path_factory._basetemp = folder
    plugins.unregister(name="terminalreporter")
    reporter = Reporter(config)
    plugins.register(reporter)
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into files that all share
    capture.start_global_capturing()
    try:
        test = channel.recv()
        while test is not None:
            following = channel.recv()
            item, next_item = (None if one is None else session.items[one] for one in (test, following))
            config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            channel.send(reporter.reports)
            reporter.reports.clear()
            test = following
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the run is over
    finally:
        status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK  # pytest keeps files then
        config.hook.pytest_sessionfinish(session=session, exitstatus=status)


class Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.reports: list[object] = []  # of the test that is run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))
