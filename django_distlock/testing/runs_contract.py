"""The promises of a ``RunsBackend``, as tests. Inherit them beside ``LockBackendContract``."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ..backends.optional import RunsBackend
from ..exceptions import ClockIsAhead
from ..runs import LastRun, UnsentRun
from ..types import Grant
from .tools import PATIENCE, eventually, in_threads, lock_request, locked_names


class RunsContract:
    """The runs of beat. They have no async twins, so the plain methods are called."""

    @pytest.fixture(autouse=True)
    def settling(self, backend: RunsBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "grace", 0.02)

    def know(self, backend: RunsBackend, name: str, stamp: LastRun) -> None:
        """Let the store know the stamp for so long that it may be moved: until a later stamp may be moved, too."""
        assert backend.claim_run(name, stamp, stamp, 60) == stamp
        before, after = LastRun(1.0), LastRun(2.0, token="settled")
        backend.claim_run("made after it", before, before, 60)
        eventually(lambda: backend.claim_run("made after it", before, after, 60) is None)
        backend.forget_run("made after it")

    def test_a_store_without_a_stamp_keeps_what_the_caller_saw_and_grants_nothing_yet(self, backend: Any) -> None:
        seen = LastRun(100.0, "web-1", 130.0, "first")
        assert backend.claim_run("entry", seen, LastRun(130.0, "web-2", 160.0, "mine"), 60) == seen
        assert backend.find_runs(["entry"]) == [seen]

    def test_what_a_store_did_not_know_is_nobodys_until_all_beats_had_time_to_tell_more(
        self, backend: Any, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(backend, "grace", 2 * PATIENCE)
        old, new = LastRun(100.0), LastRun(130.0, "a", 160.0, "1")
        assert backend.claim_run("entry", old, old, 60) == old  # from a beat that does not know of the run at 130
        assert backend.claim_run("entry", old, LastRun(131.0, token="2"), 60) == old
        assert backend.claim_run("entry", new, new, 60) is None  # from the beat that sent it
        assert backend.claim_run("entry", old, LastRun(131.0, token="2"), 60) == new
        assert backend.claim_run("entry", new, LastRun(160.0, token="2"), 60) == new
        monkeypatch.setattr(backend, "grace", 0.5)  # longer than from one question to the next: these do not prolong it
        backend.forget_run("entry")
        eventually(lambda: backend.claim_run("entry", new, LastRun(160.0, token="2"), 60) is None)

    def test_the_first_to_move_the_stamp_has_the_run_and_the_others_are_told_its_stamp(self, backend: Any) -> None:
        seen, first, second = LastRun(100.0), LastRun(130.0, "a", 160.0, "1"), LastRun(130.0, "b", 160.0, "2")
        self.know(backend, "entry", seen)
        assert backend.claim_run("entry", seen, first, 60) is None
        assert backend.claim_run("entry", seen, second, 60) == first
        assert backend.find_runs(["entry"]) == [first]

    def test_who_adopted_the_newer_stamp_may_claim_the_next_run(self, backend: Any) -> None:
        seen, first = LastRun(100.0), LastRun(130.0, token="1")
        self.know(backend, "entry", seen)
        backend.claim_run("entry", seen, first, 60)
        assert backend.claim_run("entry", first, LastRun(160.0, token="2"), 60) is None

    def test_a_claim_repeated_with_its_token_is_granted_again(self, backend: Any) -> None:
        seen = LastRun(100.0)
        self.know(backend, "entry", seen)
        assert backend.claim_run("entry", seen, LastRun(130.0, token="mine"), 60) is None
        assert backend.claim_run("entry", seen, LastRun(131.0, token="mine"), 60) is None
        assert backend.find_runs(["entry"])[0].at == 131.0

    def test_a_late_duplicate_of_a_claim_moves_nothing_back(self, backend: Any) -> None:
        seen = LastRun(100.0)
        self.know(backend, "entry", seen)
        backend.claim_run("entry", seen, LastRun(131.0, token="mine"), 60)
        backend.claim_run("entry", seen, LastRun(130.0, token="mine"), 60)
        assert backend.find_runs(["entry"])[0].at == 131.0

    def test_a_caller_who_knows_a_newer_run_tells_it_and_one_who_does_not_changes_nothing(self, backend: Any) -> None:
        old, new = LastRun(100.0, "a", 130.0, "1"), LastRun(130.0, "b", 160.0, "2")
        assert backend.claim_run("entry", old, old, 60) == old
        assert backend.claim_run("entry", new, new, 60) is None
        assert backend.claim_run("entry", old, old, 60) == new
        assert backend.find_runs(["entry"]) == [new]

    def test_what_a_stamp_tells_of_unsent_runs_is_kept(self, backend: Any) -> None:
        claimed = LastRun(100.5, "a", 130.0, "1", 0, (UnsentRun(100.0, "1"), UnsentRun(90.25, "other")))
        self.know(backend, "entry", claimed)
        assert backend.find_runs(["entry"]) == [claimed]
        marked = claimed.changed(claimed.unsent[1:])
        assert (marked.ran_at, marked.host, marked.next_at) == (100.5, "a", 130.0)
        assert backend.claim_run("entry", claimed, marked, 60) is None
        assert backend.find_runs(["entry"]) == [marked]
        assert dict(backend.runs()) == {"entry": marked}

    def test_of_two_who_change_a_stamp_one_does_and_the_other_is_told(self, backend: Any) -> None:
        """A beat marks its run as sent at the same moment at which another beat takes it over."""
        claimed = LastRun(100.0, "a", 130.0, "1", 0, (UnsentRun(100.0, "1"),))
        marked, taken = claimed.changed(()), claimed.changed((UnsentRun(100.0, "2"),))
        for first, second in ((marked, taken), (taken, marked)):
            entry = f"entry of {first.token}"
            self.know(backend, entry, claimed)
            assert backend.claim_run(entry, claimed, first, 60) is None
            assert backend.claim_run(entry, claimed, second, 60) == first
            assert backend.claim_run(entry, claimed, first, 60) is None  # repeated
            assert backend.find_runs([entry]) == [first]

    def test_who_changes_a_stamp_of_a_run_that_is_over_is_told_the_next_one(self, backend: Any) -> None:
        claimed = LastRun(100.0, "a", 130.0, "1", 0, (UnsentRun(100.0, "1"),))
        following = LastRun(130.0, "b", 160.0, "2", 0, (*claimed.unsent, UnsentRun(130.0, "2")))
        self.know(backend, "entry", claimed)
        assert backend.claim_run("entry", claimed, following, 60) is None
        assert backend.claim_run("entry", claimed, claimed.changed(()), 60) == following
        marked = following.changed(following.unsent[1:])
        assert backend.claim_run("entry", following, marked, 60) is None
        assert backend.find_runs(["entry"]) == [marked]

    def test_nobody_changes_what_a_store_did_not_know(self, backend: Any, monkeypatch: Any) -> None:
        """Because another beat may know that the run was taken over."""
        monkeypatch.setattr(backend, "grace", 2 * PATIENCE)
        claimed = LastRun(100.0, "a", 130.0, "1", 0, (UnsentRun(100.0, "1"),))
        assert backend.claim_run("entry", claimed, claimed.changed(()), 60) == claimed
        assert backend.claim_run("entry", claimed, claimed.changed(()), 60) == claimed
        monkeypatch.setattr(backend, "grace", 0.5)  # longer than from one question to the next: these do not prolong it
        backend.forget_run("entry")
        eventually(lambda: backend.claim_run("entry", claimed, claimed.changed(()), 60) is None)

    def test_times_are_exact_to_the_microsecond(self, backend: Any) -> None:
        seen = LastRun(1705305600.551894, token="1")
        self.know(backend, "entry", seen)
        assert backend.find_runs(["entry"]) == [seen]
        assert backend.claim_run("entry", LastRun(1705305600.551893), LastRun(1705305602.0, token="2"), 60) == seen
        assert backend.claim_run("entry", LastRun(1705305600.551894), LastRun(1705305602.0, token="2"), 60) is None

    def test_a_clock_that_is_far_ahead_of_the_stores_moves_nothing(self, backend: Any) -> None:
        """Otherwise the stamp would keep all other beats from running the entry until that time."""
        for seen in (None, LastRun(100.0)):
            if seen:
                self.know(backend, "entry", seen)
            wrong = LastRun(time.time() + backend.runs_ahead + 30, token="wrong")
            for known in (seen or wrong, wrong):
                with pytest.raises(ClockIsAhead):
                    backend.claim_run("entry", known, wrong, 60)
            assert backend.find_runs(["entry"]) == [seen]
        a_little = LastRun(time.time() + backend.runs_ahead - 30, token="a little")
        assert backend.claim_run("entry", LastRun(100.0), a_little, 60) is None

    def test_stamps_are_found_by_name_and_listed(self, backend: Any) -> None:
        names = ["a", "shop:nightly", "ä/ß", "a*b?[c]", "'quote\"", "new\nline"]
        last_runs = {name: LastRun(100.5 + number, "host", None, "t") for number, name in enumerate(names)}
        for name, run in last_runs.items():
            backend.claim_run(name, run, run, 60)
        assert backend.find_runs(["none", *names]) == [None, *last_runs.values()]
        assert backend.find_runs([]) == []
        assert dict(backend.runs()) == last_runs

    def test_a_stamp_that_is_forgotten_is_gone_and_its_entry_is_new(self, backend: Any, monkeypatch: Any) -> None:
        stamp = LastRun(100.0, "a", 130.0, "1")
        self.know(backend, "entry", stamp)
        self.know(backend, "other", stamp)
        assert backend.forget_run("entry") is True
        assert backend.forget_run("entry") is False
        assert backend.find_runs(["entry", "other"]) == [None, stamp]
        monkeypatch.setattr(backend, "grace", 60)
        seen = LastRun(50.0)
        assert backend.claim_run("entry", seen, LastRun(60.0, token="2"), 60) == seen
        assert backend.claim_run("entry", seen, LastRun(60.0, token="2"), 60) == seen

    def test_stamps_and_locks_know_nothing_of_each_other(self, backend: Any) -> None:
        stamp = LastRun(100.0)
        backend.claim_run("name", stamp, stamp, 60)
        assert locked_names(backend) == []
        mine = lock_request()
        assert isinstance(backend.acquire(mine, queue=False), Grant)
        assert [name for name, _ in backend.runs()] == ["name"]
        assert backend.release(mine) is True

    def test_a_stamp_is_kept_for_its_ttl(self, backend: Any) -> None:
        stamp = LastRun(100.0)
        backend.claim_run("long", stamp, stamp, 60)

        def is_kept() -> bool:  # a busy machine may come too late to see it
            backend.claim_run("short", stamp, stamp, 0.2)
            return bool(backend.find_runs(["short"]) == [stamp])

        eventually(is_kept)
        eventually(lambda: backend.find_runs(["short", "long"]) == [None, stamp])
        assert list(backend.runs()) == [("long", stamp)]

    def test_of_what_many_tell_at_once_a_store_that_knew_nothing_keeps_the_newest(self, backend: Any) -> None:
        entries, tellers = [f"entry {number}" for number in range(20)], 4
        start = threading.Barrier(tellers)

        def tell(number: int) -> None:
            for entry in entries:
                start.wait(10)
                stamp = LastRun(float(number), f"host {number}", None, f"{number}")
                backend.claim_run(entry, stamp, stamp, 60)

        in_threads(tellers, tell)
        assert [stamp.at for stamp in backend.find_runs(entries)] == [tellers - 1.0] * len(entries)

    def test_every_run_belongs_to_one_of_many_claimants(self, backend: Any) -> None:
        runs, claimants = 50, 8
        first = LastRun(0.0)
        self.know(backend, "entry", first)
        won = []

        def claim(number: int) -> None:
            seen = first
            while seen.at < runs:
                mine = LastRun(float(round(seen.at) + 1), f"host {number}", None, f"{number}/{seen.at}")
                standing = backend.claim_run("entry", seen, mine, 60)
                if standing is None:
                    won.append(mine.at)
                seen = standing or mine

        in_threads(claimants, claim)
        assert sorted(won) == [float(run) for run in range(1, runs + 1)]

    def test_every_unsent_run_is_taken_over_by_one_of_many(self, backend: Any) -> None:
        """Each acts like a beat: it tries again with the stamp that it got, until the run is gone or belongs to it."""
        runs, takers = 20, 6
        unsent = tuple(UnsentRun(float(number), f"dead {number}") for number in range(runs))
        first = LastRun(100.0, "dead", 130.0, "1", 0, unsent)
        self.know(backend, "entry", first)
        won = []

        def take(number: int) -> None:
            known = first
            while left := [one for one in known.unsent if one.token.startswith("dead")]:
                mine = UnsentRun(left[0].scheduled_at, f"taker {number}")
                run = known.changed(tuple(mine if one == left[0] else one for one in known.unsent))
                standing = backend.claim_run("entry", known, run, 60)
                if standing is None:
                    won.append(mine)
                known = standing or run

        in_threads(takers, take)
        assert sorted(one.scheduled_at for one in won) == [one.scheduled_at for one in unsent]
        [last] = backend.find_runs(["entry"])
        assert sorted(last.unsent) == sorted(won)
        assert (last.changes, last.ran_at) == (runs, 100.0)
