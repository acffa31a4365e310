"""Which server is the master: what is believed of sentinels, and by whom they are asked."""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
import threading
import time
import weakref
from typing import ClassVar

import pytest
from redis.exceptions import ConnectionError

from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.errors import NoMaster, NoSentinel, is_transient
from django_distlock.backends.redis.sentinel import discovery
from tests.support.inside import order_of
from tests.support.tools import PATIENCE, eventually

LONG = 20 * PATIENCE  # a timeout that no sound test sees the end of, nor the half of it


class Sentinel:
    """In the place of the location of one. It says the same to all who ask, after a moment: a master, or an error.

    ``asked``: the seconds that each had who connected; ``polled``: how often it was about to answer.
    """

    arguments: ClassVar = {"socket_timeout": LONG, "socket_connect_timeout": LONG}

    def __init__(self, text, answer, delay=0.0):
        self.text, self.answer, self.delay = text, answer, delay
        self.asked, self.polled = [], 0

    def connected(self, **limits):
        self.asked += limits.values()
        time.sleep(self.delay)
        return self.connection(Connection)

    async def aconnected(self, **limits):
        self.asked += limits.values()
        await asyncio.sleep(self.delay)
        return self.connection(AsyncConnection)

    def connection(self, kind):
        if isinstance(self.answer, NoSentinel):
            raise ConnectionError("silent")
        return kind(self)

    def replies(self):
        is_down = isinstance(self.answer, NoMaster)
        master = discovery.Master("nobody", 1, 9) if is_down else self.answer
        address, flags = [master.host.encode(), b"1"], b"master,s_down" if is_down else b"master"
        yield address
        self.polled += 1
        yield [b"ip", address[0], b"port", address[1], b"flags", flags, b"config-epoch", b"%d" % master.epoch]


class Connection:
    """To such a sentinel."""

    _writer = None  # that redis-py's asynchronous connections have while they are open
    new_login = None

    def __init__(self, sentinel):
        self.sentinel = sentinel

    def send_packed_command(self, command, check_health):
        self.replies = self.sentinel.replies()

    def can_read(self, timeout):
        return True

    def read_response(self, disable_decoding):
        return next(self.replies)

    def disconnect(self):
        pass


class AsyncConnection(Connection):
    async def send_packed_command(self, command, check_health):
        super().send_packed_command(command, check_health)

    async def read_response(self, disable_decoding):
        return super().read_response(disable_decoding)

    async def disconnect(self, nowait):
        pass


def test_who_asked_before_a_failover_does_not_undo_it():
    """A slower thread, whose sentinel was asked before. Sentinels that were set up anew begin with small epochs."""
    known = discovery.Sentinels("service", [Sentinel("silent", NoSentinel())], Timing())
    old, new = discovery.Master("old", 1, 4), discovery.Master("new", 1, 5)
    known.confirm(old)
    assert known.confirm(new) is new
    with pytest.raises(NoMaster, match="old:1 is not the master any more: new:1 is"):
        known.confirm(old)
    assert known.master is new
    assert known.confirm(new._replace(epoch=0)) is new
    reset = old._replace(is_reset=True)
    assert known.confirm(reset) is known.master is reset
    known.close()


@pytest.mark.parametrize(
    ("named", "moves"),
    [
        ([("new", 0), ("new", 0), ("new", 0)], True),
        ([("new", 0), None, ("new", 0)], True),
        ([("new", 0), None, None], False),
        ([("new", 0), ("old", 4), ("new", 0)], False),
        ([("new", 0), ("new", 0), ("other", 0)], False),
        ([("new", 5), None, None], True),
    ],
)
def test_who_may_move_the_master_by_a_smaller_epoch(named, moves):
    """Most of the sentinels in a whole round, none of which names the present one: a few may be cut off."""
    answers = [NoMaster() if one is None else discovery.Master(one[0], 1, one[1]) for one in named]
    sentinels, timing = [Sentinel(str(number), answer) for number, answer in enumerate(answers)], Timing()
    timing.sentinel_interval = 0.001
    known = discovery.Sentinels("service", sentinels, timing)
    known.confirm(discovery.Master("old", 1, 4))
    eventually(lambda: all(sentinel.polled >= 4 for sentinel in sentinels))
    assert known.master.host == ("new" if moves else "old")
    known.close()


@pytest.mark.parametrize(("silent", "moves"), [(0, True), (1, True), (2, False)])
def test_a_search_believes_smaller_epochs_of_most_alone(silent, moves, calls):
    """The last one that answers may be cut off together with a former master."""
    answers = [discovery.Master("former", 1, 0)] * (3 - silent) + [NoSentinel()] * silent
    sentinels = [Sentinel(str(number), answer) for number, answer in enumerate(answers)]
    known = discovery.Sentinels("service", sentinels, Timing())
    known.confirm(discovery.Master("known", 1, 4))
    if moves:
        assert calls(known).find(20.0) == discovery.Master("former", 1, 0, is_reset=True)
    else:
        with pytest.raises(NoMaster, match="0: known:1 took over from former:1 before; 1: silent; 2: silent"):
            calls(known).find(20.0)
    known.close()


