"""Whatever others write under our keys: what cannot be read is skipped with an error in the log, the rest goes on."""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
import redis
from django.core.management import CommandError, call_command
from django.test import Client
from hypothesis import example, given
from hypothesis import strategies as st

from django_distlock import LockBackendError, LockNotAcquired, lock, locks
from django_distlock.backends.redis.codec import read_holder, read_lease
from django_distlock.backends.redis.keys import LEASES, OTHERS, ClusterKeys, Keys, Listing
from django_distlock.backends.redlock.quorum import Observation
from django_distlock.formats import FORMAT
from django_distlock.runs import LastRun
from django_distlock.types import Grant, Holder, LockInfo
from tests.support.admin_pages import hold, names_in
from tests.support.tools import lock_request

pytestmark = [pytest.mark.slow, pytest.mark.once]

TOKEN = b"1 " + b"a" * 26
FENCE = b"1700000000000000"
HOLDER = b'["web-1",7,"MainThread","report",%s]'
UNREADABLE = {
    "something else": b"\x80\x04garbage",
    "nested JSON": TOKEN + b" h " + FENCE + b" " + b"[" * 200_000,
    "a moment after all calendars": TOKEN + b" h " + FENCE + b" " + HOLDER % b"1e300",
    "a moment at the end of the calendar": TOKEN + b" h " + FENCE + b" " + HOLDER % b"253402300799",
    "infinity": TOKEN + b" h " + FENCE + b" " + HOLDER % b"Infinity",
    "no number": TOKEN + b" h " + FENCE + b" " + HOLDER % b"NaN",
    "a moment before all calendars": TOKEN + b" h " + FENCE + b" " + HOLDER % b"-1e20",
    "a moment of 400 digits": TOKEN + b" h " + FENCE + b" " + HOLDER % (b"9" * 400),
    "a process of 4000 digits": TOKEN + b" h " + FENCE + b' ["h",' + b"9" * 4000 + b',"t","l",1.0]',
    "a number of 5000 digits": TOKEN + b" h " + b"9" * 5000 + b" " + HOLDER % b"1.0",
    "bytes that are no text": TOKEN + b" h " + FENCE + b" \xff\xfe",
    "a list": None,
}
STRANGE = {
    "half a character": TOKEN + b" h " + FENCE + b' ["h\\ud800",1,"t","\\udfff",1.0]',
    "control characters": TOKEN + b" h " + FENCE + b' ["h",1,"t","\\u0000\\u001b[2J\\r\\nx",1.0]',
    "truth": TOKEN + b" h " + FENCE + b' ["h",true,"t","l",true]',
}

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
)
numbers = st.integers() | st.floats() | st.integers(0, 2**33)
holders = st.tuples(st.text(), numbers, st.text(), st.text(), numbers) | st.tuples(*[st.text() | any_json] * 6)
holder_texts = st.text() | any_json.map(json.dumps) | holders.map(json.dumps)


@st.composite
def leases(draw):
    token = draw(st.sampled_from([TOKEN, b"A" * 26, b""]))
    fence = str(draw(st.integers(0, 10**25))).zfill(16).encode()
    holder = draw(holder_texts).encode(errors="surrogatepass")
    return b" ".join([token, draw(st.sampled_from([b"h", b"c", b"r", b"x"])), fence, holder])


def is_fit_to_be_shown(holder) -> bool:
    """On pages and in JSON, in any time zone."""
    texts = (holder.host, holder.thread, holder.label, str(holder))
    return all(text.isprintable() and text.encode() is not None for text in texts)


@given(holder_texts)
@example('["h",1,"t","l",1e300]')
@example("[" * 200_000)
def test_any_text_is_a_holder_or_a_value_error(text):
    try:
        holder = Holder.from_text(text)
    except ValueError:
        return
    assert is_fit_to_be_shown(holder)
    assert Holder.from_text(holder.to_text()) == holder


@given(leases() | st.binary(), st.integers(-2, 2**63 - 1))
def test_any_value_is_a_lease_or_none(value, left):
    info = read_lease("default", "name", value, left)
    assert read_holder(value) == (info.holder if info else None)
    if info is None:
        return
    assert 0 <= info.fence < 10**19
    assert info.remaining >= 0
    if info.holder:
        assert is_fit_to_be_shown(info.holder)
        for hours in (-23, 23):
            info.granted_at.astimezone(timezone(timedelta(hours=hours)))


