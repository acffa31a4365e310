"""Those who wait for what one connection tells: who reads, and who does when that one leaves."""

from __future__ import annotations

import socket
import threading

import pytest

from django_distlock.backends.common.readers import Readers
from django_distlock.utils.wakeup import WakeEvent
from tests.support.interrupts import at_each_point
from tests.support.tools import PATIENCE, eventually


class Away(Exception):
    pass


class Connection:
    """Tells names of those who wait."""

    def __init__(self):
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.events, self.readers_of, self.closed = {}, [], 0
        self.meanwhile = lambda: None
        self.lost = threading.Event()
        self.readers = Readers(self.ours, self.take, self.close, Away, on_failure=self.lost.set)

    def take(self):
        self.meanwhile()
        try:
            told = self.ours.recv(1024)
        except BlockingIOError:
            return
        if not told:
            raise Away
        for name in told.decode():
            self.readers_of.append(threading.current_thread())
            self.events[name].set()

    def tell(self, names):
        self.theirs.send(names.encode())

    def close(self):
        self.closed += 1
        for end in (self.ours, self.theirs):
            end.close()

    def wait(self, name, timeout=PATIENCE, nap=PATIENCE):
        """In a thread."""
        self.events[name] = event = WakeEvent()
        thread = threading.Thread(target=self.readers.wait, args=(event, timeout, nap), daemon=True)
        thread.start()
        return thread

    def is_free(self):
        return self.readers.read_if_missed(0.0, 0.0, is_wanted=True)


@pytest.fixture
def connection():
    connection = Connection()
    yield connection
    connection.readers.end()
    assert connection.closed == 1


def end(*threads):
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_who_comes_first_reads_for_all(connection):
    first = connection.wait("a")
    eventually(lambda: not connection.is_free())
    second = connection.wait("b")
    connection.tell("b")
    end(second)
    assert connection.readers_of == [first]
    connection.tell("a")
    end(first)


def test_who_is_next_reads_when_the_first_leaves(connection):
    waiting = {}
    for name in "abc":
        waiting[name] = connection.wait(name)
        eventually(lambda: not connection.is_free())
    for name in "abc":
        connection.tell(name)
        end(waiting[name])
    assert len(connection.readers_of) == 3


def test_hand_offs_one_after_another_lose_none(connection):
    for _ in range(300):
        waiting = [connection.wait(name) for name in "abc"]
        connection.tell("ab")
        connection.tell("c")
        end(*waiting)


def test_nobody_else_reads_while_waiters_come_and_go(connection):
    read = connection.readers.read_if_missed
    waiting = connection.wait("a")
    eventually(lambda: not read(0.0, PATIENCE, is_wanted=False))
    connection.tell("a")
    end(waiting)
    assert not read(0.0, PATIENCE, is_wanted=False)
    eventually(lambda: read(0.0, 0.05, is_wanted=False))
    assert read(0.0, PATIENCE, is_wanted=True)


def test_all_wait_on_where_the_connection_is_lost(connection):
    waiting = [connection.wait(name) for name in "abc"]
    eventually(lambda: not connection.is_free())
    connection.theirs.close()
    assert connection.lost.wait(PATIENCE)
    with pytest.raises(Away):
        connection.is_free()
    for name, thread in zip("abc", waiting, strict=True):
        assert thread.is_alive()
        connection.events[name].set()
        end(thread)


def test_one_that_is_over_is_closed_by_the_last_one_in_the_line():
    connection, taking, may_go_on = Connection(), threading.Event(), threading.Event()
    connection.meanwhile = lambda: taking.set() or may_go_on.wait(PATIENCE)
    first = connection.wait("a")
    connection.tell("a")
    assert taking.wait(PATIENCE)
    others = [connection.wait(name) for name in "bc"]
    connection.readers.end()
    for name in "bc":
        connection.events[name].set()
    end(*others)
    assert connection.closed == 0
    may_go_on.set()
    end(first)
    assert connection.closed == 1


def test_who_waits_in_a_handler_of_a_signal_waits_while_its_thread_reads(connection):
    handled = []

    def handle():
        connection.meanwhile = lambda: None
        connection.readers.wait(WakeEvent(), 0.05, PATIENCE)
        handled.append(True)

    connection.meanwhile = handle
    waiting = connection.wait("a")
    eventually(lambda: handled)
    connection.tell("a")
    end(waiting)


@pytest.mark.parametrize("is_first", [True, False])
def test_an_interrupt_leaves_the_line_to_no_one_who_waits_no_more(is_first):
    def begin():
        connection = Connection()
        other = None if is_first else connection.wait("b", nap=0.01)
        if other:
            eventually(lambda: not connection.is_free())
        connection.events["a"] = WakeEvent()
        connection.tell("a")
        return connection, other

    def finish():
        """Whether nobody who waits no more had the line."""
        if other:
            connection.events["b"].set()
            end(other)
        try:
            is_free = connection.is_free()
        except Away:  # what had come may be lost, so the listener would subscribe again
            is_free = True
        connection.readers.end()
        return is_free and connection.closed

    def wait(name):
        connection.readers.wait(connection.events["a"], 0.05, 0.01)

    left, points, (connection, other) = [], 0, begin()
    for _, point in at_each_point(wait, "backends/common/readers.py", "utils/wakeup.py"):
        points += 1
        if not finish():
            left.append(point)
        connection, other = begin()
    assert finish()
    assert left == []
    assert points > 8  # more where it naps more often, which is a matter of speed


def test_a_forked_child_leaves_to_its_parent_what_the_connection_tells():
    connection = Connection()
    assert connection.is_free()
    connection.tell("a")
    connection.readers.forget()
    connection.events["a"] = WakeEvent()
    connection.readers.wait(connection.events["a"], 0.05, 0.01)
    assert connection.readers_of == []
    assert connection.closed == 0
    assert connection.ours.recv(1) == b"a"
    connection.close()
