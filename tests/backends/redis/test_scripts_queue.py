"""Waiting under fire: waiters and holders that die, replies that are lost, subscriptions that are cut.

Several aliases that point at one server wait as several processes do: each has its own line, listener and place.
Real processes stand where one must be killed, stopped or forked. ``DISTLOCK_SOAK=600`` makes the random run last
that many seconds.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from django_distlock import LockBackendError, State, adopt, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis import pubsub as listening
from django_distlock.backends.redis import topology
from django_distlock.backends.redis.backend import RedisBackend
from django_distlock.backends.redis.operations import ACQUIRE, RELEASE
from django_distlock.core import local_queue
from django_distlock.types import Grant, LockInfo, LockRequest
from django_distlock.utils.clock import clock
from tests.support import proxy as proxies
from tests.support.accidents import Accidents
from tests.support.history import faults, left_behind
from tests.support.inside import client_of, lines_of, listener_of, waiters_of
from tests.support.leases import lease_of
from tests.support.peers import RANDOM_WORKER, Peer
from tests.support.ports import free_port
from tests.support.programs import in_a_fork
from tests.support.tools import (
    ALLOWANCE,
    GIVES_UP_SOON,
    PATIENCE,
    eventually,
    lock_request,
    queue_of,
    renewer_of,
    take_no_waiter_for_dead,
    threads_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.seconds(1)]

REDIS = "django_distlock.backends.redis.RedisBackend"
QUEUE = "lock|q:name"
ALIASES = ("default", "a", "b", "c")
LOOK = Timing.look_interval
SLACK = ALLOWANCE  # what must not be waited for lasts longer
LONG = 4 * PATIENCE  # a wait that no sound test sees the end of
NOBODY_IS_DEAD = """
from django_distlock.backends.common.timing import Timing
Timing.unresponsive_after = Timing.grant_ttl = Timing.waiter_expires_after = 60.0
"""  # as take_no_waiter_for_dead(), in a program
SOAK = float(os.environ.get("DISTLOCK_SOAK", "3"))


@pytest.fixture
def fleet(valkey, store, settings):
    """Backends that know nothing of each other, by their aliases."""
    settings.DISTRIBUTED_LOCKS = {alias: {"BACKEND": REDIS, "LOCATION": valkey.url} for alias in ALIASES}
    yield locks
    locks.close()


@pytest.fixture
def through_proxy(proxied, proxy, valkey, settings):
    """Of the same backends, the default one goes through the proxy."""
    behind = settings.DISTRIBUTED_LOCKS["default"]
    others = {alias: {"BACKEND": REDIS, "LOCATION": valkey.url} for alias in ALIASES[1:]}
    settings.DISTRIBUTED_LOCKS = {"default": behind, **others}
    yield proxy
    proxy.hang = False
    proxy.accept()
    eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
    locks.close()


@pytest.fixture
def repeating_once(through_proxy, settings, monkeypatch):
    """A call through the proxy that is repeated is repeated once: its time is over after the second attempt."""
    options = {"socket_timeout": 1.5, "socket_connect_timeout": 1.5}
    behind = {**settings.DISTRIBUTED_LOCKS["default"], "OPTIONS": options}
    settings.DISTRIBUTED_LOCKS = {**settings.DISTRIBUTED_LOCKS, "default": behind}
    for pause in ("call_retry_pause_shortest", "call_retry_pause_longest"):
        monkeypatch.setattr(Timing, pause, 1.8)
    return through_proxy


@pytest.fixture
def lasting_places(monkeypatch):
    """What somebody left in the queue is not taken for given up because it has run out meanwhile."""
    monkeypatch.setattr(Timing, "queue_ttl", 600.0)


@pytest.fixture
def lasting_grants(monkeypatch):
    """Who gets in was woken, or looked: nothing that was handed over ends by time before a test fails."""
    take_no_waiter_for_dead(monkeypatch)


@pytest.fixture(params=["thread", "task"])
def caller(request, callers):
    """Starts callers of one kind."""
    return lambda *args, **options: callers(*args, as_task=request.param == "task", **options)


def in_queue(store, number):
    """Return the queue, as pairs of member and place, when it has that many waiters."""
    eventually(lambda: store.zcard(QUEUE) == number)
    return store.zrange(QUEUE, 0, -1, withscores=True)


def in_line(number, using="default"):
    """Wait until that many callers of this backend wait for the name."""
    eventually(lambda: locks.service(using).queue.length("name") == number)


def is_clean(store):
    """Nothing is left but the last number, and retired tokens, which go with their TTL."""

    def rest():
        return [key for key in left_behind(store.keys()) if not (key.startswith("lock|x:") and store.pttl(key) > 0)]

    return eventually(lambda: not rest())


def cut_listeners(client):
    """The server ends every subscription; returns how many."""
    return sum(client.client_kill_filter(_id=one["id"]) for one in listeners(client))


def tell_listeners(client, text):
    """As a server does that hands the lock to a waiter. Returns how many heard it."""
    return sum(client.execute_command("SPUBLISH", channel, text) for channel in client.pubsub_shardchannels())


def listeners(client):
    return [one for one in client.client_list() if int(one["sub"]) + int(one.get("ssub", 0)) > 0]


# Real processes


@pytest.fixture
def peers(valkey):
    """Starts programs, all at once, and returns them when they are ready."""
    started = []

    def start(number=1, code="get_in_and_out()", ttl=30.0):
        fresh = [Peer(valkey.url, code, ttl) for _ in range(number)]
        started.extend(fresh)
        for peer in fresh:
            peer.says("ready", 3 * PATIENCE)
        return fresh

    yield start
    for peer in started:
        peer.end()


def queued(peers, store):
    """Let them come one after another, each when the one before has its place."""
    for number, peer in enumerate(peers, 1):
        peer.tell()
        in_queue(store, number)
    return peers


class TestOrder:
    """S10."""

    def test_processes_get_in_as_they_came(self, fleet, store, peers):
        with lock("name"):
            waiters = queued(peers(3), store)
        for waiter in waiters:
            waiter.says("in")
            assert all(other.is_silent() for other in waiters)
            waiter.leaves()
        assert is_clean(store)

    @pytest.mark.parametrize("end", ["release", "expiry"])
    def test_those_who_do_not_wait_never_barge(self, fleet, store, callers, end):
        barged, stop = [], threading.Event()

        def barge():
            handle = lock("name", using="c")
            while not stop.is_set():
                if handle.acquire(blocking=False):
                    barged.append(time.monotonic())
                    handle.release()

        for _ in range(3):
            holder = lock("name", ttl=1.0 if end == "expiry" else 30, renew=end == "release", on_lost="log")
            assert holder.acquire()
            waiters = [callers("a")]
            in_queue(store, 1)
            if end == "release":
                waiters.append(callers("b"))
                in_queue(store, 2)
            stop.clear()
            thread = threading.Thread(target=barge)
            thread.start()
            try:
                if end == "release":
                    holder.release()
                for waiter in waiters:
                    waiter.gets_in()
                    if waiter is not waiters[-1]:
                        waiter.leaves()
            finally:
                stop.set()
                thread.join(PATIENCE)
            assert barged == []
            waiters[-1].leaves()
        assert is_clean(store)


@pytest.mark.parametrize("position", [0, 1, 2], ids=["head", "middle", "end"])
class TestWaitersThatDie:
    """S7: the others do not suffer."""

    @pytest.mark.usefixtures("lasting_grants")
    def test_killed(self, fleet, store, peers, position):
        """They get in long before its place, or what it was handed, would end by time."""
        with lock("name"):
            waiters = queued(peers(3, f"{NOBODY_IS_DEAD}get_in_and_out()"), store)
            waiters[position].kill()
        del waiters[position]
        for waiter in waiters:
            waiter.says("in")
            waiter.leaves()
        assert is_clean(store)

    def test_stopped_and_continued(self, fleet, store, peers, position):
        with lock("name"):
            waiters = queued(peers(3), store)
            waiters[position].stop()
        stopped = waiters.pop(position)
        left = time.monotonic()
        for waiter in waiters:
            assert waiter.says("in") - left < Timing.grant_ttl + SLACK
            if waiter is waiters[-1]:
                stopped.go_on()
            waiter.leaves()
            left = time.monotonic()
        assert stopped.says("in") - left < Timing.grant_ttl + LOOK + SLACK
        stopped.leaves()
        assert is_clean(store)


class TestACrowd:
    """A process that waits for so many names that it looks at each every eight seconds."""

    @pytest.fixture
    def crowd(self, fleet, callers):
        for alias in "ab":
            locks[alias].timing.looks_per_second = 0.01
        return callers

    def test_is_told_when_a_min_hold_is_over(self, crowd, store):
        locks["a"].timing.look_interval_longest = 2 * PATIENCE
        holder = lock("name", using="c", min_hold=2.0)
        assert holder.acquire()
        acquired = time.monotonic()
        waiter = crowd("a")
        in_queue(store, 1)
        holder.release()
        assert waiter.gets_in() - acquired < 2 + 2 * LOOK + SLACK
        waiter.leaves()
        assert is_clean(store)

    def test_keeps_its_places_between_its_looks(self, crowd, store):
        with lock("name", using="c"):
            waiter = crowd("a")
            in_queue(store, 1)
            assert store.pttl(QUEUE) > 2.5 * 1000 * locks["a"].timing.look_interval_longest
        waiter.gets_in()
        waiter.leaves()


class TestHoldersThatDie:
    @pytest.mark.usefixtures("lasting_grants")
    def test_killed_the_first_waiter_follows_within_its_ttl(self, fleet, store, peers, callers):
        """S7."""
        [holder] = peers(ttl=1.5)
        holder.tell()
        holder.says("in")
        waiters = [callers("a"), callers("b")]
        in_queue(store, 2)
        holder.kill()
        killed = time.monotonic()
        first = eventually(lambda: next((one for one in waiters if one.outcome), None))
        assert first.gets_in() - killed < 1.5 + LOOK + SLACK
        first.leaves()
        waiters.remove(first)
        waiters[0].gets_in()
        waiters[0].leaves()
        assert is_clean(store)

    @pytest.mark.seconds(3)
    def test_stopped_it_is_told_of_its_loss(self, fleet, store, peers, callers):
        """S5, while others wait."""
        code = (
            "lease = lock('name', ttl=2, on_lost='log').__enter__(); say('in')\n"
            "while lease.state == 'held': time.sleep(0.002)\n"
            "say(lease.state)\ntold()"
        )
        [holder] = peers(code=code)
        holder.tell()
        holder.says("in")
        waiter = callers("a")
        in_queue(store, 1)
        holder.stop()
        waiter.gets_in(2 + LOOK + SLACK)
        holder.go_on()
        holder.says("lost")
        waiter.leaves()
        holder.tell()
        holder.process.wait(PATIENCE)
        assert is_clean(store)


TRY, WAIT, A_LOOK, LAST = ACQUIRE.head(4), "$4\r\nwait", "$4\r\nlook", "$4\r\nlast"


class TestLostReplies:
    """S3, S4: the command was executed and nobody heard of it; once (repeated unnoticed) or twice (an error to who
    has no place yet, and waited on by who has one)."""

    @pytest.mark.parametrize("times", [1, 2])
    @pytest.mark.parametrize("marker", [TRY, WAIT, A_LOOK], ids=["try", "wait", "look"])
    def test_of_a_waiter(self, repeating_once, store, caller, marker, times):
        holder = lock("name", using="a")
        assert holder.acquire()
        repeating_once.cut_reply(marker, times)
        waiter = caller(ttl=10)
        eventually(lambda: repeating_once.cuts == times)
        if times == 1 or marker == A_LOOK:
            in_queue(store, 1)
            holder.release()
            waiter.gets_in()
            waiter.leaves()
        else:
            assert isinstance(eventually(lambda: waiter.outcome), LockBackendError)
            in_queue(store, 0)
            holder.release()
        assert is_clean(store)

    @pytest.mark.parametrize("times", [1, 2])
    def test_of_the_look_that_takes_the_lock(self, through_proxy, store, caller, monkeypatch, times):
        monkeypatch.setattr(Timing, "echo_interval", 0.0)  # else this look is a quiet one
        holder = lock("name", using="a")
        assert holder.acquire()
        waiter = caller(ttl=2)
        in_queue(store, 1)
        through_proxy.cut_reply(A_LOOK, times)
        holder.release()
        waiter.gets_in()
        waiter.leaves()
        assert through_proxy.cuts == times
        assert is_clean(store)

    @pytest.mark.parametrize("times", [1, 2])
    def test_of_the_last_chance(self, through_proxy, store, caller, times):
        with lock("name", using="a"):
            through_proxy.cut_reply(LAST, times)
            waiter = caller(ttl=2, wait=0.4)
            outcome = eventually(lambda: waiter.outcome)
            assert outcome == "late" if times == 1 else isinstance(outcome, LockBackendError)
            in_queue(store, 0)
        assert through_proxy.cuts == times
        assert is_clean(store)

    @pytest.mark.parametrize("times", [1, 2])
    def test_of_a_release_that_handed_the_lock_on(self, through_proxy, store, caller, callers, times):
        holder = caller(ttl=2)
        holder.gets_in()
        waiter = callers("a")
        in_queue(store, 1)
        through_proxy.cut_reply(RELEASE.sha, times)
        holder.go.set()
        waiter.gets_in()
        assert holder.ended.wait(PATIENCE)
        assert through_proxy.cuts == times
        time.sleep(0.1)
        assert locks["a"].look(["name"])[0][0].remaining > 20  # the release that is repeated is not the waiter's
        waiter.leaves()
        assert is_clean(store)

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_of_leaving_the_queue_when_cancelled(self, through_proxy, store, callers, times):
        with lock("name", using="a"):
            waiter = callers(as_task=True)
            in_queue(store, 1)
            through_proxy.cut_reply(RELEASE.sha, times)
            waiter.cancel()
            assert waiter.ended.wait(PATIENCE)
            in_queue(store, 0)
            eventually(lambda: through_proxy.cuts == times)
        assert is_clean(store)

    def test_of_joining_the_queue_the_waiter_knows_its_place(self, through_proxy, store, caller):
        """Else it would come back behind others when it is dropped."""
        with lock("name", using="a"):
            through_proxy.cut_reply(WAIT)
            waiter = caller(ttl=2)
            [(_, score)] = in_queue(store, 1)
            [mine] = eventually(locks.service("default").queue.queued)
            eventually(lambda: mine.place)
            assert int(mine.place) == int(score)
        waiter.gets_in()
        waiter.leaves()


class TestStoresThatLoseData:
    @pytest.mark.usefixtures("lasting_grants")
    def test_emptied(self, fleet, store, callers):
        holder = callers(ttl=1)
        holder.gets_in()
        waiters = []
        for number, alias in enumerate("abc", 1):
            waiters.append(callers(alias))
            in_queue(store, number)
        store.flushall()
        first = eventually(lambda: next((one for one in waiters if one.outcome), None))
        first.gets_in()
        in_queue(store, 2)  # by their next look the others are back in their places
        first.leaves()
        for waiter in waiters:
            waiter.gets_in()
            waiter.leaves()
        holder.leaves()
        assert is_clean(store)

    def test_killed_and_started_again_empty(self, own_valkey, settings, callers):
        server = own_valkey()
        entry = {"BACKEND": REDIS, "LOCATION": server.url}
        settings.DISTRIBUTED_LOCKS = dict.fromkeys(ALIASES, entry)
        holder = callers(ttl=1)
        holder.gets_in()
        waiters = [callers(alias, stays=False, as_task=alias == "b") for alias in "abc"]
        with redis.Redis.from_url(server.url) as client:
            in_queue(client, 3)
        server.process.kill()
        server.process.wait()
        server.start()
        for waiter in waiters:
            assert waiter.ended.wait(PATIENCE)
            assert waiter.outcome == "in" or isinstance(waiter.outcome, LockBackendError)
        holder.leaves()
        with lock("name", wait=PATIENCE):
            pass
        locks.close()


class Swallowing(proxies.Passage):
    """Drops what the server publishes; everything else passes."""

    async def replies(self):
        while data := await self.server[0].read(65536):
            if getattr(self.proxy, "swallow", False) and b"message\r\n" in data:
                continue
            if self.muted:
                self.answered.set()
                await asyncio.sleep(PATIENCE)
            self.client[1].write(data)


@pytest.fixture
def swallowing(monkeypatch, repeating_once):
    monkeypatch.setattr(proxies, "Passage", Swallowing)
    return repeating_once


class TestListeners:
    @pytest.mark.usefixtures("lasting_grants")
    def test_cut_the_waiter_still_gets_in(self, fleet, store, caller):
        with lock("name", using="a"):
            waiter = caller()
            in_queue(store, 1)
            before = {one["id"] for one in listeners(store)}
            assert cut_listeners(store)
        waiter.gets_in()
        waiter.leaves()
        eventually(lambda: {one["id"] for one in listeners(store)} - before)
        assert is_clean(store)

    def test_cut_again_and_again_nobody_waits_long(self, fleet, store, callers):
        handles = [callers(alias, stays=False) for alias in ALIASES * 5]
        deadline = time.monotonic() + 2 * PATIENCE
        while not all(one.ended.is_set() for one in handles):
            assert time.monotonic() < deadline
            cut_listeners(store)
            time.sleep(0.02)
        assert {one.outcome for one in handles} == {"in"}
        assert is_clean(store)

    def test_a_look_while_the_subscription_is_made_again_keeps_the_place(self, fleet, store, callers, monkeypatch):
        """S10: dropped is not forgotten."""
        holder = lock("name", using="c")
        assert holder.acquire()
        first = callers("a")
        in_queue(store, 1)
        second = callers("b")
        before = in_queue(store, 2)
        subscribe, opens_at = listening.RedisListener.subscribe, time.monotonic() + 1.4 * LOOK

        def refused(listener, connection):
            if time.monotonic() < opens_at:
                raise redis.ConnectionError("no more connections")
            return subscribe(listener, connection)

        monkeypatch.setattr(listening.RedisListener, "subscribe", refused)
        cut_listeners(store)
        time.sleep(max(0.0, opens_at - time.monotonic()) + 1.2 * LOOK)
        eventually(lambda: store.zrange(QUEUE, 0, -1, withscores=True) == before, 2 * LOOK + SLACK)
        holder.release()
        first.gets_in()
        assert second.outcome is None
        first.leaves()
        second.gets_in()
        second.leaves()
        assert is_clean(store)

    @pytest.mark.seconds(4)
    @pytest.mark.usefixtures("lasting_grants")
    def test_silently_dead_the_waiter_gets_in_by_its_looks_and_subscribes_again(self, swallowing, store, caller):
        holder = lock("name", using="a")
        assert holder.acquire()
        waiter = caller()
        in_queue(store, 1)
        dead = {one["id"] for one in listeners(store)}
        swallowing.swallow = True
        eventually(lambda: {one["id"] for one in listeners(store)} - dead, Timing.echo_timeout + 2 * LOOK + 2 * SLACK)
        holder.release()
        waiter.gets_in()
        waiter.leaves()
        assert is_clean(store)

    @pytest.mark.usefixtures("lasting_grants")
    def test_a_lost_hint_is_found_by_the_look(self, swallowing, store, caller):
        with lock("name", using="a"):
            waiter = caller()
            in_queue(store, 1)
            swallowing.swallow = True
        waiter.gets_in()
        waiter.leaves()

    @pytest.mark.seconds(4)
    def test_a_healthy_one_keeps_its_connection(self, fleet, store, callers, monkeypatch):
        monkeypatch.setattr(Timing, "echo_timeout", 0.25)
        monkeypatch.setattr(Timing, "look_interval", 0.5)
        with lock("name", using="c"):
            before = {one["id"] for one in listeners(store)}
            waiter = callers("a")
            in_queue(store, 1)
            [mine] = {one["id"] for one in listeners(store)} - before
            ends = time.monotonic() + 4
            while time.monotonic() < ends:
                assert mine in {one["id"] for one in listeners(store)}
                time.sleep(0.05)
        waiter.gets_in()
        waiter.leaves()

    def test_nor_does_a_hand_off_end_it(self, fleet, store, callers, monkeypatch):
        """A look that is granted the lock publishes nothing that could come back."""
        monkeypatch.setattr(Timing, "echo_timeout", 0.25)
        monkeypatch.setattr(Timing, "look_interval", 0.1)
        before, subscribed = {one["id"] for one in listeners(store)}, set()
        for _ in range(2):
            with lock("name", using="c"):
                waiter = callers("a")
                in_queue(store, 1)
                ends = time.monotonic() + 0.5
                while time.monotonic() < ends:
                    subscribed |= {one["id"] for one in listeners(store)} - before
                    time.sleep(0.01)
            waiter.gets_in()
            waiter.leaves()
            time.sleep(2 * Timing.echo_timeout)
        assert len(subscribed) == 1

    @pytest.mark.parametrize("interval", [0.0, 600.0], ids=["later", "soon"])
    def test_an_echo_that_was_counted_is_enough_for_the_looks_of_some_time(
        self, fleet, store, caller, monkeypatch, interval
    ):
        monkeypatch.setattr(Timing, "look_interval", 0.05)
        monkeypatch.setattr(Timing, "echo_interval", interval)
        monkeypatch.setattr(Timing, "echo_timeout", LONG)

        def calls(command):
            return store.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]

        def published_after(looks):
            asked = calls("evalsha")
            eventually(lambda: calls("evalsha") >= asked + looks)
            return calls("spublish") - before

        before = calls("spublish")
        with lock("name", using="c", renew=False):
            waiter = caller("a")
            in_queue(store, 1)
            if interval:
                assert published_after(20) == 3  # whether scripts count the subscription is asked by two
                cut_listeners(store)
                eventually(lambda: calls("spublish") == before + 4)  # by the next subscription
                assert published_after(20) == 4
            else:
                assert published_after(20) >= 2 + 19
        waiter.gets_in()
        waiter.leaves()

    @pytest.mark.usefixtures("lasting_grants")
    def test_idle_it_closes_its_connection_and_comes_back_when_needed(self, fleet, store, callers, monkeypatch):
        monkeypatch.setattr(Timing, "listener_idle", 1.5)
        known = {one["id"] for one in listeners(store)}
        for _ in range(2):
            with lock("name", using="c"):
                waiter = callers()
                in_queue(store, 1)
                assert {one["id"] for one in listeners(store)} - known
            waiter.gets_in()
            waiter.leaves()
            eventually(lambda: not {one["id"] for one in listeners(store)} - known)
            eventually(lambda: not threads_of("listener"))

    @pytest.mark.usefixtures("lasting_grants")
    def test_it_does_not_idle_while_somebody_waits(self, fleet, store, callers, monkeypatch):
        monkeypatch.setattr(Timing, "listener_idle", 1.5)
        with lock("name", using="c"):
            waiter = callers()
            in_queue(store, 1)
            time.sleep(2.5)
            assert listener_of(locks["default"]).is_ready
        waiter.gets_in()
        waiter.leaves()


class TestHandingBack:
    """What was handed to a token that nobody here knows is handed on; a lease that was taken is somebody's."""

    def test_who_hears_of_it_at_a_former_master_is_not_told_what_to_take(self, own_valkey, settings):
        """A replica delivers what its master publishes. The master counts nobody for that, and hands it to the next."""
        port = free_port()
        master = own_valkey("--port", str(port), "--repl-diskless-sync-delay", "0")
        former = own_valkey("--replicaof", "127.0.0.1", str(port))
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": master.url}}
        holder, waiter = lock_request(), lock_request()
        waiter.inbox = "Tlock|in:here"
        with redis.Redis.from_url(former.url, decode_responses=True) as client, client.pubsub() as subscription:
            eventually(lambda: client.info("replication")["master_link_status"] == "up")
            subscription.ssubscribe("lock|in:here")
            eventually(lambda: subscription.get_sharded_message())
            assert isinstance(locks["default"].acquire(holder, queue=False), Grant)
            assert isinstance(locks["default"].acquire(waiter, queue=True), LockInfo)
            assert locks["default"].release(holder) is True
            heard = eventually(lambda: subscription.get_sharded_message(ignore_subscribe_messages=True))
        assert heard["data"] == f"{waiter.token} 1 0 lock:name"
        assert locks["default"].look(["name"]) == [[]]

    def test_a_message_that_comes_late_leaves_the_lease_to_who_adopted_it(self, fleet, store, monkeypatch):
        handed_back = []
        release = RedisBackend.release

        def released(backend, lock_request, cooldown=0.0):
            handed_back.extend([lock_request.name] * lock_request.is_offer)
            return release(backend, lock_request, cooldown)

        monkeypatch.setattr(RedisBackend, "release", released)
        backend = locks["default"]
        listener_of(backend).start("name", PATIENCE)
        with lock("name") as lease:
            text, token = lease.detach(), lease.token
        with adopt(text) as lease:

            def is_handed_back():  # told again where the connection that listens is made anew just then
                return handed_back or (tell_listeners(store, f"{token} 1 0 lock:name") and handed_back)

            eventually(is_handed_back)
            eventually(lambda: not renewer_of(backend).is_cleaning)
            assert set(handed_back) == {"name"}
            lease.renew()
            assert lock("name", using="a").acquire(blocking=False) is False
        assert is_clean(store)

    def test_a_message_does_not_stand_for_the_release_that_is_tried_again(self, fleet, store, caplog, monkeypatch):
        backend, mine, handed_back = locks["default"], lock_request(ttl=60), []
        renewer = renewer_of(backend)

        def refuse(*_, **__):
            raise LockBackendError("the store is away")

        def note(request):
            renewer.release_in_background(request)
            handed_back.append(request.token)

        assert isinstance(backend.acquire(mine, queue=False), Grant)
        listener_of(backend).start("name", PATIENCE)
        with monkeypatch.context() as away:
            away.setattr(backend, "release", refuse)
            renewer.release_in_background(mine)
            eventually(lambda: "is tried again" in caplog.text)
            away.setattr(backend, "on_orphan", note)
            eventually(lambda: tell_listeners(store, f"{mine.token} 1 0 lock:name") and handed_back)
        assert set(handed_back) == {mine.token}
        assert is_clean(store)

    def test_processes_with_the_same_inbox_exclude_each_other(self, fleet, store, monkeypatch):
        """Started from one image of a memory: a fork without Python's hooks, or a snapshot that is restored twice."""
        locks.close()
        with monkeypatch.context() as copies:
            copies.setattr(topology, "new_process", lambda: "0" * 26)
            for alias in ("a", "b"):
                listener_of(locks[alias]).start("name", PATIENCE)
        assert store.execute_command("PUBSUB", "SHARDNUMSUB", f"lock|in:{'0' * 26}")[1] == 2
        inside, most, ends = [], [], time.monotonic() + 1.0

        def work(alias):
            while time.monotonic() < ends:
                with lock("name", using=alias, wait=PATIENCE):
                    inside.append(alias)
                    most.append(len(inside))
                    time.sleep(0.001)
                    inside.pop()

        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, alias) for alias in ("a", "b") * 3]:
                done.result()
        assert max(most) == 1
        assert is_clean(store)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestFork:
    """S8: a child waits on its own."""

    def test_while_held(self, fleet, store):
        def work():
            with lock("name", wait=PATIENCE) as lease:
                return lease.state

        answers = []
        with lock("name"):
            thread = threading.Thread(target=lambda: answers.append(in_a_fork(work)))
            thread.start()
            in_queue(store, 1)
        thread.join(PATIENCE)
        assert answers == ["held"]

    @pytest.mark.usefixtures("lasting_grants")
    def test_while_waiting(self, fleet, store, callers):
        def work():
            handle = lock("name", wait=PATIENCE)
            got_in = handle.acquire()
            handle.release()
            return got_in

        answers = []
        with lock("name", using="a"):
            waiter = callers()
            in_queue(store, 1)
            thread = threading.Thread(target=lambda: answers.append(in_a_fork(work)))
            thread.start()
            in_queue(store, 2)
        waiter.gets_in()
        assert answers == []
        waiter.leaves()
        thread.join(PATIENCE)
        assert answers == ["True"]
        assert is_clean(store)