@given(
    st.text()
    | st.binary()
    | any_json.map(json.dumps)
    | st.tuples(numbers, st.text(), numbers, st.text()).map(lambda found: FORMAT + json.dumps(found))
)
@example(FORMAT + "[" * 5000)
def test_any_text_is_a_run_of_beat_or_a_value_error(text):
    try:
        stamp = LastRun.from_text(text)
    except ValueError:
        return
    assert stamp.host.isprintable()
    for moment in filter(None, (stamp.at, stamp.next_at)):
        datetime.fromtimestamp(moment, UTC)


@given(st.lists(leases() | st.binary(), max_size=5))
def test_any_values_on_the_nodes_of_a_quorum(values):
    observed = Observation(5)
    for value in values:
        observed.add("default", "name", value, 1000)
    assert observed.held is None or is_fit_to_be_shown(observed.held.holder or Holder.here())
    assert len(observed.copies) + observed.failed == len(values)
    assert observed.foreign == bool(observed.failed)


@given(st.lists(st.binary(max_size=20)), st.sampled_from([Keys("lock"), ClusterKeys("lock", 64)]))
@example([b"name", b"\xff"], Keys("lock"))
def test_any_keys_are_listed_or_skipped(tails, keys):
    """By no other name than that of a key."""
    found = [start + tail for start in (b"lock:", b"lock:{7}:", b"lock|r:") for tail in tails]
    listing = Listing(keys, [LEASES, OTHERS], "")
    for names in listing.names([b"0", found]).values():
        for name in names:
            assert any(key.endswith(name.encode()) for key in found)


@pytest.fixture(params=["redis", "redlock"])
def written(request):
    """Puts a value under a key, as somebody else would."""
    if request.param == "redis":
        request.getfixturevalue("valkey_locks")
        urls = [request.getfixturevalue("valkey").url]
    else:
        request.getfixturevalue("redlock_locks")
        urls = [server.url for server in request.getfixturevalue("five_valkeys")]

    def write(key: str, value: bytes | str | None) -> None:
        for url in urls:
            with redis.Redis.from_url(url) as client:
                if value is None:
                    client.rpush(key, "x")
                else:
                    client.set(key, value, px=2**50)

    return write


def said(*arguments: str) -> str:
    out = io.StringIO()
    try:
        call_command("locks", *arguments, stdout=out, no_color=True)
    except CommandError as error:
        out.write(f"\n{error}")
    out.getvalue().encode()
    return out.getvalue()


@pytest.mark.parametrize("what", [*UNREADABLE, *STRANGE])
def test_one_bad_value_hides_no_other_lock(written, what, caplog):
    written("lock:bad", (UNREADABLE | STRANGE)[what])
    hold(locks["default"], "good")
    is_readable = what in STRANGE
    assert sorted(info.name for info in locks["default"].held()) == (["bad", "good"] if is_readable else ["good"])
    assert [len(found) for found in locks["default"].look(["bad", "good"])] == [int(is_readable), 1]
    errors = {record.getMessage() for record in caplog.records if "'lock:bad'" in record.getMessage()}
    assert len(errors) == (0 if is_readable else 1)
    assert all(len(error) < 500 for error in errors)
    with pytest.raises(LockNotAcquired if is_readable else LockBackendError):
        lock("bad", wait=0).__enter__()


@pytest.mark.django_db
@pytest.mark.parametrize("what", ["something else", *STRANGE])
def test_nor_on_pages_and_in_tables(written, what, operator: Client):
    """They show what is listed: nothing of what is no lease."""
    written("lock:bad", (UNREADABLE | STRANGE)[what])
    hold(locks["default"], "good")
    is_readable = what in STRANGE
    names = ["bad", "good"] if is_readable else ["good"]
    assert names_in(operator.get("/admin/distlock/heldlock/", {"o": "5"})) == names
    assert names_in(operator.get("/admin/distlock/heldlock/", {"q": "good"})) == ["good"]
    assert said().splitlines()[-1] == f"{len(names)} held"
    assert [each["name"] for each in json.loads(said("--json"))] == names
    assert ("Nobody holds" in said("show", "bad")) is not is_readable


