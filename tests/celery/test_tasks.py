"""Exclusive Celery tasks on real workers: when their locks are freed, and that no work is lost or done twice.

Workers that nothing ends are shared by the tests of a pool. Tests that add little but time are run where
``DISTLOCK_SOAK`` is set.
"""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest

from django_distlock import lock
from django_distlock.types import LockRequest
from tests.support.tools import eventually
from tests.support.workers.harness import PATIENCE, Worker
from tests.support.workers.pools import pools, usable

pytestmark = pytest.mark.slow

AT_ONCE = 45.0  # seconds that a busy machine may need for what takes a moment; the TTL of these locks is 120
TTL = 2.0  # of the tasks whose worker is killed


@pytest.fixture(scope="module")
def shared_workers():
    workers: dict[str, Worker] = {}
    yield workers
    for worker in workers.values():
        worker.stop()


@pytest.fixture
def worker_of(the_locks, shared_workers, server, tmp_path_factory):
    """The worker that tests of one pool share."""

    def worker_of(pool):
        if pool not in shared_workers or not shared_workers[pool].is_alive:
            shared_workers[pool] = Worker(server, tmp_path_factory.mktemp("w"), usable(pool)).start()
        return shared_workers[pool]

    return worker_of


@pytest.fixture
def name():
    """Of a lock of this test alone."""
    return uuid.uuid4().hex[:12]


@pytest.fixture
def worker(worker_of):
    return worker_of("prefork")


def is_locked(name):
    return lock(f"job:{name}").locked()


def freed(name, since):
    """Seconds from a moment to the one when nobody holds the lock."""
    eventually(lambda: not is_locked(name), PATIENCE)
    return time.monotonic() - since


class TestFreed:
    """Within what time the lock is free, after what ends a task."""

    @pytest.mark.parametrize("pool", pools())
    @pytest.mark.parametrize(
        ("task", "arguments", "status"),
        [
            ("hold", ["return"], "SUCCESS"),
            ("hold", ["raise"], "FAILURE"),
            ("hold", ["retry"], "RETRY"),
            ("hold_autoretry", [], "RETRY"),
        ],
        ids=["return", "exception", "retry", "autoretry"],
    )
    def test_at_the_end_of_the_function(self, worker_of, name, pool, task, arguments, status):
        worker = worker_of(pool)
        task_id = worker.send(task, name, *arguments)
        worker.ran(name)
        assert is_locked(name)
        assert freed(name, worker.go(name)) < AT_ONCE
        eventually(lambda: worker.result(task_id)["status"] == status)

    @pytest.mark.parametrize("pool", pools("prefork", "spawn"))
    def test_at_the_soft_limit(self, worker_of, name, pool):
        worker = worker_of(pool)
        worker.send("soft", name)
        began = worker.ran(name)
        eventually(lambda: not is_locked(name))
        assert time.time() - began["at"] < 1 + AT_ONCE
        assert worker.journal(name, "soft limit")

    @pytest.mark.parametrize("pool", pools("prefork", "spawn", "gevent"))
    def test_at_the_hard_limit(self, worker_of, name, pool):
        worker = worker_of(pool)
        worker.send("hard", name)
        began = worker.ran(name)
        eventually(lambda: not is_locked(name))
        assert time.time() - began["at"] < 1 + AT_ONCE

    @pytest.mark.parametrize("pool", pools("prefork", "spawn", "gevent"))
    def test_when_it_is_revoked_and_terminated(self, worker_of, name, pool):
        worker = worker_of(pool)
        task_id = worker.send("hold", name)
        worker.ran(name)
        began = time.monotonic()
        worker.app.control.revoke(task_id, terminate=True)
        assert freed(name, began) < AT_ONCE
        assert not worker.journal(name, "done")

    @pytest.mark.parametrize("pool", pools(quick=("prefork", "threads")))
    def test_after_a_warm_shutdown_at_the_end_of_the_task(self, start, name, pool):
        """SIGTERM lets the task finish, and its lock holds for so long."""
        worker = start(pool)
        worker.send("hold", name)
        worker.ran(name)
        worker.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert is_locked(name)
        assert freed(name, worker.go(name)) < AT_ONCE
        assert worker.journal(name, "done")
        worker.process.wait(PATIENCE)

    @pytest.mark.parametrize("pool", pools(quick=("prefork", "threads")))
    def test_by_a_cold_shutdown(self, start, name, pool):
        """SIGQUIT ends what runs, but for threads, which cannot be ended and keep the lock until they are done."""
        worker = start(pool)
        worker.send("hold", name)
        worker.ran(name)
        worker.process.send_signal(signal.SIGQUIT)
        began = time.monotonic()
        if pool == "threads":
            time.sleep(0.5)
            assert is_locked(name)
            began = worker.go(name)
        assert freed(name, began) < AT_ONCE
        worker.process.wait(PATIENCE)

    @pytest.mark.parametrize("pool", pools("prefork", "spawn"))
    def test_by_its_ttl_when_the_child_is_killed(self, worker_of, name, pool):
        worker = worker_of(pool)
        worker.send("hold_briefly", name)
        child = worker.ran(name)["pid"]
        assert child != worker.process.pid
        os.kill(child, signal.SIGKILL)
        assert freed(name, time.monotonic()) < TTL + AT_ONCE

    @pytest.mark.parametrize("pool", pools(quick=("prefork",)))
    def test_by_its_ttl_when_the_worker_is_killed(self, start, name, pool):
        worker = start(pool)
        worker.send("hold_briefly", name)
        worker.ran(name)
        worker.process.kill()
        assert freed(name, time.monotonic()) < TTL + AT_ONCE

    def test_by_the_shutdown_of_a_worker_although_nobody_gave_it_up(self, start, name):
        worker = start("prefork", concurrency=1)
        worker.ended(worker.send("keeps", name))
        assert is_locked(name)
        worker.process.send_signal(signal.SIGTERM)
        assert freed(name, time.monotonic()) < AT_ONCE
        worker.process.wait(PATIENCE)