class TestManyInOneProcess:
    def test_threads_and_tasks_get_in_one_at_a_time_as_they_came(self, own_valkey, settings, callers):
        server = own_valkey()
        settings.DISTRIBUTED_LOCKS = {
            alias: {"BACKEND": REDIS, "LOCATION": server.url} for alias in ("default", "other")
        }
        came, got_in, inside, most, places = [], [], [], [], []

        def enter(number):
            inside.append(number)
            got_in.append(number)
            most.append(len(inside))

        def in_thread(number):
            with lock("name", wait=LONG):
                enter(number)
                time.sleep(0.001)
                inside.remove(number)

        async def in_task(number):
            async with lock("name", wait=LONG):
                enter(number)
                await asyncio.sleep(0.001)
                inside.remove(number)

        async def pause():
            await locks["default"].alook(["name"])

        with asyncio.Runner() as runner, redis.Redis.from_url(server.url, decode_responses=True) as client:
            loop = runner.get_loop()
            ends = threading.Event()
            looping = threading.Thread(target=runner.run, args=(_until(ends),))
            looping.start()
            work = []
            with lock("name", using="other"):
                for number in range(100):
                    if number % 2:
                        work.append(threading.Thread(target=in_thread, args=(number,)))
                        work[-1].start()
                    else:
                        asyncio.run_coroutine_threadsafe(in_task(number), loop)
                    came.append(number)
                    in_line(number + 1)
                assert client.zcard(QUEUE) == 1
                # One connection listens; those that looked are free again, and far from one for each waiter.
                assert len(listeners(client)) == 1
                assert len(client.client_list()) < 10
                handle = lock("another")  # the pool has connections for others
                assert handle.acquire(timeout=0)
                handle.release()
            while len(got_in) < 100:
                places.append(client.zcard(QUEUE))
                assert len(places) < 100_000
            for thread in work:
                thread.join(PATIENCE)
            eventually(lambda: not inside)
            ends.set()
            looping.join(PATIENCE)
            assert got_in == came
            assert set(most) == {1}
            assert max(places) <= 1
            assert is_clean(client)
        locks.close()


