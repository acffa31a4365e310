"""``manage.py locks explain``: what it prints."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_distlock import lock
from django_distlock.management.moments import moment_before
from django_distlock.monitoring import explain, situation
from tests.support.commands import said
from tests.support.crossed import Crossed
from tests.support.stores import LOCMEM, REDLOCK
from tests.support.tools import eventually, keeping_a_journal


@pytest.fixture(params=["redis", "locmem", "sqlite"])
def backend(request, settings):
    """With a journal."""
    request.getfixturevalue("valkey_locks" if request.param == "redis" else f"{request.param}_locks")
    with keeping_a_journal(settings) as found:
        yield found


@pytest.fixture(autouse=True)
def in_utc():
    with timezone.override("UTC"):
        yield


def explained(*arguments):
    [data] = json.loads(said("explain", *arguments, "--json"))
    return data


def explained_when(is_so):
    """Of the lock "a". The journal comes a moment later than what the store shows."""

    def found():
        data = explained("a")
        return data if is_so(data) else None

    return eventually(found)


@pytest.mark.seconds(4)
def test_a_deadlock_of_threads(backend):
    with Crossed():
        data = explained_when(lambda data: "deadlock" in [cause["kind"] for cause in data["causes"]])
        [holder], [waiting] = data["holders"], data["waiting"]
        assert (holder["thread"], holder["label"], waiting["thread"], waiting["label"]) == (
            "a", "needs b", "b", "needs a",
        )  # fmt: skip
        text = said("explain", "b")
    assert text.startswith("b (default)\nHeld by\n  needs a (pid ")
    assert "\nWaiting\n  needs b (pid " in text
    assert "\nLately\n" in text
    assert "  granted  needs a (pid " in text
    assert "\nWhy\n  Deadlock: needs " in text


def test_a_deadlock_of_tasks(backend):
    """Of one thread, so that it is the names of the tasks that tell them apart."""

    async def run(own, other, both):
        async with lock(own):
            await both.wait()
            wanted = lock(other, wait=60)
            await wanted.aacquire()
            await wanted.arelease()

    async def main():
        both = asyncio.Barrier(2)
        tasks = [asyncio.create_task(run(*names, both), name=f"needs {names[1]}") for names in (("a", "b"), ("b", "a"))]
        while not all(await backend.alook(["a", "b"])):
            await asyncio.sleep(0.01)
        data = await asyncio.to_thread(
            explained_when, lambda data: "deadlock" in [cause["kind"] for cause in data["causes"]]
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return data

    data = asyncio.run(main())
    assert [one["thread"] for one in (*data["holders"], *data["waiting"])] == ["needs b", "needs a"]


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
def test_others_of_a_process_stand_behind_its_place(backend):
    def wait():
        with lock("a", wait=60):
            pass

    with lock("a", label="pay"):
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        data = explained_when(lambda data: sum(1 + one["behind"] for one in data["waiting"]) == 3)
        first, *others = data["waiting"]
        assert first["thread"] in [thread.name for thread in threads]
        if not others:  # a leader that is slow lets another one have a place of its own
            assert "and 2 more of its process behind it" in said("explain", "a")
    for thread in threads:
        thread.join()
    eventually(lambda: said("explain", "a").count("  released  ") == 4)


def test_without_a_journal(valkey_locks):
    with lock("a", label="pay"):
        thread = threading.Thread(target=lambda: lock("a").acquire(timeout=2))
        thread.start()
        [waiting] = eventually(lambda: explained("a")["waiting"])
        assert (waiting["thread"], waiting["label"]) == (None, None)
        assert waiting["pid"] == explained("a")["holders"][0]["pid"]
        text = said("explain", "a")
        thread.join()
    assert "Lately" not in text
    assert "JOURNAL is not set for 'default'" in text
    with pytest.raises(CommandError, match="Nobody holds the lock 'a' or waits for it") as raised:
        call_command("locks", "explain", "a")
    assert raised.value.returncode == 1
    with pytest.raises(CommandError, match="No journal tells .* by then.\nJOURNAL is not set for 'default'"):
        call_command("locks", "explain", "a", "--at", "2026-11-01")


def test_a_store_without_a_queue(redlock_locks):
    with lock("a", label="pay"):
        text = said("explain", "a")
    assert "Held by\n  pay (pid " in text
    assert "Who waits is not known" in text


def test_a_quorum_keeps_no_journal(settings):
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDLOCK, "LOCATION": ["redis://a", "redis://b"], "JOURNAL": 9}}
    with pytest.raises(CommandError, match="RedlockBackend keeps no journal"):
        call_command("locks", "explain", "a")


def test_a_lock_that_rests(backend, monkeypatch):
    monkeypatch.setattr(backend, "long_held", 1e-6)
    with lock("a", label="pay", min_hold=60):
        pass
    assert explained("a")["holders"][0]["resting"]
    assert explained("a")["causes"] == []
    text = said("explain", "a")
    assert "Held by\n  It rests for the min_hold of pay (pid " in text


def test_the_past(backend):
    with lock("a", label="pay"):
        pass
    eventually(lambda: len(situation.gather(backend, "a").entries) == 2)
    now = datetime.now(UTC).isoformat()
    assert explained("a", "--at", now)["holders"] == []
    assert [entry["event"] for entry in explained("a", "--at", now)["lately"]] == ["granted", "released"]
    middle = situation.gather(backend, "a").entries[0].at + 1e-4
    [holder] = situation.gather(backend, "a", middle).held
    assert holder.holder.label == "pay"
    assert explain.holders(situation.gather(backend, "a", middle))[0].startswith("pay (pid ")
    with pytest.raises(CommandError):
        call_command("locks", "explain", "a", "--at", "2020-01-01")


def test_each_alias_that_knows_the_lock(settings):
    entry = {"BACKEND": LOCMEM, "JOURNAL": 9}
    settings.DISTRIBUTED_LOCKS = {"default": entry, "other": entry, "third": entry}
    with lock("a"), lock("a", using="other"):
        assert [data["using"] for data in json.loads(said("explain", "a", "--json"))] == ["default", "other"]
        assert explained("a", "--using", "other")["using"] == "other"


class TestMoments:
    def test_a_time_is_the_last_one_before_now(self, monkeypatch):
        now = datetime(2026, 11, 26, 3, 0, tzinfo=UTC).timestamp()
        monkeypatch.setattr("django_distlock.management.moments.wall_clock", lambda: now)
        with timezone.override("Europe/Berlin"):
            assert moment_before("03:12") == datetime(2026, 11, 26, 2, 12, tzinfo=UTC).timestamp()
            assert moment_before("05:00:30") == datetime(2026, 11, 25, 4, 0, 30, tzinfo=UTC).timestamp()
            assert moment_before("2026-11-20 12:00") == datetime(2026, 11, 20, 11, 0, tzinfo=UTC).timestamp()
            assert moment_before("02:12Z") == datetime(2026, 11, 26, 2, 12, tzinfo=UTC).timestamp()
            assert moment_before("23:12-05:00") == datetime(2026, 11, 25, 4, 12, tzinfo=UTC).timestamp()
            assert moment_before("21:00-05:00") == datetime(2026, 11, 26, 2, 0, tzinfo=UTC).timestamp()
            assert moment_before("20261120") == datetime(2026, 11, 19, 23, 0, tzinfo=UTC).timestamp()
            assert moment_before("2026-11-20T12:00Z") == datetime(2026, 11, 20, 12, 0, tzinfo=UTC).timestamp()

    @pytest.mark.parametrize("text", ["soon", "25:00", "2099-01-01", ""])
    def test_what_is_none(self, text):
        with pytest.raises(CommandError, match="is no moment|is in the future"):
            call_command("locks", "explain", "a", "--at", text)