class TestCopies:
    """A message that is delivered again, and what a retry sends: the same task id."""

    def test_a_killed_task_that_is_acknowledged_late_is_completed_by_its_redelivery(self, worker, name):
        """Skipping it, because the lease of the dead run is still there, would lose the work."""
        task_id = worker.send("late", name)
        os.kill(worker.ran(name)["pid"], signal.SIGKILL)
        assert worker.ran(name, 2)["id"] == task_id
        assert worker.ended(task_id) == {**worker.result(task_id), "status": "SUCCESS", "result": name}
        assert len(worker.journal(name, "done")) == 1

    def test_a_task_whose_worker_is_killed_is_completed_by_another_worker(self, start, name):
        first = start("prefork", visibility_timeout=1)
        task_id = first.send("late", name)
        first.ran(name)
        first.process.kill()
        first.process.wait()
        time.sleep(1.1)
        second = start("prefork", visibility_timeout=1, queue=first.queue)
        assert second.ended(task_id)["result"] == name
        assert len(second.journal(name, "run")) == 2

    @pytest.mark.parametrize("pool", pools("prefork", "threads", quick=("threads",)))
    def test_a_redelivery_of_a_living_one_after_the_visibility_timeout_runs_once(self, start, name, pool):
        first = start(pool, visibility_timeout=1)
        task_id = first.send("late", name)
        first.ran(name)
        time.sleep(1.1)
        second = start(pool, visibility_timeout=1, queue=first.queue)  # delivers again what it finds unacknowledged
        eventually(lambda: "is at work already" in second.log() + first.log(), PATIENCE)
        assert worker_is_running(first, task_id)
        first.go(name)
        assert first.ended(task_id)["result"] == name
        eventually(lambda: "is done already" in second.log() + first.log(), PATIENCE)
        assert [len(first.journal(name, what)) for what in ("run", "done")] == [1, 1]
        assert first.result(task_id)["result"] == name

    @pytest.mark.seconds(5)
    def test_one_for_later_that_is_delivered_twice_before_it_is_due_runs_once(self, start, name):
        """Neither of the two is late: it is chance which one runs first, and only one is flagged."""
        first = start("threads", visibility_timeout=1)
        task_id = first.send("late", name, countdown=5)
        eventually(lambda: task_id in first.log(), PATIENCE)
        time.sleep(1.1)
        second = start("threads", visibility_timeout=1, queue=first.queue)
        first.ran(name)
        eventually(lambda: "is at work already" in first.log() + second.log(), PATIENCE)
        assert worker_is_running(first, task_id)
        first.go(name)
        assert first.ended(task_id)["result"] == name
        eventually(lambda: "is done already" in first.log() + second.log(), PATIENCE)
        assert [len(first.journal(name, what)) for what in ("run", "done")] == [1, 1]
        assert first.result(task_id)["result"] == name

    def test_a_retry_that_comes_before_its_lock_is_free_is_not_skipped(self, worker, name):
        task_id = worker.send("fails_then_works", name)
        assert worker.ended(task_id)["result"] == name
        assert [run["retries"] for run in worker.journal(name, "run")] == [0, 1]

    def test_a_task_that_replaces_another_one_takes_its_lock_after_it(self, worker, name):
        task_id = worker.send("replacing", name)
        assert worker.ended(task_id)["result"] == name
        assert len(worker.journal(name, "run")) == 2