async def _until(ends):
    while not ends.is_set():
        await asyncio.sleep(0.005)


@pytest.mark.usefixtures("lasting_places")
class TestInheritance:
    """Whoever stands behind in the process goes on with the place in the store."""

    def leave_first(self, how, callers, monkeypatch):
        """Start a caller that will leave without the lock, and return what makes it leave."""
        if how == "timeout":
            callers(wait=1.3)
            return lambda: None
        if how == "cancellation":
            first = callers(as_task=True)
            return lambda: (first.cancel(), first.ended.wait(PATIENCE))
        interrupt = threading.Event()
        turn = locks["default"].wait_for_turn

        def interrupted(lock_request, timeout):
            turn(lock_request, timeout)
            if interrupt.is_set() and threading.current_thread() is thread:
                raise KeyboardInterrupt

        def run():
            with pytest.raises(KeyboardInterrupt):
                lock("name", wait=LONG).acquire()

        thread = threading.Thread(target=run)
        monkeypatch.setattr(locks["default"], "wait_for_turn", interrupted)
        thread.start()
        return lambda: (interrupt.set(), thread.join(PATIENCE))

    @pytest.mark.parametrize("as_task", [False, True], ids=["by a thread", "by a task"])
    @pytest.mark.parametrize("how", ["timeout", "cancellation", "exception"])
    def test_of_one_that_leaves(self, fleet, store, callers, monkeypatch, how, as_task):
        holder = lock("name", using="c")
        assert holder.acquire()
        leave = self.leave_first(how, callers, monkeypatch)
        in_queue(store, 1)
        heir = callers(as_task=as_task)
        in_line(2)
        stranger = callers("a")
        before = in_queue(store, 2)
        leave()
        gc.collect()  # a request that nobody has any more is nobody's
        in_line(1)
        assert in_queue(store, 2) == before
        monkeypatch.setattr(Timing, "look_interval", 4 * PATIENCE)
        time.sleep(LOOK)  # until the looks are over that it has begun to wait for
        holder.release()
        heir.gets_in()  # told, not found by a look
        assert stranger.outcome is None
        time.sleep(0.2)
        assert store.get("lock:name").split()[2] == "h"  # nobody took what was handed for nobody's
        heir.leaves()
        stranger.gets_in()
        assert heir.number < stranger.number
        stranger.leaves()
        assert is_clean(store)

    def test_each_in_turn(self, fleet, store, callers):
        holder = lock("name", using="c")
        assert holder.acquire()
        waiters = []
        for number in range(1, 6):
            waiters.append(callers(as_task=True))
            in_line(number)
        [(member, place)] = in_queue(store, 1)
        for number in range(4, -1, -1):
            assert in_queue(store, 1) == [(member, place)]
            first = waiters.pop(0)
            first.cancel()
            assert first.ended.wait(PATIENCE)
            in_line(number)
        in_queue(store, 0)
        holder.release()
        assert is_clean(store)

    @pytest.mark.usefixtures("lasting_grants")
    def test_one_in_the_middle_leaves_nobody_skipped(self, fleet, store, callers):
        with lock("name", using="c"):
            waiters = []
            for number in range(1, 5):
                waiters.append(callers(as_task=True))
                in_line(number)
            gone = waiters.pop(2)
            gone.cancel()
            assert gone.ended.wait(PATIENCE)
        for waiter in waiters:
            waiter.gets_in()
            assert all(other.outcome is None for other in waiters if other.number == 0)
            waiter.leaves()
        assert is_clean(store)