class TestAmongTheLeasesInOtherSlots:
    @pytest.fixture
    def held(self, valkey_locks):
        held = [lock_request(slots=3), lock_request(slots=3)]
        for one in held:
            valkey_locks.acquire(one, queue=False)
        return held

    @pytest.fixture
    def write(self, store):
        """Puts a member there as others would. It ends in so many seconds."""

        def write(what, ttl=60.0):
            value = UNREADABLE[what].replace(FENCE, FENCE + b" 0003")
            store.zadd("lock|l:name", {value: (time.time() + ttl) * 1000})

        return write

    @pytest.mark.parametrize("slots", [1, 2, 3, 9])
    @pytest.mark.parametrize("queue", [False, True])
    def test_no_slot_is_free_beside_what_is_no_lease(self, valkey_locks, held, write, store, slots, queue):
        write("something else")
        with pytest.raises(LockBackendError, match=r"lock\|l:name has a member that is no lease") as caught:
            valkey_locks.acquire(lock_request(slots=slots), queue=queue)
        assert "ZREM" in str(caught.value)
        assert caught.value.is_final
        assert not store.exists("lock|q:name")

    @pytest.mark.parametrize("slots", [1, 2, 3])
    def test_one_whose_holder_cannot_be_read_counts(self, valkey_locks, held, write, slots):
        write("a moment after all calendars")
        assert isinstance(valkey_locks.acquire(lock_request(slots=slots), queue=False), LockInfo)
        assert valkey_locks.acquire(lock_request(slots=4), queue=False).slot == 4

    @pytest.mark.parametrize("slots", [1, 3])
    def test_the_key_is_named_that_has_the_one_in_the_way(self, valkey_locks, held, write, slots):
        write("a moment after all calendars", 2)
        with pytest.raises(LockBackendError, match=r"A member of the key 'lock\|l:name' .* is no lease") as caught:
            valkey_locks.acquire(lock_request(slots=slots), queue=False)
        assert caught.value.is_final

    @pytest.mark.parametrize("what", ["something else", "a moment after all calendars"])
    def test_so_it_is_in_the_log(self, valkey_locks, held, write, caplog, what):
        write(what)
        assert [info.token for info in valkey_locks.look(["name"])[0]] == [one.token for one in held]
        [said] = {record.getMessage() for record in caplog.records if record.levelname == "ERROR"}
        assert "A member of the key 'lock|l:name'" in said
        assert "is no lease. Remove it with ZREM" in said

    @pytest.mark.parametrize("slot", [1, 2])
    @pytest.mark.parametrize("what", ["something else", "a moment after all calendars"])
    def test_the_others_are_renewed_and_end(self, valkey_locks, held, write, store, slot, what):
        write(what)
        mine, other = held[slot - 1], held[2 - slot]
        assert valkey_locks.renew([(one, 20.0) for one in held]) == [True, True]
        assert valkey_locks.release(mine) is True
        assert [info.token for info in valkey_locks.look(["name"])[0]] == [other.token]
        assert store.zcard("lock|l:name") == 3 - slot

    def test_an_entry_of_the_queue_that_wants_no_slot_wants_one(self, valkey_locks, store):
        store.zadd("lock|q:name", {f"1 {'a' * 26} 0000 Plock|in:nobody|": 1})
        assert isinstance(valkey_locks.acquire(lock_request(), queue=False), Grant)


def test_a_lock_that_is_kept_for_longer_than_any_clock_counts_can_be_waited_for(valkey_locks, store):
    hold(valkey_locks, "name")
    store.persist("lock:name")
    assert not lock("name").acquire(timeout=0.1)
    store.pexpire("lock:name", 2**60)
    assert not lock("name").acquire(timeout=0.1)
    assert said().splitlines()[-1] == "1 held"


@pytest.mark.parametrize(
    "counter", ["garbage", "1e300", "inf", "nan", "-5", "9" * 400, "9" * 16, "0x7fffffffffffff", ""]
)
def test_a_last_number_that_is_none_counts_for_nothing(written, counter):
    """The fencing numbers go on by the clock of the store, and others can read the locks."""
    backend, now = locks["default"], time.time_ns() // 1000
    first, second = lock_request("name"), lock_request("name")
    written("lock|f", counter)
    fences = [backend.acquire(first, queue=False).fence]
    if backend.supports_queue:
        backend.acquire(second, queue=True)
    written("lock|f", counter)
    backend.release(first)  # which hands it on where somebody waits
    fences.append(backend.acquire(second, queue=backend.supports_queue).fence)
    [info] = backend.held()
    assert info.fence == fences[1]
    assert fences[0] < fences[1]
    assert all(now - 60_000_000 < fence < now + 600_000_000 for fence in fences)
    backend.release(second)
