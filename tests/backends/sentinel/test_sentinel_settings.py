"""Sentinels as the settings name them: what works, and what is said when something is wrong with them."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import pytest
from django_redis.pool import ConnectionFactory
from redis.exceptions import ConnectionError

import django_distlock
from django_distlock import InvalidLockBackend, LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.errors import NoMaster, NoSentinel, is_transient
from django_distlock.backends.redis.sentinel import discovery
from django_distlock.types import Level
from tests.support.sentinel import SERVICE, Watched, warm_up
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually, lock_request

LONG = 20 * PATIENCE  # a timeout that no sound test sees the end of, nor the half of it
ONE = {"sentinels": [("127.0.0.1", 26379)]}


@pytest.fixture(scope="module")
def watched():
    with Watched() as watched:
        yield watched


@pytest.fixture
def use(settings, monkeypatch):
    monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of the process, by URL

    def use(location=None, caches=None, **options):
        if caches:
            settings.CACHES = caches
        entry = {"BACKEND": REDIS, "OPTIONS": options, **({"LOCATION": location} if location else {})}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        return locks["default"]

    yield use
    with suppress(LockBackendError):
        locks.close()


@pytest.mark.parametrize(
    ("location", "options", "message"),
    [
        (None, {"sentinels": [], "service_name": "m"}, "['sentinels'] is []; it is a list of (host, port)"),
        (None, {"sentinels": "h:26379", "service_name": "m"}, "is 'h:26379'; it is a list of (host, port)"),
        (None, {"sentinels": [("h", "26379")], "service_name": "m"}, "it is a list of (host, port)"),
        (None, {"sentinels": [("h", 1), "h"], "service_name": "m"}, "it is a list of (host, port)"),
        (None, ONE, "has 'sentinels' but no 'service_name': under which name do they watch the master?"),
        (None, {**ONE, "service_name": ""}, "['service_name'] is ''; it is the name under which"),
        (None, {"service_name": "m"}, "['OPTIONS'] has 'service_name' but no 'sentinels'"),
        (None, {"sentinel_kwargs": {}}, "['OPTIONS'] has 'sentinel_kwargs' but no 'sentinels'"),
        (None, {**ONE, "service_name": "m", "sentinel_kwargs": 5}, "is 5; it is a dict of keywords"),
        (None, {**ONE, "service_name": "m", "sentinel_kwargs": {"fast": 1}}, "['sentinel_kwargs'] has an unknown key"),
        (
            None,
            {**ONE, "service_name": "m", "sentinel_kwargs": {"socket_timeout": None}},
            "['sentinel_kwargs']['socket_timeout'] is None; it is a number of seconds above 0",
        ),
        (None, {**ONE, "service_name": "m", "failover_timeout": 0}, "is 0; it is a number of seconds above 0"),
        ("redis://127.0.0.1:6379/0", {**ONE, "service_name": "m"}, "names the server 127.0.0.1:6379, but"),
        ("redis://other/0", {**ONE, "service_name": "m"}, "names the server other, but the sentinels tell where it is"),
        ("redis:///0", ONE, "names no service; write it there, as in redis://:password@mymaster/0"),
        ("unix:///tmp/s", {**ONE, "service_name": "m"}, "With sentinels it is a URL such as redis://:password@m/0"),
        ("cache:default", {**ONE, "service_name": "m"}, "so that cache says where the sentinels are"),
    ],
)  # fmt: skip
def test_wrong_settings_say_what_to_change(use, location, options, message):
    with pytest.raises(InvalidLockBackend) as caught:
        use(location, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("location", [None, f"redis://{SERVICE}/3", "redis:///3?protocol=3"])
def test_a_location_says_who_and_which_database(watched, use, location, calls):
    use(location, **watched.options)
    handle = lock("name")
    calls(handle).acquire()
    with watched.servers[0].client(db=3 if location else 0) as client:
        assert client.exists("lock:name")
    calls(handle).release()


def test_the_service_may_stand_in_the_url_alone(watched, use):
    backend = use(f"redis://{SERVICE}/0", sentinels=watched.addresses)
    with lock("name"):
        assert backend.location.text.startswith(f"{SERVICE}/0 of the sentinels 127.0.0.1:")


def cache(watched, **options):
    sentinel = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": watched.addresses,
    }
    location = f"redis://{SERVICE}/2"
    entry = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": {**sentinel, **options}}
    return {"default": entry}


@pytest.mark.parametrize("options", [{}, {"SENTINEL_KWARGS": {"socket_timeout": 0.2}, "SOCKET_TIMEOUT": 0.2}])
def test_the_sentinels_of_a_cache(watched, use, calls, options):
    backend = use("cache:default", caches=cache(watched, **options))
    handle = lock("name")
    calls(handle).acquire()
    with watched.servers[0].client(db=2) as client:
        assert client.exists("lock:name")
    calls(handle).release()
    assert [one.text for one in backend.location.sentinels.locations] == [
        f"127.0.0.1:{port}" for _, port in watched.addresses
    ]


def test_a_cache_in_the_same_database_of_the_same_master_is_told(watched, use):
    use(f"redis://{SERVICE}/2", sentinels=watched.addresses, caches=cache(watched))
    found = {finding.about: finding for finding in locks["default"].check()}
    assert found["cache"].level is Level.WARNING
    assert found["reachable"].level is Level.OK


def test_two_aliases_at_the_same_master_are_known_as_such(watched, settings):
    entry = {"BACKEND": REDIS, "OPTIONS": watched.options}
    turned = {"BACKEND": REDIS, "OPTIONS": {**watched.options, "sentinels": watched.addresses[::-1]}}
    settings.DISTRIBUTED_LOCKS = {"default": entry, "turned": turned, "other": {**entry, "LOCATION": "redis:///1"}}
    assert locks["default"].keyspace == locks["turned"].keyspace != locks["other"].keyspace
    locks.close()


class TestSentinelsThatDoNotHelp:
    def test_an_unknown_service(self, watched, use, calls):
        use(sentinels=watched.addresses, service_name="nobody")
        began = time.monotonic()
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=None, ttl=1)).acquire()
        message = str(caught.value)
        assert (
            "the sentinels watch no such master; correct DISTRIBUTED_LOCKS['default']['OPTIONS']['service_name']"
            in message
        )
        assert "watches no master 'nobody'" in message
        assert time.monotonic() - began < 3

    def test_one_knows_no_master_and_the_others_are_dead(self, use, calls):
        """It may have lost its memory, so this may pass."""
        with Watched(replicas=0) as watched:
            with watched.sentinels[0].client() as client:
                client.execute_command("SENTINEL", "REMOVE", SERVICE)
            for sentinel in watched.sentinels[1:]:
                sentinel.kill()
            use(**watched.options)
            with pytest.raises(LockBackendError, match="watches no master") as caught:
                calls(lock("name", wait=0)).acquire()
            assert not caught.value.is_final

    def test_one_is_dead_and_one_hangs(self, use, calls):
        """They cost the first connection a moment, the next ones nothing."""
        with Watched(replicas=0) as watched:
            watched.sentinels[0].kill()
            watched.sentinels[1].stop()
            use(**watched.options)
            began = time.monotonic()
            warm_up(calls)
            assert time.monotonic() - began < 2.5
            began = time.monotonic()
            for _ in range(10):
                locks["default"].close()
                warm_up(calls)
            assert time.monotonic() - began < 2.5

    def test_all_are_dead(self, use, calls):
        """Who is connected works on; who is not waits for one of them as for a new master, then gets an error."""
        with Watched(replicas=0) as watched:
            use(**watched.options)
            warm_up(calls)
            for sentinel in watched.sentinels:
                sentinel.kill()
            handle = lock("name")
            calls(handle).acquire()
            time.sleep(Timing.sentinel_interval * 1.5)
            calls(handle).release()
            use(**watched.options, failover_timeout=1, socket_timeout=0.5)
            with pytest.raises(LockBackendError) as caught:
                calls(lock("name", wait=None, ttl=2)).acquire()
            assert (
                "no sentinel answers; check that they run and that DISTRIBUTED_LOCKS['default']['OPTIONS']['sentinels']"
                in str(caught.value)
            )

    def test_all_are_dead_and_a_lease_is_adopted(self, use, calls):
        """Who adopts does not wait for a lock: each of its requests has two timeouts, whatever a failover may take."""
        with Watched(replicas=0) as watched:
            use(**watched.options, socket_timeout=0.5, socket_connect_timeout=0.5)
            with lock("name", ttl=60) as lease:
                text = lease.detach()
            for process in [*watched.servers, *watched.sentinels]:
                process.kill()
            began = time.monotonic()
            with pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(django_distlock).adopt(text)
            assert time.monotonic() - began < 10

    def test_all_are_away_for_a_moment(self, use, calls):
        """With the master, as for a host whose own network is away."""
        with Watched(replicas=0) as watched, ThreadPoolExecutor() as threads:
            use(**watched.options)
            everybody = [*watched.servers, *watched.sentinels]
            for process in everybody:
                process.kill()
            with pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(lock("name", wait=0, ttl=5)).acquire()
            handle = lock("name", wait=60)
            waiting = threads.submit(calls(handle).acquire)
            time.sleep(1)
            assert not waiting.done()
            for process in everybody:
                process.start()
            assert waiting.result(60) is True
            calls(handle).release()

    def test_all_are_dead_and_the_lock_is_held(self, use, calls, monkeypatch):
        """Who may wait for long, but cannot listen for its turn, waits no longer than for a new master."""
        monkeypatch.setattr(Timing, "search_kept", 0)
        with Watched(replicas=0, sentinels=1) as watched:
            use(**watched.options, failover_timeout=2, socket_timeout=0.5).acquire(lock_request(ttl=60), queue=False)
            watched.sentinels[0].kill()
            began = time.monotonic()
            with pytest.raises(LockBackendError, match="no sentinel answers"):
                calls(lock("name", wait=30)).acquire()
            assert time.monotonic() - began < 15

    def test_they_want_a_password(self, use, calls):
        with Watched(
            replicas=0, sentinels=1, sentinel=("requirepass quiet",), sentinel_auth={"password": "quiet"}
        ) as watched:
            for wrong in ({}, {"sentinel_kwargs": {"password": "loud"}}):
                use(**watched.options, **wrong)
                with pytest.raises(LockBackendError) as caught:
                    calls(lock("name", wait=None, ttl=1)).acquire()
                assert "correct DISTRIBUTED_LOCKS['default']['OPTIONS']['sentinel_kwargs']" in str(caught.value)
                assert "loud" not in str(caught.value)
            use(**watched.options, sentinel_kwargs={"password": "quiet"})
            warm_up(calls)
            use("cache:default", caches=cache(watched, SENTINEL_KWARGS={"password": "quiet"}))
            warm_up(calls)

    def test_the_master_wants_a_password(self, use, calls):
        auth = ("requirepass hush", "masterauth hush")
        with Watched(
            replicas=0,
            sentinels=1,
            server=auth,
            sentinel=(f"sentinel auth-pass {SERVICE} hush",),
            auth={"password": "hush"},
        ) as watched:
            use(**watched.options)
            with pytest.raises(LockBackendError, match="the server refused the user or password; correct .*LOCATION"):
                calls(lock("name", wait=None, ttl=1)).acquire()
            use(f"redis://:hush@{SERVICE}/0", **watched.options)
            warm_up(calls)
            assert "hush" not in locks["default"].location.text


def test_what_was_found_out_is_forgotten_when_nobody_uses_it(watched, use, calls, monkeypatch, caplog):
    """Nobody asks the sentinels for a process that holds and wants nothing."""
    monkeypatch.setattr(Timing, "sentinel_idle", 0.5)
    monkeypatch.setattr(Timing, "sentinel_interval", 0.1)
    backend = use(**watched.options)
    warm_up(calls)
    eventually(lambda: backend.location.sentinels.master is None)
    with caplog.at_level(logging.WARNING), lock("name"):
        assert backend.location.sentinels.master.port == watched.servers[0].port
    assert "The master of" not in caplog.text  # as of one that has moved


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