@pytest.mark.usefixtures("lasting_places")
class TestTokensOfThoseWhoLeave:
    """Whoever goes on with a token is the only one who says anything with it."""

    def test_a_grant_that_came_too_late_is_given_back_with_a_token_that_nobody_inherits(
        self, through_proxy, store, callers, monkeypatch
    ):
        """That release may be executed at any time: here when the next one of the process has the lock."""
        holder, backend = lock("name", using="c"), locks["default"]
        assert holder.acquire()
        slow = callers(ttl=1.0)
        in_queue(store, 1)
        quick = callers(ttl=60.0)
        in_line(2)
        acquire = backend.acquire

        def late(lock_request, *, queue):
            answer = acquire(lock_request, queue=queue)
            if isinstance(answer, Grant) and lock_request.ttl == 1.0:
                time.sleep(1.1)
            return answer

        monkeypatch.setattr(backend, "acquire", late)
        for _ in range(2):  # it is sent twice
            through_proxy.delay(RELEASE.sha)
        holder.release()
        quick.gets_in()
        eventually(lambda: len(through_proxy.delayed) == 2)
        through_proxy.deliver()
        lease = lease_of(quick.handle)
        lease.renew()
        assert store.get("lock:name").startswith(f"1 {lease.token} h ")
        quick.leaves()
        assert isinstance(eventually(lambda: slow.outcome), LockBackendError)
        eventually(lambda: is_clean(store))

    def test_one_that_has_asked_for_the_last_time_inherits_nothing(self, fleet, store, callers, monkeypatch):
        """Nobody would give the place up."""
        give_up, first_has_left = local_queue.LocalQueue.give_up, threading.Event()

        def slowly(line, lock_request, **options):
            if lock_request.ttl == 20.0:
                assert first_has_left.wait(PATIENCE)
            give_up(line, lock_request, **options)
            if lock_request.ttl == 25.0:
                first_has_left.set()

        monkeypatch.setattr(local_queue.LocalQueue, "give_up", slowly)
        with lock("name", using="c"):
            first = callers(wait=1.5, ttl=25.0)
            in_queue(store, 1)
            second = callers(wait=0.2, ttl=20.0)
            in_line(2)
            assert eventually(lambda: first.outcome) == eventually(lambda: second.outcome) == "late"
            in_queue(store, 0)
        assert is_clean(store)

    @pytest.mark.parametrize("mark", ["mark_asking", "take_turn"])
    def test_one_inherits_before_it_asks_or_not_at_all(self, monkeypatch, mark):
        line, first, second = local_queue.LocalQueue(Timing(), succeed=str), lock_request(), lock_request()
        inherit, begun, asked = LockRequest.inherit, threading.Event(), threading.Event()

        def slowly(heir, other):
            begun.set()
            asked.wait(0.2)
            inherit(heir, other)

        def ask():
            line.mark_asking(second) if mark == "mark_asking" else line.take_turn(second, clock())
            tokens.append(second.token)
            asked.set()

        monkeypatch.setattr(LockRequest, "inherit", slowly)
        first.inbox, tokens = "S1", []
        for one in (first, second):
            line.join(one, clock())
        first.asking = False
        leaving = threading.Thread(target=line.give_up, args=(first,))
        leaving.start()
        assert begun.wait(PATIENCE)
        ask()
        leaving.join(PATIENCE)
        assert tokens == [second.token] == [first.token]
        assert first.is_inherited

    def test_one_that_may_enter_again_asks_with_the_place_that_it_inherits_meanwhile(self, valkey_locks, monkeypatch):
        backend, queue, leader = locks["default"], locks.service("default").queue, lock_request()
        with lock(leader.name, reentrant=True):
            queue.join(leader, clock())
            backend.acquire(leader, queue=True)
            mark, acquire, asked = queue.mark_asking, backend.acquire, []

            def leave_first(lock_request):
                queue.give_up(leader)
                mark(lock_request)

            def noted(lock_request, *, queue):
                asked.append((lock_request.place, queue))
                return acquire(lock_request, queue=queue)

            monkeypatch.setattr(queue, "mark_asking", leave_first)
            monkeypatch.setattr(backend, "acquire", noted)
            with lock(leader.name, reentrant=True):
                pass
        assert asked == [(leader.place, True)]
        assert leader.place

    def test_a_place_is_given_up_also_if_the_last_attempt_was_not_sent(
        self, through_proxy, store, callers, monkeypatch
    ):
        backend = locks["default"]
        acquire, unsent_requests = backend.acquire, []

        def unsent(lock_request, *, queue):
            if not queue and lock_request.inbox:
                unsent_requests.append(lock_request)
                through_proxy.refuse()
                client_of(backend).close()
            try:
                return acquire(lock_request, queue=queue)
            finally:
                through_proxy.accept()

        monkeypatch.setattr(backend, "acquire", unsent)
        with lock("name", using="c"):
            waiter = callers(wait=1.5)
            in_queue(store, 1)
            assert isinstance(eventually(lambda: waiter.outcome), LockBackendError)
            assert [lock_request.in_doubt for lock_request in unsent_requests] == [False]
            in_queue(store, 0)
        assert is_clean(store)

    def test_a_token_is_retired_for_as_long_as_any_of_its_commands_may_lock(self, fleet, store):
        first, second = lock_request(ttl=60.0), lock_request(ttl=5.0)
        first.inbox, first.in_doubt = "S1", True
        second.inherit(first)
        locks["default"].release(second)
        assert store.pttl("lock|x:name") > 50_000