def worker_is_running(worker, task_id):
    return worker.result(task_id)["status"] == "PENDING"


class TestBusy:
    @pytest.fixture
    def holder(self, worker, name):
        """The id of a task that has the lock."""
        task_id = worker.send("hold", name)
        worker.ran(name)
        yield task_id
        worker.go(name)
        worker.ended(task_id)

    def test_the_holder_is_the_task_with_its_id(self, holder, name, the_locks):
        [info] = the_locks.held(f"job:{name}")
        assert info.holder.label == f"hold[{holder}]"

    def test_a_skipped_run_returns_none_and_says_who_has_the_lock_since_when(self, worker, holder, name):
        task_id = worker.send("hold", name)
        result = worker.ended(task_id)
        assert (result["status"], result["result"]) == ("SUCCESS", None)
        [busy] = worker.journal(name, "busy")
        assert busy["holder"] == f"hold[{holder}]"
        [line] = [line for line in worker.log().splitlines() if f"hold[{task_id}] is skipped" in line]
        assert "INFO" in line
        assert f"held by hold[{holder}]" in line
        assert f"since {time.strftime('%Y-%m-%d', time.gmtime())}" in line
        assert len(worker.journal(name, "run")) == 1

    def test_a_chain_goes_on_with_none(self, worker, holder, name):
        worker.send("compose", "chain", name)
        assert eventually(lambda: worker.journal(name, "plain")[1:])[0]["value"] is None

    def test_a_chord_ends_without_its_skipped_member(self, worker, holder, name):
        worker.send("compose", "chord", name)
        assert eventually(lambda: worker.journal(name, "plain")[1:])[0]["value"] == [None, "beside"]

    def test_a_group_runs_its_other_members(self, worker, holder, name):
        worker.send("compose", "group", name)
        assert eventually(lambda: worker.journal(name, "plain"))[0]["value"] == "beside"

    @pytest.mark.seconds(14)
    def test_a_retry_waits_through_eight_requeues_with_two_retries_to_spend(self, worker, name):
        first = worker.send("hold_briefly", name)
        worker.ran(name)
        task_id = worker.send("retrying", name)
        eventually(lambda: len(worker.journal(name, "busy")) > 8, PATIENCE)
        worker.go(name)
        assert worker.ended(task_id)["result"] == name
        assert worker.journal(name, "run")[-1]["retries"] == 0
        assert worker.ended(first)["status"] == "SUCCESS"

    def test_a_chain_waits_for_one_that_is_sent_again(self, worker, name):
        worker.send("hold_briefly", name)
        worker.ran(name)
        worker.send("compose", "chain of one that waits", name)
        eventually(lambda: len(worker.journal(name, "busy")) >= 2)
        worker.go(name)
        assert eventually(lambda: worker.journal(name, "plain")[1:])[0]["value"] == name

    def test_min_hold_keeps_a_short_task_from_running_again(self, worker, name):
        for _ in range(3):
            worker.ended(worker.send("rests", name))
        assert len(worker.journal(name, "run")) == 1
        eventually(lambda: not is_locked(name))
        worker.ended(worker.send("rests", name))
        assert len(worker.journal(name, "run")) == 2


