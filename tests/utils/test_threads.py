"""The threads of the package are there whenever there is something to do, also after interrupts at any point."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from django_distlock import LockBackendError, lock, locks
from django_distlock.utils import threads
from django_distlock.utils.threads import Post, Worker
from django_distlock.utils.wakeup import WakeEvent
from tests.support.databases import known_database, open_connections, sessions, through
from tests.support.inside import listener_of
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE, eventually

NAME = "distlock-example"
OWN = "own"  # an alias of PostgreSQL, and what its sessions are called there


class TimeLimit(Exception):
    """As Celery raises from a handler of a signal."""


def interrupt_the_start(monkeypatch, name, *, it_begins):
    """The next thread of that name: what starts it is interrupted before or after the thread begins."""
    start = threading.Thread.start

    def interrupted(thread):
        if not thread.name.startswith(name):
            return start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        if it_begins:
            start(thread)
        raise TimeLimit

    monkeypatch.setattr(threading.Thread, "start", interrupted)


def running(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


class Work:
    def __init__(self):
        self.wanted, self.done = 0, 0
        self.worker = Worker(NAME, self)

    def __call__(self):
        self.done = self.wanted

    def want(self):
        self.wanted += 1
        self.worker.nudge()

    @property
    def is_done(self):
        return self.done == self.wanted


@pytest.fixture
def work():
    work = Work()
    yield work
    if thread := work.worker.end():
        thread.join(PATIENCE)


class TestWorker:
    @pytest.mark.parametrize("it_begins", [False, True])
    def test_works_after_an_interrupted_start(self, work, monkeypatch, it_begins):
        interrupt_the_start(monkeypatch, NAME, it_begins=it_begins)
        with pytest.raises(TimeLimit):
            work.want()
        work.want()
        eventually(lambda: work.is_done)
        eventually(lambda: len(running(NAME)) == 1)

    def test_has_one_thread(self, work, monkeypatch):
        """Also where a finalizer wants something while the thread is made."""
        is_struck = []

        class Thread(threading.Thread):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                if not is_struck:
                    is_struck.append(True)
                    work.want()

        monkeypatch.setattr(threading, "Thread", Thread)
        work.want()
        eventually(lambda: work.is_done)
        eventually(lambda: len(running(NAME)) == 1)

    def test_looks_once_for_one_nudge(self):
        looks = []
        worker = Worker(NAME, lambda: looks.append(1) or threads.clock() + 3600.0)
        worker.nudge()
        eventually(lambda: looks and worker.wakes_at > threads.clock() + 60.0)
        worker.end().join(PATIENCE)
        assert len(looks) == 2  # the second, for its end

    @pytest.mark.parametrize("idle", [3600.0, 0.0])
    @pytest.mark.parametrize("call", range(1, 6))
    def test_does_what_a_finalizer_wants_between_its_look_and_its_rest(self, work, monkeypatch, idle, call):
        monkeypatch.setattr(Worker, "idle_timeout", idle)
        calls, clock = [], threads.clock

        def struck():
            calls.append(1)
            if len(calls) == call:
                work.want()
            return clock()

        monkeypatch.setattr(threads, "clock", struck)
        work.want()
        eventually(lambda: work.is_done)
        work.want()
        eventually(lambda: work.is_done)

    def test_ends_when_told_and_works_again_when_wanted(self, work):
        work.want()
        eventually(lambda: work.is_done)
        thread = work.worker.end()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        work.want()
        eventually(lambda: work.is_done)

    def test_ends_when_told_before_it_has_the_post(self, work, monkeypatch):
        """A subinterpreter may end just after something was wanted."""
        monkeypatch.setattr(Worker, "idle_timeout", 3600.0)
        take, may_begin = Post.take, threading.Event()

        def take_late(post):
            may_begin.wait(PATIENCE)
            return take(post)

        monkeypatch.setattr(Post, "take", take_late)
        work.want()
        thread = work.worker.end()
        may_begin.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert work.is_done

    @pytest.mark.seconds(9)
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_dies_of_nothing_for_good(self, work, monkeypatch):
        """What ends a thread in the midst, as a greenlet is killed, ends that thread alone."""
        call, killed = Work.__call__, []

        def kill(work):
            monkeypatch.setattr(Work, "__call__", call)
            killed.append(threading.current_thread())
            raise SystemExit

        monkeypatch.setattr(Work, "__call__", kill)
        work.want()
        eventually(lambda: killed and not killed[0].is_alive())
        work.want()
        eventually(lambda: work.is_done)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_one_that_is_killed_at_rest_leaves_nothing_that_is_waited_for(self, work, monkeypatch):
        """As a greenlet is, on its way out of the event."""
        wait, rests, doomed, killed = WakeEvent.wait, [], [], []

        def killing(event, seconds):
            rests.append(threading.current_thread())
            wait(event, seconds)
            if doomed and threading.current_thread() is doomed[0]:
                killed.append(doomed.pop())
                raise SystemExit

        monkeypatch.setattr(WakeEvent, "wait", killing)
        work.want()
        eventually(lambda: work.is_done and rests)
        doomed.append(rests[-1])
        work.want()
        eventually(lambda: killed and not killed[0].is_alive())
        work.wanted += 1
        work.worker.nudge(threads.clock() + Worker.idle_timeout)
        eventually(lambda: work.is_done)

    def test_what_is_over_before_it_looks_wakes_it_once(self, work, monkeypatch):
        """Not the next of its kind as well, such as a lock that is held for microseconds."""
        wait, ring, rests, rung = WakeEvent.wait, WakeEvent.set, [], []
        monkeypatch.setattr(WakeEvent, "wait", lambda event, seconds: rests.append(seconds) or wait(event, seconds))
        monkeypatch.setattr(WakeEvent, "set", lambda event: rung.append(event) or ring(event))
        due = threads.clock() + Worker.idle_timeout / 2
        work.worker.nudge(due)
        eventually(lambda: rests)
        before = len(rung)
        work.wanted += 1
        work.worker.nudge(due + 0.1)
        assert len(rung) == before
        work.worker.nudge(due - 0.1)
        eventually(lambda: work.is_done)


def test_a_post_has_one_thread_at_a_time():
    post, barrier = Post(), threading.Barrier(8)
    took, left = [], threading.Event()

    def apply():
        barrier.wait(PATIENCE)
        took.append(post.take())
        left.wait(PATIENCE)

    applicants = [threading.Thread(target=apply, daemon=True) for _ in range(8)]
    for applicant in applicants:
        applicant.start()
    eventually(lambda: len(took) == 8)
    assert took.count(True) == 1
    assert post.thread in applicants
    post.leave()
    assert post.thread is None
    assert post.take()
    left.set()


@pytest.mark.parametrize("it_begins", [False, True])
@pytest.mark.parametrize("kind", ["valkey", "postgres"])
def test_waiters_are_woken_after_an_interrupted_start_of_the_listener(request, monkeypatch, kind, it_begins):
    request.getfixturevalue(f"{kind}_locks")
    locks.close()  # with the listener that an earlier test may have left
    holder = lock("name", reentrant=False)
    assert holder.acquire()
    interrupt_the_start(monkeypatch, "distlock-listener", it_begins=it_begins)
    with pytest.raises(TimeLimit):
        lock("name", wait=PATIENCE, reentrant=False).acquire()
    waited = []

    def wait():
        with lock("name", wait=PATIENCE):
            waited.append(True)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    listener = listener_of(locks["default"])
    eventually(lambda: listener.is_ready)
    holder.release()
    waiter.join(PATIENCE)
    assert waited == [True]


@pytest.mark.parametrize("it_begins", [False, True])
def test_calls_to_a_database_have_an_end_after_an_interrupted_start_of_the_watchdog(
    postgres, postgres_database, settings, tmp_path_factory, monkeypatch, it_begins
):
    failures = []

    def ask():
        try:
            locks["default"].look(["name"])
        except LockBackendError as error:
            failures.append(error)

    with through(postgres, tmp_path_factory.mktemp("p"), settings) as proxy:
        locks["default"].look(["name"])
        watchdogs = running("distlock-watchdog")  # what earlier tests have left may start another meanwhile
        assert watchdogs
        threads.end_all(PATIENCE)
        assert not [thread for thread in watchdogs if thread.is_alive()]
        interrupt_the_start(monkeypatch, "distlock-watchdog", it_begins=it_begins)
        with pytest.raises(TimeLimit):
            locks["default"].look(["name"])
        proxy.hang = True
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(6 * PATIENCE)
        proxy.hang = False
    assert len(failures) == 1


@pytest.fixture
def own_locks(postgres, postgres_database, settings, long_calls):
    """Its sessions have a name: what earlier tests have left may begin others."""
    with known_database({**postgres.settings(), "OPTIONS": {"application_name": OWN}}, OWN):
        connections[OWN].close()
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": OWN}}
        yield locks["default"]
        locks.close()


@pytest.mark.parametrize("it_begins", [False, True])
def test_no_connection_is_left_open_by_an_interrupted_start_of_what_connects(own_locks, monkeypatch, it_begins):
    others = open_connections(own_locks)
    own_locks.close()
    eventually(lambda: not sessions(OWN))
    interrupt_the_start(monkeypatch, "distlock-connecting", it_begins=it_begins)
    with pytest.raises(TimeLimit):
        own_locks.look(["name"])
    eventually(lambda: not running("distlock-connecting"))
    eventually(lambda: not open_connections(own_locks, but=others))
    eventually(lambda: not sessions(OWN))
    assert own_locks.look(["name"]) == [[]]
    assert sessions(OWN)