class TestStoresThatFail:
    """Whoever waits already goes on; its own deadline alone fails it."""

    @pytest.fixture
    def fail(self, through_proxy, caplog):
        """The store fails from now on, and a waiter has met that. Returns what heals it."""

        def fail(how):
            caplog.clear()
            if how == "refuses":
                through_proxy.refuse()
            else:
                through_proxy.hang = True
            eventually(lambda: "continues to wait" in caplog.text, 6 * PATIENCE)
            return heal

        def heal():
            through_proxy.hang = False
            through_proxy.accept()

        return fail

    @GIVES_UP_SOON
    @pytest.mark.parametrize("how", ["refuses", "hangs"])
    def test_for_a_moment_all_get_in_as_they_came(self, store, callers, fail, how):
        with lock("name", using="a", ttl=10 * PATIENCE):
            waiters = []
            for number in range(1, 7):
                waiters.append(callers(as_task=number % 2 == 0, wait=6 * PATIENCE))
                in_line(number)
            in_queue(store, 1)
            fail(how)()
        for waiter in waiters:
            waiter.gets_in(6 * PATIENCE)
            waiter.leaves()
        assert sorted(waiters, key=lambda waiter: waiter.number) == waiters
        assert is_clean(store)

    @pytest.mark.parametrize("position", ["first", "behind"])
    def test_who_has_no_time_left_fails_alone(self, store, caller, fail, position):
        with lock("name", using="a", ttl=10 * PATIENCE):
            began, waits = time.monotonic(), [1.5, 6 * PATIENCE]
            waiters = []
            for wait in waits if position == "first" else reversed(waits):
                waiters.append(caller(wait=wait))
                in_line(len(waiters))
            in_queue(store, 1)
            heal = fail("refuses")
            hasty, patient = waiters if position == "first" else reversed(waiters)
            assert isinstance(eventually(lambda: hasty.outcome, 6 * PATIENCE), LockBackendError)
            assert hasty.decided_at - began >= 1.5
            assert patient.outcome is None
            heal()
        patient.gets_in(6 * PATIENCE)
        patient.leaves()
        assert is_clean(store)

    def test_whom_it_never_answered_is_told_at_once(self, through_proxy, store, caller):
        through_proxy.refuse()
        stranger = caller(wait=None)
        assert isinstance(eventually(lambda: stranger.outcome, 6 * PATIENCE), LockBackendError)


