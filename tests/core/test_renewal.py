"""Many leases of one process: in which order they are renewed, and what is logged of them."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from itertools import count
from unittest.mock import Mock

import pytest

from django_distlock import Lease, LockBackendError, LockLost, State, lock, signals
from django_distlock.backends.common.timing import Timing
from django_distlock.core import belief, cleaning, renewal
from django_distlock.core import lease as lease_module
from django_distlock.core.cleaning import Cleaner
from django_distlock.core.local_queue import LocalQueue
from django_distlock.core.renewal import Renewer
from django_distlock.options import Terms
from django_distlock.types import Grant
from django_distlock.utils.clock import clock
from tests.support.inside import before_a_loss_is_told
from tests.support.interrupts import Interrupter, at_each_point
from tests.support.tools import PATIENCE, eventually, lock_request, renewer_of


class Store:
    """Notes what is renewed together, and fails where it is told to. At first it hangs."""

    def __init__(self, backend):
        self._renew = backend.renew
        self.batches, self.timeouts, self.ttls = [], [], []
        self.fails = lambda names: False
        self.after = lambda: None
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def renew(self, wanted, *, timeout=None):
        names = [lock_request.name for lock_request, _ in wanted]
        if names != ["first"]:
            self.batches.append(names)
            self.timeouts.append(timeout)
            self.ttls += [ttl for _, ttl in wanted]
        self.is_asked.set()
        self.goes_on.wait(PATIENCE)
        if self.fails(names):
            raise LockBackendError("the store is away")
        renewed = self._renew(wanted, timeout=timeout)
        if names != ["first"]:
            self.after()
        return renewed


@pytest.fixture
def store(locmem_locks, monkeypatch):
    store = Store(locmem_locks)
    monkeypatch.setattr(locmem_locks, "renew", store.renew)
    yield store
    store.goes_on.set()


@pytest.fixture
def renewer(locmem_locks):
    return Renewer(locmem_locks, LocalQueue(locmem_locks.timing, locmem_locks.succeed))


@pytest.fixture
def hold(locmem_locks, renewer):
    """Leases of that renewer, as if each had been granted ``ago`` seconds ago: so long that it is due, says nobody."""
    held = []

    def hold(name, ttl, ago=None, renewer=renewer, max_hold=None, registers=True, slots=1):
        request = lock_request(name, ttl, slots=slots)
        grant = locmem_locks.acquire(request, queue=False)
        sent_at = clock() - (0.35 * ttl if ago is None else ago)
        terms, owner = Terms(ttl=ttl, max_hold=max_hold), threading.current_thread()
        held.append(Lease(locmem_locks, request, Grant(grant.fence, sent_at), terms, renewer, owner, sent_at))
        if registers:
            renewer.register(held[-1])
        return held[-1]

    hold.forget = held.clear
    yield hold
    for lease in held:
        if lease.state in (State.HELD, State.UNKNOWN):
            with suppress(LockLost) if lease.remaining < 1 else nullcontext():  # it may end just then
                lease.release()


@pytest.fixture
def busy(store, hold):
    """The thread that renews is kept by the store until it is told to go on."""
    hold("first", 600)
    assert store.is_asked.wait(PATIENCE)
    return store


def test_many_are_renewed_in_batches_and_what_comes_due_meanwhile_between_them(busy, hold, monkeypatch):
    monkeypatch.setattr(Timing, "renewal_batch", 10)
    for number in range(35):
        hold(f"long {number}", 600)
    hold("short 0", 60)
    busy.after = lambda: len(busy.batches) < 8 and hold(f"short {len(busy.batches)}", 60)
    busy.goes_on.set()
    eventually(lambda: len(busy.batches) >= 8)
    assert busy.batches[0] == ["short 0"]
    longs = [batch for batch in busy.batches if "short" not in batch[0]]
    assert [len(batch) for batch in longs] == [10, 10, 10, 5]
    assert len({name for batch in longs for name in batch}) == 35
    assert all("short" in batch[0] for batch in busy.batches[:8:2])


def test_one_that_the_store_is_too_slow_for_does_not_cost_others_their_renewal(busy, hold):
    short, long = hold("short", 10), hold("long", 60)
    first = long.remaining
    busy.fails = lambda names: "short" in names
    busy.goes_on.set()
    eventually(lambda: (short.state, long.state) == ("unknown", "held") and long.remaining > first)
    assert busy.batches[:2] == [["short"], ["long"]]


def test_the_store_has_for_a_batch_a_third_of_what_its_first_lease_has_left(busy, hold):
    first, _ = hold("one", 60), hold("another", 100)
    left = first.remaining
    busy.goes_on.set()
    eventually(lambda: busy.timeouts)
    assert busy.batches[0] == ["one", "another"]
    assert 0 < busy.timeouts[0] <= left / 3


def test_a_wake_with_nothing_due_does_not_go_through_all_that_are_held(renewer, hold, monkeypatch):
    for number in range(3):
        hold(f"name {number}", 60, ago=0)
    renewer.renew()
    monkeypatch.setattr(renewer, "leases", lambda: pytest.fail("it did"))
    assert renewer.renew() > clock() + 10


def test_what_is_in_order_keeps_no_lease_that_has_ended(renewer, hold):
    leases = [hold(f"name {number}", 60, ago=0) for number in range(300)]
    renewer.renew()
    known = [weakref.ref(lease) for lease in leases]
    for lease in leases:
        lease.release()
    del lease
    hold.forget()
    leases.clear()
    gc.collect()
    assert not [lease for reference in known if (lease := reference())]


def test_an_error_in_between_costs_no_lease_its_renewal(busy, hold, monkeypatch):
    errors = [MemoryError()]

    def fail_once():
        if errors:
            raise errors.pop()

    before_a_loss_is_told(monkeypatch, fail_once)
    hold("gone", 10, ago=20)
    kept = [hold(f"kept {number}", 60) for number in range(3)]
    busy.goes_on.set()
    eventually(lambda: all(lease.remaining > 50 for lease in kept))


def test_one_that_is_released_meanwhile_leaves_the_others_their_time(busy, hold):
    hold("short", 10)
    released, kept = hold("released", 60), hold("kept", 60)
    busy.after = lambda: released.release() if len(busy.batches) == 1 else None
    busy.goes_on.set()
    eventually(lambda: len(busy.batches) >= 2)
    assert busy.batches[:2] == [["short"], ["kept"]]
    assert busy.timeouts[1] > 5
    assert kept.state is State.HELD


def test_the_last_renewal_before_max_hold_is_as_much_shorter(busy, hold, monkeypatch):
    now = clock()
    for module in (lease_module, renewal):
        monkeypatch.setattr(module, "clock", lambda: now)
    monkeypatch.setattr(f"{__name__}.clock", lambda: now)
    lease = hold("name", 30, ago=12, max_hold=20)
    busy.goes_on.set()
    eventually(lambda: busy.batches)
    assert busy.ttls == [pytest.approx(8)]  # of the 20 seconds 12 are over
    assert lease.state is State.HELD


def test_those_that_were_taken_together_are_not_due_at_the_same_moment(locmem_locks, hold):
    """Each of another process."""
    dues = []
    for number in range(20):
        renewer = Renewer(locmem_locks, LocalQueue(locmem_locks.timing, locmem_locks.succeed))
        hold(f"name {number}", 60, ago=0, renewer=renewer)
        dues.append(renewer.renew() - clock())
    assert max(dues) - min(dues) > 0.1
    assert all(15 < due <= 20 for due in dues)


def test_a_store_that_is_away_costs_two_lines(busy, hold, caplog, monkeypatch):
    def refuse(names):
        if {lease.state for lease in leases} == {"unknown"}:  # the second attempt takes a minute
            for module in (lease_module, renewal):
                monkeypatch.setattr(module, "clock", lambda: clock() + 60)
        return names != ["first"]

    leases = [hold(f"name {number}", 60 - number) for number in range(20)]
    busy.fails = refuse
    busy.goes_on.set()
    eventually(lambda: "were lost" in caplog.text)
    messages = [record.getMessage() for record in caplog.records]
    doubt, loss = [message for message in messages if "'name " in message]  # not of other tests, whose lock is 'name'
    assert doubt.startswith("Renewal of 20 locks of 'default' failed; the first of them, 'name 19', is lost in ")
    assert loss.startswith("20 locks of 'default' were lost. The one that was held longest, 'name 0', was lost: ")
    assert {lease.state for lease in leases} == {"lost"}


def test_who_waits_is_woken_when_what_is_given_up_in_the_background_is_free(locmem_locks, renewer, monkeypatch):
    """Not before: it would look for nothing, and not again."""
    release, was_free = locmem_locks.release, []

    def wake_first(queue, name):
        was_free.append(locmem_locks.look([name]) == [[]])

    monkeypatch.setattr(locmem_locks, "release", lambda *arguments: time.sleep(0.1) or release(*arguments))
    monkeypatch.setattr(LocalQueue, "wake_first", wake_first)
    request = lock_request("name", 60)
    locmem_locks.acquire(request, queue=False)
    assert renewer.release_in_background(request)
    eventually(lambda: was_free)
    assert was_free == [True]


def test_what_the_store_could_not_release_is_released_later_not_at_once(alone, locmem_locks, monkeypatch):
    now = clock()
    monkeypatch.setattr(cleaning, "clock", lambda: now)
    cleaner = Cleaner(locmem_locks, LocalQueue(locmem_locks.timing, locmem_locks.succeed))
    cleaner.add(lock_request("name", 60), 0.0, None)
    with monkeypatch.context() as away:
        away.setattr(locmem_locks, "release", Mock(side_effect=LockBackendError("the store is away")))
        assert cleaner.release() == now + locmem_locks.timing.retry_delay
    assert cleaner.release() is None
    assert not cleaner.is_busy


def test_a_lease_that_is_about_to_be_told_as_lost_is_lost(locmem_locks, monkeypatch):
    """The renewer drops it, and says so in a second step."""
    met = []

    def end_it():
        for call in (lease.renew, lease.detach, lease.release):
            with pytest.raises(LockLost):
                call()
            met.append(call)

    with lock("name", ttl=3.0, on_lost="log") as lease:
        monkeypatch.setattr(locmem_locks, "renew", lambda wanted, **_: [False] * len(wanted))
        before_a_loss_is_told(monkeypatch, end_it)
        eventually(lambda: len(met) == 3)
        eventually(lambda: lease.state is State.LOST)


class Text(str):
    """Calls ``before_use`` once, when it is looked up among others."""

    __slots__ = ("before_use",)

    def __hash__(self):
        before_use, self.before_use = getattr(self, "before_use", None), None
        if before_use:
            before_use()
        return super().__hash__()


@pytest.fixture
def alone(monkeypatch):
    """The renewer has no thread: it does what the test calls."""
    monkeypatch.setattr(renewal.Worker, "nudge", lambda *_: None)


def adopted(lease, hold):
    """A lease with the same token, as ``adopt()`` makes it in the process that has detached it."""
    other = hold(str(lease.name), lease.ttl, ago=0, registers=False)
    other.token = lease.token
    return other


@pytest.mark.parametrize("is_taken_in", [False, True])
def test_one_that_is_adopted_while_new_ones_are_taken_in_is_renewed(alone, renewer, hold, is_taken_in):
    def hand_over():
        assert renewer.unregister(old)
        renewer.register(new)

    old = hold("name", 60, ago=0)
    new, old.token = adopted(old, hold), Text(old.token)
    renewer.unregister(old)
    renewer.register(old)
    if is_taken_in:  # but not in the order of the renewer yet
        assert renewer.get(old.token) is old
    old.token.before_use = hand_over
    assert renewer.renew() is not None
    assert renewer.get(new.token) is new
    hold.forget()


def test_one_that_is_adopted_while_two_end_it_stays(alone, renewer, hold):
    """One of them looks whether it is there, and the other one detaches it then."""

    def hand_over():
        if renewer.unregister(old):
            renewer.register(new)
            ended.append("by the other")

    def meanwhile():
        thread.start()
        thread.join(0.3)

    old, ended = hold(Text("name"), 60, ago=0), []
    new = adopted(old, hold)
    thread = threading.Thread(target=hand_over)
    assert renewer.get(old.token) is old
    old.name.before_use = meanwhile
    if renewer.unregister(old):
        ended.append("by the first")
    thread.join()
    assert len(ended) == 1
    assert (renewer.get(new.token) is new) == (ended == ["by the other"])
    hold.forget()


@pytest.mark.parametrize("looks", [False, True])
def test_an_interrupt_of_its_end_leaves_it_to_be_renewed_or_forgotten(alone, renewer, hold, looks):
    leases = {}

    def register_and_unregister(name):
        leases[name] = hold(name, 60, ago=0, registers=False)
        renewer.register(leases[name])
        if looks:
            renewer.of_lock(name)
        renewer.unregister(leases[name])

    for name, where in at_each_point(register_and_unregister, "core/renewal.py", "core/known_leases.py"):
        lease = leases[name]
        is_known = renewer.get(lease.token) is lease
        assert (renewer.renew() is not None) == is_known, where
        assert renewer.unregister(lease) == is_known, where
        assert renewer.renew() is None, where
        assert not renewer.of_lock(name), where
    assert len(leases) > (15 if looks else 2)
    known = [weakref.ref(one) for one in leases.values()]
    leases.clear()
    hold.forget()
    del lease
    gc.collect()
    assert not [one() for one in known if one()], "left in memory"


@pytest.mark.parametrize("does", ["look", "end it", "end another", "hand it on", "hand it on and look"])
@pytest.mark.parametrize("when", ["it is taken in", "it ends", "it is renewed"])
def test_a_finalizer_may_come_at_each_point(alone, renewer, hold, when, does):
    """Or a handler of a signal, that looks or ends a lease in the same thread."""
    points = []

    def meanwhile():
        name = f"{len(points) + 1:04}"
        lease, other, new = leases[name]
        if does == "look":
            renewer.get(lease.token)
        elif does == "end another":
            end(other)
        elif end(lease) and does != "end it":
            renewer.register(new)
            ended.remove(new)
            if does == "hand it on and look":
                renewer.get(new.token)

    def end(lease):
        is_the_one = renewer.unregister(lease)
        ended.extend([lease] * is_the_one)
        return is_the_one

    def run(name):
        lease, other = (hold(name, 60, ago=0, registers=False, slots=3) for _ in range(2))
        leases[name] = lease, other, adopted(lease, hold)
        ended.append(leases[name][2])
        renewer.register(other)
        renewer.get(other.token)
        renewer.register(lease)
        if when == "it is renewed":
            renewer.renew()
            return
        renewer.of_lock(name)
        if when == "it ends":
            end(lease)

    leases, ended = {}, []
    for name, where in at_each_point(run, "core/renewal.py", "core/known_leases.py", meanwhile=meanwhile):
        points.append(where)
        assert len(ended) == len({*ended}), where
        known = {*leases[name]} - {*ended}
        assert {*renewer.leases()} == known, where
        assert sorted(map(id, renewer.of_lock(name))) == sorted(map(id, known)), where
        assert {renewer.get(one.token) for one in leases[name]} - {None} == known, where
        assert (renewer.renew() is not None) == bool(known), where
        assert all(renewer.unregister(one) for one in known), where
        assert renewer.renew() is None, where
    assert len(points) > 20
    hold.forget()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_one_that_is_ended_in_the_midst_of_being_taken_in_is_known_no_more(alone, renewer, hold, is_interrupted):
    lease = hold("name", 60, ago=0, registers=False)
    lease.token, ended, points = Text(lease.token), [], set()
    for number in range(1, 50 if is_interrupted else 2):
        renewer.register(lease)
        lease.token.before_use = lambda: ended.append(renewer.unregister(lease))
        interrupter = Interrupter(number if is_interrupted else 5000, ("core/known_leases.py",))
        interrupter.run(lambda: renewer.of_lock("name"))
        points.add(interrupter.where)
        lease.token.before_use = None
        is_known = lease in renewer.leases()  # where its end was interrupted before it began
        assert not (is_known and ended), interrupter.where
        assert [*renewer.of_lock("name")] == [lease] * is_known, interrupter.where
        assert (renewer.get(lease.token) is lease) == is_known, interrupter.where
        assert (renewer.renew() is not None) == is_known, interrupter.where
        assert renewer.unregister(lease) == is_known, interrupter.where
        assert renewer.renew() is None, interrupter.where
        ended.clear()
    fewest = 15 if sys.version_info < (3, 12) else 10  # later ones tell of no function in C that "with" calls
    assert len(points) > (fewest if is_interrupted else 0)
    hold.forget()


def test_one_that_ends_while_it_is_taken_in_is_known_no_more(alone, renewer, hold, monkeypatch):
    """Another thread ends it before the guard is taken."""
    lease, guard = hold("name", 60, ago=0, registers=False), renewer._guard
    thread = threading.Thread(target=lambda: eventually(lambda: renewer.unregister(lease)))

    class Guard:
        def __enter__(self):
            if thread.ident is None:
                thread.start()
                thread.join(0.3)
            guard.acquire()

        def __exit__(self, *_):
            guard.release()

    monkeypatch.setattr(renewer, "_guard", Guard())
    renewer.register(lease)
    assert not renewer.of_lock("name")
    thread.join()
    assert not renewer.of_lock("name")
    hold.forget()


def test_the_leases_of_one_lock_are_known_until_they_end(alone, renewer, hold):
    first, second, third = leases = [hold("name", 60, ago=0, slots=3) for _ in range(3)]
    other = hold("other", 60, ago=0)
    assert [*renewer.of_lock("name")] == leases
    assert renewer.unregister(third)
    assert [*renewer.of_lock("name")] == [first, second]
    assert renewer.unregister(first)
    assert [*renewer.of_lock("name")] == [second]
    assert renewer.unregister(second)
    assert not renewer.unregister(second)
    assert not renewer.of_lock("name")
    assert [*renewer.of_lock("other")] == [other]
    hold.forget()


@pytest.mark.parametrize("stops_at", range(1, 12))
def test_a_process_that_is_stopped_between_two_looks_at_the_clock_goes_on(alone, renewer, hold, monkeypatch, stops_at):
    looks = count(1)
    lease = hold("name", 60)
    monkeypatch.setattr(renewal, "clock", lambda: clock() + 60 * (next(looks) >= stops_at))
    renewer.renew()
    monkeypatch.setattr(renewal, "clock", clock)
    assert (renewer.get(lease.token) is None) == (lease.state is State.LOST)
    hold.forget()


@pytest.mark.parametrize("look", range(1, 12))
def test_one_that_ends_at_the_very_moment_of_a_look_leaves_another_its_time(
    alone, store, renewer, hold, monkeypatch, look
):
    looks, now = count(1), 1000.0
    for module in (belief, lease_module, renewal):
        monkeypatch.setattr(module, "clock", lambda: now)
    monkeypatch.setattr(f"{__name__}.clock", lambda: now)
    first, second = hold("one", 60, ago=25), hold("another", 100, ago=35)
    its_end = now + first.remaining
    monkeypatch.setattr(renewal, "clock", lambda: its_end if next(looks) >= look else now)
    store.goes_on.set()
    renewer.renew()
    assert all(timeout > 5 for timeout in store.timeouts)
    assert (first.state is State.LOST) == (renewer.get(first.token) is None)
    assert second.state is State.HELD
    hold.forget()


def test_a_loss_is_told_before_others_had_their_turn(busy, hold, renewer):
    def go_on():
        if lost_after or len(busy.batches) == 100:
            busy.after = lambda: None
        else:
            hold(f"another {len(busy.batches)}", 60)
            threading.Event().wait(0.05)

    def receiver(name, **_):
        if name == "short":
            lost_after.append(len(busy.batches))

    lost_after = []
    signals.lock_lost.connect(receiver)
    try:
        hold("short", 1.0), hold("another", 60)
        busy.fails = lambda names: "short" in names
        busy.after = go_on
        busy.goes_on.set()
        eventually(lambda: lost_after)
        assert lost_after[0] < 100
    finally:
        signals.lock_lost.disconnect(receiver)


class TestAtExit:
    @pytest.fixture
    def failing(self, locmem_locks, monkeypatch):
        """Calls of this thread, each of which fails."""
        calls = []

        def fail(request, *_):
            if threading.current_thread() is threading.main_thread():
                calls.append(request.name)
                time.sleep(0.04)
            raise LockBackendError("the store is away")

        with monkeypatch.context() as patched:
            patched.setattr(locmem_locks, "release", fail)
            yield calls
        eventually(lambda: not renewer_of(locmem_locks).is_cleaning)

    @pytest.mark.parametrize("names", [["one"], ["one", "two", "one", "one"]], ids=["one lock", "several"])
    def test_one_line_says_how_many_locks_are_left(self, locmem_locks, failing, monkeypatch, caplog, names):
        monkeypatch.setattr(Timing, "prompt_failure", PATIENCE)
        renewer = renewer_of(locmem_locks)
        for name in names:
            renewer.release_in_background(lock_request(name))
        monkeypatch.setattr(locmem_locks, "places", lambda queued: [lock_request("waited for")])
        caplog.clear()
        renewer.release_all()
        assert failing == [*names, "waited for"]
        [told] = [record for record in caplog.records if "at exit" in record.getMessage()]
        assert (told.distlock["name"], told.distlock["count"]) == ("one", len({*names}))
        which = "2 locks of 'default', such as 'one', are" if "two" in names else "Lock 'one' is"
        assert told.getMessage() == f"{which} not released at exit but by the TTL: the store is away"

    def test_a_waiters_place_that_is_given_up_hides_no_lock_that_is_left(self, locmem_locks, monkeypatch, caplog):
        renewer, left, place = renewer_of(locmem_locks), lock_request("one"), lock_request("one")

        def fail_for_the_lock(request, *_):
            if request is left:
                raise LockBackendError("the store is away")
            return True

        with monkeypatch.context() as patched:
            patched.setattr(locmem_locks, "release", fail_for_the_lock)
            patched.setattr(locmem_locks, "places", lambda queued: [place])
            renewer.release_in_background(left)
            renewer.release_all()
        assert "Lock 'one' is not released at exit" in caplog.text
        eventually(lambda: not renewer.is_cleaning)

    def test_a_store_that_fails_holds_it_up_for_a_moment_whatever_is_left(self, locmem_locks, failing, caplog):
        renewer = renewer_of(locmem_locks)
        for number in range(50):
            renewer.release_in_background(lock_request(f"name:{number}"))
        renewer.release_all()
        assert 1 <= len(failing) <= 3  # that is, a tenth of a second
        assert "50 locks of 'default'" in caplog.text
