"""``leader()``: a lock without bounds, whose holder steps down or learns that it leads no more."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from django_distlock import LockBackendError, LockLost, LockReentry, leader, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.testing import lose, store_down
from tests.support.leases import hold_elsewhere, wait_for_renewal
from tests.support.tools import PATIENCE, aeventually, backend_on, eventually, on_stores

backend = backend_on("locmem")
on_each_store = on_stores("redis", "locmem", "postgres")


class Candidate:
    """A thread, or a task in a loop of its own, that leads once; keeps its fence, and how its block ended."""

    def __init__(self, *, as_task=False, **options):
        self.term = leader("name", on_lost="log", **options)
        self.fence, self.lease, self.error = 0, None, None
        self.thread = threading.Thread(target=self._as_task if as_task else self._as_thread, daemon=True)
        self.thread.start()

    def _as_thread(self):
        try:
            with self.term as self.lease:
                self.fence = self.lease.fence
                self.lease.wait_lost(PATIENCE)
        except Exception as error:
            self.error = error

    def _as_task(self):
        asyncio.run(self._main())

    async def _main(self):
        async with self.term as self.lease:
            self.fence = self.lease.fence
            await self.lease.await_lost(PATIENCE)

    def leads(self):
        return eventually(lambda: self.fence, 3 * PATIENCE)

    def ends(self):
        self.thread.join(3 * PATIENCE)
        assert not self.thread.is_alive()
        assert self.error is None


@pytest.mark.usefixtures("backend")
class TestTerms:
    @on_each_store
    @pytest.mark.parametrize("as_task", [False, True], ids=["thread", "task"])
    def test_who_steps_down_is_followed_by_the_next_and_its_block_ends_without_an_error(self, as_task):
        first = Candidate(as_task=as_task)
        one = first.leads()
        second = Candidate(as_task=as_task)
        eventually(lambda: locks["default"].count_waiters(["name"]) != [0] or None)
        assert not second.fence
        assert first.term.step_down() is True
        first.ends()
        assert second.leads() > one
        assert first.term.step_down() is False
        second.term.step_down()
        second.ends()

    def test_a_handle_leads_again(self):
        term = leader("name")
        with term as one:
            assert term.step_down() is True
            assert not one.is_held
        with term as two:
            assert two.is_held
        assert two.fence > one.fence

    @on_each_store
    def test_a_task_steps_down(self):
        async def main():
            term = leader("name")
            async with term as lease:
                assert await term.astep_down() is True
                assert await lease.await_lost() is True
            assert await term.astep_down() is False

        asyncio.run(main())

    def test_it_is_the_lock_of_that_name(self):
        with leader("index:{}", 7, label="indexing") as lease:
            assert (lease.name, lease.template, lease.holder.label) == ("index:7", "index:{}", "indexing")
            assert lock("index:{}", 7).locked()
        assert not lock("index:7").locked()

    def test_who_leads_already_does_not_wait_for_itself(self):
        term = leader("name")
        with term, pytest.raises(LockReentry), term:
            pass

    def test_a_loss_is_told_by_the_lease_and_at_the_end(self):
        with pytest.raises(LockLost), leader("name", ttl=60) as lease:
            assert lease.wait_lost(0) is False
            lose(lease)
            assert lease.wait_lost(PATIENCE) is True
        told = []
        with leader("name", on_lost=told.append) as lease:
            lose(lease)
        assert [type(error) for error in told] == [LockLost]

    def test_a_leader_that_was_deposed_does_not_step_down(self):
        term = leader("name", on_lost="log", ttl=60)
        with term as lease:
            lose(lease)
            assert term.step_down() is False


class TestBounds:
    def test_those_of_the_alias_bound_neither_the_wait_nor_the_term(self, settings):
        settings.DISTRIBUTED_LOCKS = {
            "default": {
                "BACKEND": "django_distlock.backends.locmem.LocMemBackend",
                "WAIT": 0, "RENEW": False, "MAX_HOLD": 0.5, "MIN_HOLD": 60, "TTL": 1, "ON_UNAVAILABLE": "run",
            }
        }  # fmt: skip
        held = lock("name", min_hold=0)
        held.acquire()
        candidate = Candidate()
        eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
        held.release()
        candidate.leads()
        wait_for_renewal(candidate.lease)
        wait_for_renewal(candidate.lease)
        assert candidate.lease.is_held
        assert candidate.term.step_down()
        candidate.ends()
        assert not lock("name").locked()  # no min_hold either

    @pytest.mark.parametrize("option", ["wait", "max_hold", "min_hold", "renew", "reentrant", "timeout"])
    def test_it_has_no_other_options(self, option):
        with pytest.raises(TypeError, match=f"no option '{option}'"):
            leader("name", **{option: 1})

    def test_bad_values(self):
        with pytest.raises(ValueError, match="ttl"):
            leader("name", ttl=-1)
        with pytest.raises(ValueError, match="on_lost"):
            leader("name", on_lost="pass")


class TestOutages:
    @pytest.fixture
    def pauses(self, locmem_locks, monkeypatch):
        """Those that are made, which are short here."""
        asked = []

        def pause(request, timeout):
            asked.append(timeout)
            request.event.wait(0.01)

        async def apause(request, timeout):
            asked.append(timeout)
            await request.event.await_set(0.01)

        monkeypatch.setattr(locmem_locks, "pause", pause)
        monkeypatch.setattr(locmem_locks, "apause", apause)
        return asked

    @pytest.mark.parametrize("as_task", [False, True], ids=["thread", "task"])
    def test_it_asks_again_until_the_store_answers_and_warns_once(self, pauses, caplog, as_task):
        with caplog.at_level(logging.WARNING, "django_distlock"):
            with store_down():
                candidate = Candidate(as_task=as_task)
                eventually(lambda: len(pauses) >= 6)
                assert not candidate.fence
            candidate.leads()
        assert pauses[:4] == [1, 2, 4, 5]
        assert set(pauses[4:]) == {5}
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "The store of lock 'name' failed; its waiter continues to wait" in caplog.text
        candidate.term.step_down()
        candidate.ends()

    def test_who_stands_by_already_stands_by_through_it(self, proxied, proxy, store, monkeypatch):
        monkeypatch.setattr(Timing, "look_interval", 0.05)
        other = hold_elsewhere("name")
        candidate = Candidate()
        eventually(lambda: locks["default"].count_waiters(["name"]) == [1])
        proxy.refuse()
        store.flushall()  # the holder and the place are gone, too
        assert not candidate.fence
        proxy.accept()
        assert candidate.leads()
        assert locks["default"].release(other) is False
        candidate.term.step_down()
        candidate.ends()

    def test_what_somebody_has_to_correct_is_raised(self, locmem_locks, pauses, monkeypatch):
        error = LockBackendError("wrong password")
        error.is_final = True

        def refuse(*_, **__):
            raise error

        monkeypatch.setattr(locmem_locks, "acquire", refuse)
        with pytest.raises(LockBackendError, match="wrong password"), leader("name"):
            pass
        assert not pauses

    def test_a_task_that_is_cancelled_in_a_pause_leaves_nothing_behind(self, pauses):
        async def main():
            async def lead():
                async with leader("name"):
                    raise AssertionError

            with store_down():
                task = asyncio.create_task(lead())
                await aeventually(lambda: pauses)
                task.cancel()
                await aeventually(task.done)
            assert task.cancelled()

        asyncio.run(main())
        assert not lock("name").locked()