class TestTasks:
    def test_cancelled_at_any_moment_with_others_waiting(self, fleet, store, callers):
        """While it acquires, waits, holds, or releases."""

        async def main():
            async def work():
                async with lock("name", wait=None, ttl=20):
                    await asyncio.sleep(0)

            for steps in range(0, 40, 2):
                busy = lock("name", using="c")
                if steps % 4:
                    assert await busy.aacquire(timeout=PATIENCE)
                first, behind = asyncio.create_task(work()), asyncio.create_task(work())
                for _ in range(steps):
                    await asyncio.sleep(0)
                first.cancel()
                if steps % 4:
                    await busy.arelease()
                await asyncio.gather(first, return_exceptions=True)
                await asyncio.wait_for(behind, PATIENCE)

        other = callers("a")
        other.gets_in()
        threading.Timer(0.2, other.go.set).start()
        asyncio.run(main())
        assert other.ended.wait(PATIENCE)
        eventually(lambda: not renewer_of(locks["default"]).is_cleaning)
        assert is_clean(store)

    @pytest.mark.usefixtures("lasting_grants")
    def test_cancelled_while_holding_the_queue_goes_on(self, fleet, store, callers):
        holder = callers(as_task=True)
        holder.gets_in()
        waiter = callers("a")
        in_queue(store, 1)
        holder.cancel()  # the lease of a bare acquire() goes with its loop and handle, here by release
        assert holder.ended.wait(PATIENCE)
        holder.handle.release()
        waiter.gets_in()
        waiter.leaves()

    def test_cancelled_while_releasing_the_queue_goes_on(self, through_proxy, store, callers):
        through_proxy.hang = False
        holder = callers(as_task=True, ttl=20)
        holder.gets_in()
        waiter = callers("a")
        in_queue(store, 1)
        through_proxy.hang = True
        holder.go.set()
        time.sleep(0.1)  # the release is on its way and cannot pass
        holder.cancel()
        assert holder.ended.wait(PATIENCE)
        assert waiter.outcome is None
        through_proxy.hang = False
        waiter.gets_in()
        waiter.leaves()
        assert is_clean(store)

    @pytest.mark.seconds(3)
    def test_a_blocked_loop_holds_on(self, fleet, store, callers):
        async def main():
            async with lock("name", ttl=2) as lease:
                waiter = callers("a")
                await asyncio.to_thread(in_queue, store, 1)
                time.sleep(3)  # noqa: ASYNC251 - blocks the loop
                assert lease.state is State.HELD
                assert waiter.outcome is None
            return waiter

        waiter = asyncio.run(main())
        waiter.gets_in()
        waiter.leaves()

    def test_a_blocked_loop_that_waits_delays_others_by_one_grant(self, fleet, store, callers):
        blocked = threading.Event()

        async def main():
            handle = lock("name", using="a", wait=LONG, ttl=1)
            task = asyncio.create_task(handle.aacquire())
            await asyncio.to_thread(in_queue, store, 1)
            blocked.set()
            time.sleep(Timing.grant_ttl + 1.5)  # noqa: ASYNC251 - blocks the loop, longer than TTL and grant
            got_in = await asyncio.wait_for(task, PATIENCE)
            await handle.arelease()
            return got_in

        holder = lock("name")
        assert holder.acquire()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(asyncio.run(main())))
        thread.start()
        assert blocked.wait(PATIENCE)
        waiter = callers("b")
        in_queue(store, 2)
        left = time.monotonic()
        holder.release()
        assert waiter.gets_in() - left < Timing.grant_ttl + LOOK + SLACK
        waiter.leaves()
        thread.join(PATIENCE)
        assert answers == [True]

    @pytest.mark.parametrize("tasks", [1, 3])
    def test_tasks_of_a_blocked_loop_do_not_stop_threads_behind_them(self, fleet, store, callers, monkeypatch, tasks):
        monkeypatch.setattr(Timing, "unresponsive_after", 1.5)
        go_on, blocked = threading.Event(), threading.Event()

        async def work():
            async with lock("name", wait=LONG):
                pass

        async def main():
            waiters = [asyncio.create_task(work()) for _ in range(tasks)]
            await asyncio.to_thread(in_line, tasks)
            await asyncio.to_thread(in_queue, store, 1)
            blocked.set()
            go_on.wait(2 * PATIENCE)  # blocks the loop
            await asyncio.gather(*waiters)

        holder = lock("name", using="c")
        assert holder.acquire()
        looping = threading.Thread(target=asyncio.run, args=(main(),))
        looping.start()
        try:
            assert blocked.wait(PATIENCE)
            waiter = callers()
            in_line(tasks + 1)
            holder.release()
            waiter.gets_in(1.5 * tasks + Timing.grant_ttl + 2 * LOOK + SLACK)
            waiter.leaves()
        finally:
            go_on.set()
            looping.join(PATIENCE)
        assert not looping.is_alive()
        assert is_clean(store)