class TestStoreAway:
    """No run ends as a failure because its store does not answer, where it is said what to do then."""

    @pytest.mark.seconds(5)
    def test_a_retry_waits_until_it_is_back_with_no_retry_to_spend(self, worker, name, server):
        task_id = worker.send("late_store", name)
        eventually(lambda: len(worker.journal(name, "unavailable")) >= 3)
        worker.late.symlink_to(server.socket)
        assert worker.ended(task_id)["result"] == name
        [run] = worker.journal(name, "run")
        assert run["fence"] > 0
        assert run["retries"] == 0

    def test_it_runs_without_the_lock_and_its_mark(self, worker, name):
        assert worker.ended(worker.send("away_run", name))["status"] == "SUCCESS"
        [run] = worker.journal(name, "run")
        assert (run["fence"], run["state"]) == (0, "unavailable")
        assert [told["runs"] for told in worker.journal(name, "unavailable")] == [True]

    def test_a_skipped_run_succeeds_and_is_warned_of(self, worker, name):
        task_id = worker.send("away_skip", name)
        result = worker.ended(task_id)
        assert (result["status"], result["result"]) == ("SUCCESS", None)
        assert worker.journal(name, "run") == []
        [line] = [line for line in worker.log().splitlines() if f"away_skip[{task_id}] is skipped" in line]
        assert "WARNING" in line
        assert "does not answer" in line


class TestCanvas:
    """Tasks whose lock is free are what they are without one."""

    @pytest.mark.parametrize(
        ("how", "last"), [("chain", "{name}"), ("chord", ["{name}", "beside"]), ("link", "{name}"), ("group", "beside")]
    )
    def test_what_follows_gets_the_result(self, worker, name, how, last):
        worker.go(name)
        worker.send("compose", how, name)
        count = 2 if how in ("chain", "chord") else 1
        value = eventually(lambda: worker.journal(name, "plain")[count - 1 :])[0]["value"]
        assert value == ([name, "beside"] if how == "chord" else last.format(name=name))
        worker.ran(name)
        eventually(lambda: not is_locked(name))

    def test_one_that_is_sent_for_later(self, worker, name):
        worker.go(name)
        sent = time.time()
        worker.send("hold", name, countdown=1)
        assert worker.ran(name)["at"] - sent > 0.9


class TestLoss:
    def test_it_is_told_to_the_task_and_ends_nothing_by_force(self, worker, name, the_locks):
        task_id = worker.send("told", name)
        worker.ran(name)
        [info] = the_locks.held(f"job:{name}")
        assert the_locks.release(LockRequest(info.name, 2, info.holder, token=info.token))
        [told] = eventually(lambda: worker.journal(name, "told"))
        assert told["state"] == "lost"
        [lost] = eventually(lambda: worker.journal(name, "lost"))  # from a thread of its own
        assert "no longer knows it" in lost["reason"]
        result = worker.ended(task_id)
        assert worker.journal(name, "done")
        assert (result["status"], result["result"]["exc_type"]) == ("FAILURE", "LockLost")