@pytest.mark.parametrize("epochs", [(1, 2, 0), (2, 1, 1), (0, 1, 2)])
def test_of_smaller_epochs_a_search_believes_the_largest(epochs, calls):
    """Also after they were set up anew, one of them may miss a failover."""
    answers = [discovery.Master(f"of epoch {epoch}", 1, epoch) for epoch in epochs]
    sentinels = [Sentinel(str(number), answer) for number, answer in enumerate(answers)]
    known = discovery.Sentinels("service", sentinels, Timing())
    known.confirm(discovery.Master("known", 1, 4))
    assert calls(known).find(20.0) == discovery.Master("of epoch 2", 1, 2, is_reset=True)
    known.close()


def test_none_is_missing_for_others_while_one_is_moved_to_the_end():
    """Searches begin at any moment, and read their order without waiting."""
    sentinels = [Sentinel(str(number), discovery.Master("new", 1, 1)) for number in range(3)]
    known = discovery.Sentinels("service", sentinels, Timing())
    known.find(20.0)
    orders = []

    def note(frame, event, argument):
        orders.append([sentinel.text for sentinel in order_of(known)])
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        known.report_failure()
    finally:
        sys.settrace(before)
    assert sorted(set(map(tuple, orders))) == [("0", "1", "2"), ("1", "2", "0")]
    known.close()


class TestSharedSearch:
    """In a failover all who lost their connection ask at once."""

    @pytest.fixture
    def sentinel(self):
        return Sentinel("one", discovery.Master("new", 1, 1), delay=0.05)

    @pytest.fixture
    def known(self, sentinel, monkeypatch):
        monkeypatch.setattr(Timing, "search_kept", 60)
        return discovery.Sentinels("service", [sentinel], Timing())

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (discovery.Master("new", 1, 1), "new:1"),
            (NoMaster(), "one: the master nobody:1 is down"),
            (NoSentinel(), "one: silent"),
        ],
    )
    def test_by_threads_and_tasks(self, known, sentinel, answer, text):
        sentinel.answer, found = answer, []

        def find():
            try:
                found.append(known.find(20.0))
            except ConnectionError as error:
                found.append(error)

        async def find_all():
            found.extend(await asyncio.gather(*(known.afind(20.0) for _ in range(10)), return_exceptions=True))

        threads = [threading.Thread(target=find) for _ in range(10)]
        threads.append(threading.Thread(target=asyncio.run, args=(find_all(),)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sentinel.asked) == 1
        assert {(type(one), str(one)) for one in found} == {(type(answer), text)}
        assert len(found) == 20

    def test_is_over_after_a_moment(self, known, sentinel, monkeypatch):
        monkeypatch.setattr(Timing, "search_kept", 0)
        known.find(2.0)
        asyncio.run(known.afind(20.0))
        assert len(sentinel.asked) == 2

    def test_a_failure_that_somebody_must_correct_is_told_as_such_to_all(self, known, sentinel, monkeypatch):
        def refuse(**limits):
            sentinel.asked.append(limits)
            raise ConnectionError("no") from ssl.SSLCertVerificationError("self-signed certificate")

        monkeypatch.setattr(sentinel, "connected", refuse)
        for _ in range(2):
            with pytest.raises(NoSentinel) as told:
                known.find(2.0)
            assert not is_transient(told.value)
        assert len(sentinel.asked) == 1

    def test_a_failure_that_is_kept_keeps_nothing_of_its_callers(self, known, sentinel):
        sentinel.answer = NoSentinel("silent")

        class Known:
            """What a caller knows, such as its request with the token."""

        def find():
            mine = Known()
            with pytest.raises(NoSentinel):
                known.find(2.0)
            return weakref.ref(mine)

        known_before = find()
        gc.collect()
        assert known_before() is None

    def test_silence_counts_for_those_who_wait_no_longer(self, known, sentinel):
        sentinel.answer = NoSentinel()
        for timeout in (0.1, 0.05, 2.0, 3.0):
            with pytest.raises(NoSentinel):
                known.find(timeout)
        assert [round(timeout, 1) for timeout in sentinel.asked] == [0.1, 2.0]

    def test_who_is_cancelled_leaves_it_to_the_next(self, known, sentinel):
        async def cancel_first():
            first, *others = [asyncio.create_task(known.afind(LONG)) for _ in range(3)]
            await asyncio.sleep(0.01)
            first.cancel()
            assert await asyncio.gather(*others) == [sentinel.answer] * 2

        asyncio.run(asyncio.wait_for(cancel_first(), PATIENCE))
        assert len(sentinel.asked) == 2

    def test_who_hangs_is_not_waited_for_longer_than_the_timeout(self, known, sentinel, monkeypatch):
        hangs, go_on = threading.Event(), threading.Event()

        def hang():
            hangs.set()
            go_on.wait(PATIENCE)

        sentinel.replies, replies = lambda: hang() or replies(), sentinel.replies
        hanging = threading.Thread(target=known.find, args=(20.0,))
        hanging.start()
        assert hangs.wait(PATIENCE)
        sentinel.replies = replies
        assert known.find(0.05) == asyncio.run(known.afind(0.05)) == sentinel.answer
        assert len(sentinel.asked) == 2
        go_on.set()
        hanging.join()