class TestNothingGrows:
    @pytest.mark.seconds(22)
    @pytest.mark.usefixtures("lasting_grants")
    def test_over_many_names_and_waits(self, fleet, store, callers):
        for number in range(10_000):
            with lock("n:{}", number):
                pass
        for _ in range(30):
            with lock("name", using="a"):
                waiters = [callers(stays=False, as_task=as_task) for as_task in (False, True)]
                in_line(2)
            for waiter in waiters:
                waiter.gets_in()
                assert waiter.ended.wait(PATIENCE)
        assert store.keys() == ["lock|f"]
        for alias in ("default", "a"):
            backend = locks[alias]
            renewer = renewer_of(backend)
            assert lines_of(queue_of(backend)) == {}
            assert list(waiters_of(listener_of(backend))) == []
            assert renewer.leases() == []
            assert not renewer.is_cleaning


@pytest.mark.seconds(7)
def test_random_processes_and_accidents(fleet, store, peers, tmp_path):
    """S1, S4, S10, S12 of everything at once, whatever happens to processes and subscriptions."""
    accidents = Accidents(peers(6, RANDOM_WORKER), tmp_path, cut=lambda: cut_listeners(store), spared=4)
    events = accidents.run(SOAK, grants=30)
    assert faults(events) == []
    assert len([event for event in events if event.kind == "grant"]) >= 30
    eventually(lambda: not left_behind(store.keys()), 2 * PATIENCE)
    assert clock() >= events[-1].at
