"""``lock_all()``: several locks together, all or none, in one order. On each kind of store."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.transaction import TransactionManagementError

from django_distlock import (
    LockBackendError,
    LockLost,
    LockNotAcquired,
    LockNotHeld,
    LockReentry,
    LockTimeout,
    State,
    leader,
    lock,
    lock_all,
    locks,
)
from django_distlock.core import acquire
from django_distlock.core.renewal import Renewer
from django_distlock.testing import lose, store_down
from django_distlock.types import Grant, Holder
from django_distlock.utils.clock import clock
from tests.support.inside import waiters_for_the_end_of
from tests.support.leases import hold_elsewhere, wait_for_renewal
from tests.support.tools import PATIENCE, backend_on, eventually, lock_request, on_stores, queue_of

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "postgres", "redlock")

LONG = 60  # seconds that no sound test waits


def in_a_task(group):
    """``with`` that is ``async with`` in an event loop of its own."""

    @contextmanager
    def entered():
        with asyncio.Runner() as runner:
            leases = runner.run(group.__aenter__())
            try:
                yield leases
            except BaseException as error:
                runner.run(group.__aexit__(type(error), error, None))
                raise
            runner.run(group.__aexit__(None, None, None))

    return entered()


@pytest.fixture(params=["thread", "task"])
def entering(request):
    """Makes of a group what ``with`` enters, in a thread or in a task."""
    return (lambda group: group) if request.param == "thread" else in_a_task


def held():
    return sorted({info.name for info in locks["default"].held()})


class Elsewhere(threading.Thread):
    """A thread that waits for a group, holds it until it is told to leave, and keeps what came of it."""

    def __init__(self, group):
        super().__init__(daemon=True)
        self.group, self.leave, self.error, self.leases = group, threading.Event(), None, None
        self.start()

    def run(self):
        try:
            with self.group as self.leases:
                self.leave.wait(PATIENCE)
        except Exception as error:
            self.error = error

    def ends(self):
        self.leave.set()
        self.join(3 * PATIENCE)
        assert not self.is_alive()
        return self.error


@pytest.mark.usefixtures("backend")
class TestAllOrNone:
    @on_each_store
    def test_all_are_held_in_the_callers_order_and_released_together(self, entering):
        with entering(lock_all(lock("b"), lock("a"), lock("c"))) as leases:
            assert [lease.name for lease in leases] == ["b", "a", "c"]
            leases.ensure_held()
            assert leases.is_held
            assert 0 < leases.remaining <= min(lease.ttl for lease in leases)
            assert held() == ["a", "b", "c"]
        assert held() == []
        assert {lease.state for lease in leases} == {State.RELEASED}
        assert leases.remaining == 0
        with pytest.raises(LockNotHeld):
            leases.ensure_held()

    @on_each_store
    def test_where_one_is_busy_nothing_is_held(self, entering):
        other = hold_elsewhere("b")
        with pytest.raises(LockNotAcquired) as caught, entering(lock_all(lock("c"), lock("b"), lock("a"), wait=0)):
            pytest.fail("the body ran")
        assert not isinstance(caught.value, LockTimeout)
        assert (caught.value.name, caught.value.using) == ("b", "default")
        assert held() == ["b"]
        locks["default"].release(other)
        with entering(lock_all(lock("c"), lock("b"), lock("a"), wait=0)):
            assert held() == ["a", "b", "c"]

    def test_what_is_given_back_is_free_at_once_and_no_signal_tells_of_it(self, entering, heard):
        hold_elsewhere("name")
        with (
            pytest.raises(LockNotAcquired),
            entering(lock_all(lock("name"), lock("heard", min_hold=LONG), wait=0)),
        ):
            pytest.fail("the body ran")
        assert held() == ["name"]
        assert heard == []

    def test_signals_tell_of_what_is_acquired(self, entering, heard):
        with entering(lock_all(lock("name"), lock("heard"))):
            assert [name for name, _ in heard] == ["lock_acquired"]
        assert [name for name, _ in heard] == ["lock_acquired", "lock_released"]

    def test_a_signal_tells_which_one_is_busy(self, entering, heard):
        hold_elsewhere("heard")
        with pytest.raises(LockNotAcquired), entering(lock_all(lock("name"), lock("heard"), wait=0)):
            pytest.fail("the body ran")
        assert [name for name, _ in heard] == ["lock_busy"]

    def test_who_holds_one_already_is_refused_and_holds_no_other(self, entering):
        with lock("b"):
            group = lock_all(lock("a"), lock("b"), wait=LONG)
            with pytest.raises(LockReentry), group:
                pytest.fail("the body ran")
            assert held() == ["b"]

    def test_a_reentrant_one_is_entered_again_and_stays_with_its_holder(self):
        with lock("b", reentrant=True) as outer:
            with lock_all(lock("a"), lock("b", reentrant=True)) as leases:
                assert leases[1] is outer
            assert held() == ["b"]
            hold_elsewhere("c")
            with pytest.raises(LockNotAcquired), lock_all(lock("c"), lock("b", reentrant=True), wait=0):
                pytest.fail("the body ran")
            outer.ensure_held()
            assert held() == ["b", "c"]

    def test_an_error_of_the_body_is_raised_and_all_are_released(self, entering):
        with pytest.raises(KeyError), entering(lock_all(lock("a"), lock("b"))):
            raise KeyError
        assert held() == []

    def test_a_group_is_entered_again_after_it_was_left(self, entering):
        group = lock_all(lock("a"), lock("b"))
        for _ in range(2):
            with entering(group):
                assert held() == ["a", "b"]
        with pytest.raises(LockNotHeld):
            group.__exit__(None, None, None)

    def test_an_interrupt_leaves_nothing_behind(self, entering, monkeypatch, backend):
        hold_elsewhere("c")  # so that they are asked for one after another
        kind = type(backend)
        for name in ("acquire", "aacquire"):
            real = getattr(kind, name)

            def interrupted(self, request, *, queue, _real=real):
                if request.name == "b":
                    raise KeyboardInterrupt
                return _real(self, request, queue=queue)

            monkeypatch.setattr(kind, name, interrupted)
        with pytest.raises(KeyboardInterrupt), entering(lock_all(lock("a", min_hold=LONG), lock("b"), lock("c"))):
            pytest.fail("the body ran")
        monkeypatch.undo()
        eventually(lambda: held() == ["c"])

    def test_a_second_interrupt_is_told_and_leaves_nothing_behind(self, entering, monkeypatch, backend):
        """It strikes while the locks are given back."""
        hold_elsewhere("c")
        release, struck = Renewer.release_in_background, []

        def interrupted(self, request, **options):
            if not struck:
                struck.append(request.name)
                raise KeyboardInterrupt
            return release(self, request, **options)

        for name in ("acquire", "aacquire"):
            real = getattr(type(backend), name)

            def limited(self, request, *, queue, _real=real):
                if request.name == "b":
                    raise TimeoutError("the soft limit of a task")
                return _real(self, request, queue=queue)

            monkeypatch.setattr(type(backend), name, limited)
        monkeypatch.setattr(Renewer, "release_in_background", interrupted)
        with pytest.raises(KeyboardInterrupt), entering(lock_all(lock("a"), lock("b"), lock("c"))):
            pytest.fail("the body ran")
        assert struck
        eventually(lambda: held() == ["c"])

    @on_each_store
    def test_an_answer_that_is_lost_leaves_nothing_behind(self, entering, monkeypatch, backend):
        hold_elsewhere("c")
        kind = type(backend)
        real, areal = kind.acquire, kind.aacquire

        def lost(request):
            if request.name == "b":
                request.in_doubt = True
                raise LockBackendError("the answer was lost")

        def acquire(self, request, *, queue):
            answer = real(self, request, queue=queue)
            lost(request)
            return answer

        async def aacquire(self, request, *, queue):
            answer = await areal(self, request, queue=queue)
            lost(request)
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(kind, "acquire", acquire)
            patch.setattr(kind, "aacquire", aacquire)
            with pytest.raises(LockBackendError), entering(lock_all(lock("a"), lock("b"), lock("c"))):
                pytest.fail("the body ran")
        eventually(lambda: held() == ["c"])

    @pytest.mark.parametrize("way", ["given back", "left"])
    def test_an_interrupted_release_frees_all_the_same(self, monkeypatch, backend, way):
        """Of the first one to be released: it and the others are free soon."""
        if way == "given back":
            hold_elsewhere("c")
        kind, struck = type(backend), []
        real = kind.release

        def release(self, request, *more, **options):
            if not struck:
                struck.append(request.name)
                raise KeyboardInterrupt
            return real(self, request, *more, **options)

        monkeypatch.setattr(kind, "release", release)
        with pytest.raises(KeyboardInterrupt), lock_all(lock("a"), lock("b"), lock("c"), wait=0):
            pass
        eventually(lambda: held() == (["c"] if way == "given back" else []))

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
    def test_an_interrupted_release_is_told_also_where_the_body_failed(self, entering, monkeypatch, backend, interrupt):
        kind, struck = type(backend), []
        for name in ("release", "arelease"):
            real = getattr(kind, name)

            def interrupted(self, request, *more, _real=real, **options):
                if not struck:
                    struck.append(request.name)
                    raise interrupt
                return _real(self, request, *more, **options)

            monkeypatch.setattr(kind, name, interrupted)
        with pytest.raises(interrupt), entering(lock_all(lock("a"), lock("b"))):
            raise ValueError("of the body")
        eventually(lambda: held() == [])

    @on_each_store
    def test_a_cancelled_task_leaves_nothing_behind(self):
        hold_elsewhere("b")

        async def main():
            async def body():
                async with lock_all(lock("a"), lock("b"), wait=LONG):
                    pytest.fail("the body ran")

            task = asyncio.create_task(body())
            while held() != ["a", "b"]:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        eventually(lambda: held() == ["b"])


stepping = backend_on("redis", "locmem", "postgres", "mariadb", "sqlite")


class TestOneStepOnEachStore:
    @pytest.fixture(autouse=True)
    def steps(self, stepping, monkeypatch):
        """What came of each step."""
        steps = []
        for method in ("acquire_all", "aacquire_all"):
            real = getattr(type(stepping), method)

            def noted(self, requests, _real=real):
                answer = _real(self, requests)
                if not asyncio.iscoroutine(answer):
                    steps.append(answer)
                    return answer

                async def awaited():
                    steps.append(await answer)
                    return steps[-1]

                return awaited()

            monkeypatch.setattr(type(stepping), method, noted)
        return steps

    def test_all_are_granted_by_one(self, entering, steps):
        with entering(lock_all(lock("b"), lock("a"), lock("c"))) as leases:
            assert held() == ["a", "b", "c"]
            assert len({lease.token for lease in leases}) == 3
            leases.ensure_held()
        assert held() == []
        assert len(steps[0]) == 3

    def test_where_one_is_busy_the_ordered_way_goes_on(self, entering, steps, stepping):
        other = hold_elsewhere("b")
        with pytest.raises(LockNotAcquired) as caught, entering(lock_all(lock("b"), lock("a"), wait=0)):
            pytest.fail("the body ran")
        assert caught.value.name == "b"
        assert steps[0] is None
        assert held() == ["b"]
        stepping.release(other)
        with entering(lock_all(lock("b"), lock("a"), wait=0)):
            assert held() == ["a", "b"]

    def test_who_waits_is_not_passed(self, entering, steps, stepping):
        other = hold_elsewhere("b")
        waiter = lock_request("b")
        stepping.acquire(waiter, queue=True)
        stepping.release(other)
        with pytest.raises(LockNotAcquired), entering(lock_all(lock("b"), lock("a"), wait=0)):
            pytest.fail("the body ran")
        assert isinstance(stepping.acquire(waiter, queue=True), Grant)
        assert held() == ["b"]

    def test_two_aliases_of_one_store_are_asked_as_one(self, entering, steps, settings, stepping):
        if stepping.keyspace is None:
            pytest.skip("each alias of this backend is a store of its own, so two aliases never share one")
        aliases = settings.DISTRIBUTED_LOCKS
        settings.DISTRIBUTED_LOCKS = {**aliases, "other": aliases["default"]}
        with entering(lock_all(lock("b"), lock("a", using="other"), lock("c"))) as leases:
            assert held() == ["a", "b", "c"]
            assert [lease.using for lease in leases] == ["default", "other", "default"]
            leases[1].renew()
        assert held() == []
        assert [grant.slot for grant in steps[0]] == [1, 1, 1]

    def test_slots_are_counted_in_it_or_it_is_the_ordered_way(self, entering, steps):
        with entering(lock_all(lock("b", slots=2), lock("a"))), entering(lock_all(lock("b", slots=2), lock("c"))):
            assert held() == ["a", "b", "c"]
            assert [info.slot for info in locks["default"].look(["b"])[0]] == [1, 2]
        assert held() == []

    def test_crossed_groups_lose_no_money(self, steps):
        """One of each pair that come together is granted both, and nobody waits in a circle."""
        names, accounts, failed = "abcd", dict.fromkeys("abcd", 100), []

        def transfer(number):
            for turn in range(15):
                source, target = names[(number + turn) % 4], names[(number * turn + 1) % 4]
                try:
                    with lock_all(lock(source), lock(target), wait=LONG):
                        before = accounts[source], accounts[target]
                        if source != target:
                            threading.Event().wait(0.001)
                            accounts[source], accounts[target] = before[0] - 1, before[1] + 1
                except LockBackendError as error:
                    failed.append(error)

        threads = [threading.Thread(target=transfer, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        assert not failed
        assert sum(accounts.values()) == 400
        assert held() == []
        assert [] not in steps


class TestOneStep:
    """Of a store that grants several locks in one step."""

    @pytest.fixture
    def asked(self, locmem_locks, monkeypatch):
        """Which names it was asked for one by one."""
        names = []
        for method in ("acquire", "aacquire"):
            real = getattr(type(locmem_locks), method)

            def noted(self, request, *, queue, _real=real):
                names.append(request.name)
                return _real(self, request, queue=queue)

            monkeypatch.setattr(type(locmem_locks), method, noted)
        return names

    def test_where_all_are_free_none_is_asked_for_alone(self, entering, asked):
        with entering(lock_all(lock("b", slots=2), lock("a"))) as leases:
            assert held() == ["a", "b"]
            assert [lease.fence > 0 for lease in leases] == [True, True]
        assert held() == []
        assert asked == []

    def test_where_one_is_busy_they_are_asked_for_in_their_order(self, entering, asked):
        hold_elsewhere("b")
        del asked[:]
        with pytest.raises(LockNotAcquired), entering(lock_all(lock("b"), lock("a"), wait=0)):
            pytest.fail("the body ran")
        assert list(dict.fromkeys(asked)) == ["a", "b"]  # aacquire() may be made of acquire()
        assert held() == ["b"]

    @pytest.mark.django_db(transaction=True)
    def test_one_that_refuses_transactions_is_asked_for_outside_of_them(self, asked):
        async def aentered():
            async with lock_all(lock("b"), lock("a", in_atomic="refuse"), wait=LONG):
                return held()

        with lock_all(lock("b"), lock("a", in_atomic="refuse"), wait=LONG):
            assert held() == ["a", "b"]
        assert async_to_sync(aentered)() == ["a", "b"]
        with transaction.atomic():
            with pytest.raises(TransactionManagementError), lock_all(lock("b"), lock("a", in_atomic="refuse")):
                pytest.fail("the body ran")
            with pytest.raises(TransactionManagementError):
                async_to_sync(aentered)()
            assert held() == []
        assert asked == []

    def test_a_step_that_came_too_late_is_given_back(self, entering, asked, locmem_locks, monkeypatch):
        """The process was stopped before it read the answer."""
        late = []
        real = type(locmem_locks).acquire_all

        def acquire_all(self, requests):
            late.extend(requests)
            return [grant._replace(sent_at=grant.sent_at - LONG) for grant in real(self, requests)]

        monkeypatch.setattr(type(locmem_locks), "acquire_all", acquire_all)
        with entering(lock_all(lock("b"), lock("a"), wait=LONG)) as leases:
            leases.ensure_held()
            assert not {lease.token for lease in leases} & {request.token for request in late}
        eventually(lambda: held() == [])

    def test_an_interrupt_leaves_nothing_behind(self, entering, asked, locmem_locks, monkeypatch):
        real = type(locmem_locks).acquire_all

        def acquire_all(self, requests):
            assert real(self, requests)
            raise KeyboardInterrupt

        monkeypatch.setattr(type(locmem_locks), "acquire_all", acquire_all)
        with pytest.raises(KeyboardInterrupt), entering(lock_all(lock("b", min_hold=LONG), lock("a"))):
            pytest.fail("the body ran")
        eventually(lambda: held() == [])

    def test_a_store_that_fails_leaves_nothing_behind(self, entering, asked, locmem_locks, monkeypatch):
        real = type(locmem_locks).acquire_all

        def acquire_all(self, requests):
            assert real(self, requests)
            for request in requests:
                request.in_doubt = True
            raise LockBackendError("away")

        monkeypatch.setattr(type(locmem_locks), "acquire_all", acquire_all)
        with pytest.raises(LockBackendError), entering(lock_all(lock("b"), lock("a"))):
            pytest.fail("the body ran")
        eventually(lambda: held() == [])

    def test_waiters_of_this_process_are_not_passed(self, asked, locmem_locks):
        other = hold_elsewhere("b")
        waiting = Elsewhere(lock_all(lock("b"), wait=LONG))
        eventually(lambda: locmem_locks.count_waiters(["b"])[0])
        with pytest.raises(LockNotAcquired), lock_all(lock("a"), lock("b"), wait=0):
            pytest.fail("the body ran")
        locmem_locks.release(other)
        eventually(lambda: waiting.leases)
        assert waiting.ends() is None


@pytest.mark.usefixtures("backend")
class TestOneOrder:
    @on_each_store
    def test_what_comes_later_is_not_held_while_the_first_is_waited_for(self, backend):
        """By name, whatever the order of the handles."""
        other = hold_elsewhere("a")
        elsewhere = Elsewhere(lock_all(lock("b"), lock("a"), wait=LONG))
        if backend.supports_queue:
            eventually(lambda: backend.count_waiters(["a"])[0])
        assert held() == ["a"]
        backend.release(other)
        eventually(lambda: elsewhere.leases)
        assert held() == ["a", "b"]
        assert elsewhere.ends() is None

    def test_it_stands_in_one_queue_at_a_time(self, backend):
        if not backend.supports_queue:
            pytest.skip("this backend has no queue in the store, in which a place could be seen")
        others = [hold_elsewhere(name) for name in "abc"]
        elsewhere = Elsewhere(lock_all(*map(lock, "cba"), wait=LONG))
        for place, other in enumerate(others):
            waiting = [int(place == each) for each in range(3)]
            eventually(lambda waiting=waiting: backend.count_waiters(["a", "b", "c"]) == waiting)
            backend.release(other)
        eventually(lambda: elsewhere.leases)
        assert elsewhere.ends() is None

    @on_each_store
    def test_opposite_orders_do_not_deadlock(self):
        done = []

        def work(*names):
            for _ in range(20):
                with lock_all(*map(lock, names), wait=None):
                    done.append(names)

        orders = ["ab", "ba", "bc", "ca"]
        threads = [threading.Thread(target=work, args=order, daemon=True) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * PATIENCE)
        assert len(done) == 20 * len(orders)

    def test_all_are_waited_for_until_one_moment(self, entering, backend, monkeypatch):
        """Not each as long as the first."""
        other, deadlines = hold_elsewhere("a"), {}
        hold_elsewhere("b")
        for name in ("acquire", "aacquire"):
            real = getattr(type(backend), name)

            def noted(self, request, *, queue, _real=real):
                deadlines[request.name] = request.deadline
                return _real(self, request, queue=queue)

            monkeypatch.setattr(type(backend), name, noted)
        timer = threading.Timer(1.5, backend.release, (other,))
        timer.start()
        with (
            pytest.raises(LockTimeout) as caught,
            entering(lock_all(lock("a", wait=LONG), lock("b", wait=LONG), wait=3)),
        ):
            pytest.fail("the body ran")
        timer.join()
        assert caught.value.name == "b"
        assert abs(deadlines["a"] - deadlines["b"]) < 1
        assert held() == ["b"]

    def test_stores_come_in_the_order_of_their_identity_not_of_their_alias(self, valkey, store, settings):
        entry = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": valkey.url}
        orders = []
        for first, second in ("xy", "yx"):
            settings.DISTRIBUTED_LOCKS = {
                "default": entry, first: {**entry, "KEY_PREFIX": "one"}, second: {**entry, "KEY_PREFIX": "two"},
            }  # fmt: skip
            acquired = []
            kind = type(locks["default"])
            real = kind.acquire

            def noted(self, request, *, queue, _real=real, _acquired=acquired):
                _acquired.append(self.settings["KEY_PREFIX"])
                return _real(self, request, queue=queue)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kind, "acquire", noted)
                with lock_all(lock("name", using="x"), lock("name", using="y")):
                    pass
            orders.append(acquired)
        assert orders[0] == orders[1]


def test_the_time_for_which_it_waited_for_the_first_lock_costs_it_no_turn_at_the_second(locmem_locks, monkeypatch):
    first, second, waiting = hold_elsewhere("a"), hold_elsewhere("b"), queue_of(locmem_locks)
    ahead, ago = Elsewhere(lock("b", wait=LONG)), [0.0]
    eventually(lambda: waiting.length("b") == 1)
    monkeypatch.setattr(acquire, "clock", lambda: clock() - (0.0 if threading.current_thread() is ahead else ago[0]))
    ago[0] = 3 * locmem_locks.timing.unresponsive_after  # longer than whoever leads may do nothing
    group = Elsewhere(lock_all(lock("a"), lock("b"), wait=LONG))
    eventually(lambda: waiting.length("a") == 1)
    ago[0] = 0.0
    locmem_locks.release(first)
    eventually(lambda: waiting.length("b") == 2)
    behind = Elsewhere(lock("b", wait=LONG))
    eventually(lambda: waiting.length("b") == 3)
    locmem_locks.release(second)
    eventually(lambda: ahead.leases)
    ahead.ends()
    eventually(lambda: group.leases or behind.leases)
    assert not behind.leases
    assert group.ends() is behind.ends() is None


@pytest.mark.usefixtures("backend")
class TestLosses:
    def test_what_is_held_is_renewed_while_the_next_is_waited_for(self, backend):
        other = hold_elsewhere("b")
        elsewhere = Elsewhere(lock_all(lock("a", ttl=10), lock("b"), wait=LONG))
        [lease] = eventually(lambda: [lease for lease in locks.leases() if lease.name == "a"])
        wait_for_renewal(lease)
        backend.release(other)
        eventually(lambda: elsewhere.leases)
        assert elsewhere.ends() is None

    @on_each_store
    def test_one_that_ran_out_meanwhile_fails_all(self, backend):
        other = hold_elsewhere("b")
        elsewhere = Elsewhere(lock_all(lock("a", ttl=0.5, renew=False), lock("b"), lock("c"), wait=LONG))
        [lease] = eventually(lambda: [lease for lease in locks.leases() if lease.name == "a"])
        eventually(lambda: not lease.is_held)
        backend.release(other)
        error = elsewhere.ends()
        assert isinstance(error, LockLost)
        assert error.lease is lease
        eventually(lambda: held() == [])
        assert elsewhere.leases is None

    @on_each_store
    @pytest.mark.parametrize("place", ["first", "behind another one"])
    def test_a_loss_ends_the_wait(self, entering, place, backend, monkeypatch):
        """Also of one that stands behind others of its process. Nobody looks by itself."""
        monkeypatch.setattr(backend.timing, "look_interval", 3600.0)
        hold_elsewhere("b")
        if place != "first":
            before = Elsewhere(lock("b", wait=LONG))
            eventually(lambda: queue_of(backend).length("b") == 1)
        group = Elsewhere(entering(lock_all(lock("a"), lock("b"), wait=None)))
        [lease] = eventually(lambda: [lease for lease in locks.leases() if lease.name == "a"])
        eventually(lambda: queue_of(backend).length("b") == (1 if place == "first" else 2))
        lose(lease)
        error = group.ends()
        assert isinstance(error, LockLost)
        assert error.lease is lease
        assert held() == ["b"]
        if place != "first":
            lock("b").force_release()
            assert before.ends() is None

    def test_a_loss_just_before_the_wait_ends_it(self, entering, backend, monkeypatch):
        """Of one that stands behind others. Nobody wakes it any more."""
        monkeypatch.setattr(backend.timing, "look_interval", 3600.0)
        hold_elsewhere("b")
        before, from_now = Elsewhere(lock("b", wait=LONG)), Holder.from_now
        eventually(lambda: queue_of(backend).length("b") == 1)

        def losing(holder):  # called before the next lock is asked for
            for lease in locks.leases():
                if lease.name == "a":
                    lose(lease)
            return from_now(holder)

        monkeypatch.setattr(Holder, "from_now", losing)
        group = Elsewhere(entering(lock_all(lock("a"), lock("b"), wait=None)))
        assert isinstance(group.ends(), LockLost)
        lock("b").force_release()
        assert before.ends() is None

    @pytest.mark.parametrize("place", ["first", "behind another one"])
    def test_a_loss_in_an_outage_is_part_of_the_outage(self, entering, place, backend, monkeypatch):
        """Of which all handles say that the body runs."""
        hold_elsewhere("b")
        waiting = [Elsewhere(lock("b", wait=LONG))] if place != "first" else []
        eventually(lambda: backend.count_waiters(["b"]) == [len(waiting)])
        handles = [lock(name, ttl=0.5, on_unavailable="run") for name in "ab"]
        waiting.append(group := Elsewhere(entering(lock_all(*handles, wait=LONG))))
        eventually(lambda: backend.count_waiters(["b"]) == [1] and queue_of(backend).length("b") == len(waiting))
        [lease] = [lease for lease in locks.leases() if lease.name == "a"]
        with store_down():
            eventually(lambda: lease.state is State.LOST)
            monkeypatch.setattr(acquire, "clock", lambda: clock() + 2 * LONG)  # the time of all is over
            queue_of(backend).wake("b")
            leases = eventually(lambda: group.leases)
            assert {lease.state for lease in leases} == {State.UNAVAILABLE}
        for one in waiting:
            one.ends()
        assert group.error is None

    def test_a_wait_leaves_nothing_with_a_lease_that_goes_on(self, entering):
        hold_elsewhere("b")
        with lock("a") as lease:
            with pytest.raises(LockTimeout), entering(lock_all(lock("a", reentrant=True), lock("b"), wait=0.01)):
                pass
            assert waiters_for_the_end_of(lease) == 0

    def test_after_one_loss_each_raises(self, entering):
        with pytest.raises(LockLost) as caught, entering(lock_all(lock("a"), lock("b"))) as leases:
            one, two = leases
            lose(two)
            assert two.state is State.LOST
            assert one.is_held
            assert not leases.is_held
            assert leases.remaining == 0
            for each in (leases, one, two):
                with pytest.raises(LockLost) as told:
                    each.ensure_held()
                assert told.value.lease is two
        assert caught.value.lease is two
        assert one.state is State.RELEASED
        assert held() == []

    def test_a_release_of_one_is_no_loss_of_the_others(self):
        with lock_all(lock("a"), lock("b")) as leases:
            leases[0].release()
            assert held() == ["b"]
            leases[1].ensure_held()
            with pytest.raises(LockNotHeld):
                leases.ensure_held()
        assert held() == []

    def test_a_body_that_failed_is_not_hidden_by_a_loss(self, entering):
        with pytest.raises(KeyError), entering(lock_all(lock("a"), lock("b"))) as leases:
            lose(leases[0])
            raise KeyError
        assert held() == []


@pytest.mark.usefixtures("backend")
class TestOneNameTwice:
    def test_it_is_one_lease(self, entering):
        with entering(lock_all(lock("b"), lock("a"), lock("b", wait=0))) as leases:
            assert [lease.name for lease in leases] == ["b", "a", "b"]
            assert leases[0] is leases[2]
        assert held() == []

    def test_the_same_handle_twice(self, entering):
        one = lock("a")
        with entering(lock_all(one, one)) as leases:
            assert leases[0] is leases[1]
        assert held() == []

    def test_different_options_are_refused(self, entering):
        with pytest.raises(ValueError, match="'a' twice, with different options"):
            entering(lock_all(lock("a", ttl=5), lock("a"))).__enter__()
        assert held() == []

    @on_each_store
    def test_two_aliases_of_one_store_are_one(self, entering, settings, backend):
        if backend.keyspace is None:
            pytest.skip("each alias of this backend is a store of its own, so two aliases never share one")
        aliases = settings.DISTRIBUTED_LOCKS
        settings.DISTRIBUTED_LOCKS = {**aliases, "other": aliases["default"]}
        with entering(lock_all(lock("a", using="other"), lock("a"), wait=0)) as leases:
            assert leases[0] is leases[1]
            assert leases[0].using == "other"
        assert held() == []


class TestOutages:
    """``on_unavailable`` is one decision for all."""

    @pytest.fixture(autouse=True)
    def two_stores(self, valkey, store, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": valkey.url},
            "other": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"},
        }
        yield
        locks.close()

    def test_an_outage_raises_and_nothing_is_held(self, entering):
        both = lock("a"), lock("a", using="other", on_unavailable="run")
        with store_down("default"), pytest.raises(LockBackendError), entering(lock_all(*both)):
            pytest.fail("the body ran")
        eventually(lambda: not lock("a", using="other").locked())

    def test_where_all_say_run_the_body_runs_without_any(self, entering):
        run = {"on_unavailable": "run"}
        with store_down("default"), entering(lock_all(lock("a", **run), lock("a", using="other", **run))) as leases:
            assert [lease.state for lease in leases] == [State.UNAVAILABLE] * 2
            eventually(lambda: not lock("a", using="other").locked())
            with pytest.raises(LockNotHeld):
                leases.ensure_held()
        assert [lease.state for lease in leases] == [State.RELEASED] * 2


@pytest.mark.usefixtures("backend")
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestTransactions:
    def test_all_are_held_until_commit(self):
        with transaction.atomic():
            with lock_all(lock("a"), lock("b")) as leases:
                pass
            assert held() == ["a", "b"]
            with lock_all(lock("b"), lock("a")) as again:
                assert again == (leases[1], leases[0])
        assert held() == []

    @pytest.mark.parametrize("as_task", [False, True], ids=["thread", "task"])
    def test_what_a_transaction_keeps_is_entered_while_the_store_is_down(self, as_task):
        run = {"on_unavailable": "run"}

        def entered():
            with lock_all(lock("a", **run), lock("b", **run)) as leases:
                return leases

        async def aentered():
            async with lock_all(lock("a", **run), lock("b", **run)) as leases:
                return leases

        with transaction.atomic():
            with lock("a") as kept:
                pass
            with store_down():
                leases = async_to_sync(aentered)() if as_task else entered()
            assert leases[0] is kept
            assert kept.is_held

    def test_what_is_given_back_does_not_wait_for_commit(self):
        hold_elsewhere("b")
        with transaction.atomic():
            with pytest.raises(LockNotAcquired), lock_all(lock("a"), lock("b"), wait=0):
                pytest.fail("the body ran")
            assert held() == ["b"]


class TestBadInput:
    @pytest.mark.parametrize("handle", ["name", None, leader("name")])
    def test_what_is_no_lock_is_refused(self, handle):
        with pytest.raises(TypeError, match="takes handles of lock"):
            lock_all(lock("a"), handle)

    def test_no_lock_is_refused(self):
        with pytest.raises(ValueError, match="no lock"):
            lock_all()

    @pytest.mark.parametrize("wait", [-1, "1", True])
    def test_a_bad_wait_is_refused(self, wait):
        with pytest.raises(ValueError, match="wait is"):
            lock_all(lock("a"), wait=wait)
