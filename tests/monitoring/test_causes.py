"""What is said of recorded incidents, and of situations that were not recorded."""

from __future__ import annotations

import pytest
from django.utils import timezone, translation

from django_distlock.journal import NOT_RENEWED, RESPONSE, TRANSACTION, Event, JournalEntry
from django_distlock.monitoring import explain
from django_distlock.monitoring.causes import FORGOTTEN, causes
from django_distlock.monitoring.situation import HeldLease, Situation, Waiting, from_journal
from django_distlock.types import Holder
from tests.monitoring.incidents import HERE, read

NOW = 1_795_700_000.0

ORDER = "Take locks in one order everywhere, so that nobody waits for one while others wait for it."
SENTENCES = {
    "deadlock": (
        "Deadlock: invoices (pid 3235 on vm, MainThread) holds 'account:1' and waits for 'account:2'; refunds (pid"
        f" 3297 on vm, MainThread) holds 'account:2' and waits for 'account:1'. {ORDER}"
    ),
    "deadlock_without_a_journal": (
        "Possible deadlock: pid 23834 on vm holds 'account:1' and waits for 'account:2'; pid 23890 on vm holds"
        " 'account:2' and waits for 'account:1'. Whether it is the same thread or task that holds and waits is not"
        f" known. {ORDER}"
    ),
    "slow_reader": (
        "The view of GET __main__.report (pid 24357 on vm, MainThread) has returned, but its response is not finished:"
        " the lock has been kept for it for 2 s. Who reads it is slow, or away; RESPONSE_MAX_HOLD bounds that."
    ),
    "holder_stopped": (
        "pay (pid 27672 on vm, MainThread) has not renewed its lease for 2 s: its process is stopped or killed, or does"
        " not reach the store. The lock is free in 1 s unless it does."
    ),
    "holder_stopped_and_went_on": (
        "The lease of pay (pid 25523 on vm, MainThread) was not released: it had run out when ship (pid 25588 on vm,"
        " MainThread) got the lock at 15:35:19. The process was stopped or killed, or did not reach the store. It went"
        " on at 15:35:20, and learned then that the lease was over."
    ),
    "holder_killed": (
        "The lease of pay (pid 26303 on vm, MainThread) was not released: it had run out when ship (pid 26306 on vm,"
        " MainThread) got the lock at 15:35:26. The process was stopped or killed, or did not reach the store. Nothing"
        " was heard of it since."
    ),
    "failover": (
        "The store had lost its data by 15:35:30, as after a failover or a restart without persistence: 3 locks that it"
        " no longer knew were lost within 5 s, this one while pay order:42 (pid 26451 on vm, MainThread) held it."
    ),
    "task_delivered_again": (
        "work[9ee4fbf3-2431-4e78-9183-d2f0777c5d78] (pid 27835 on vm, Thread-2 (deliver)) waits for the task that holds"
        " the lock, and is a copy of it: the broker has delivered the message again while it runs. Give the broker a"
        " visibility timeout that is longer than the task."
    ),
    "starvation": (
        "rebuild index (pid 26695 on vm, MainThread) has held it for 3 s. Meanwhile 3 gave up waiting, the last one at"
        " 15:35:38 after 0 s: buy 3 (pid 26773 on vm, MainThread). Hold it for less, or let others wait for longer."
    ),
    "healthy_queue": None,
    "healthy_long_job": None,
}


@pytest.fixture(autouse=True)
def in_utc():
    with timezone.override("UTC"):
        yield


def test_each_incident_has_its_sentence():
    assert {path.stem for path in HERE.glob("*.json")} == {*SENTENCES}


@pytest.mark.parametrize("incident", SENTENCES)
def test_a_recorded_incident(incident):
    expected = SENTENCES[incident]
    assert [cause.sentence for cause in causes(read(incident))] == ([expected] if expected else [])


@pytest.mark.parametrize("incident", [name for name, sentence in SENTENCES.items() if sentence])
def test_incidents_are_told_in_the_language_of_the_reader_and_in_english_to_programs(incident):
    english = causes(read(incident))
    for language in ("de", "zh-hans"):
        with translation.override(language):
            told, data = causes(read(incident)), explain.as_data(read(incident))
            assert [*explain.lines(read(incident))]
        assert [cause.kind for cause in told] == [cause.kind for cause in english]
        assert all(one.sentence != other.sentence for one, other in zip(told, english, strict=True))
        assert data["causes"] == [cause._asdict() for cause in english]


def somebody(label="work", *, pid=1, host="web-1", thread="MainThread", message=""):
    return Holder(host, pid, thread, label, NOW, message)


def entry(event, ago, holder, name="a", lease="", **about):
    return JournalEntry(NOW - ago, event, name, lease or lease_of(holder), holder, **about)


def lease_of(holder):
    return f"lease-of-{holder.label}"


def waiting(holder, *behind, ago=2.0):
    """Of a thread, it is told which lease it has. Of a process, nothing is."""
    return Waiting(holder, NOW - ago, behind, (lease_of(holder),) if holder.thread else None)


def held(holder, ago=5.0, **about):
    return HeldLease(lease_of(holder), holder, NOW - ago, **about)


def kinds(situation):
    return [cause.kind for cause in causes(situation)]


ONE, OTHER = somebody("one"), somebody("other", pid=2)


class TestCircles:
    def situation(self, holders, queues):
        return Situation(
            "a", "default", NOW,
            leases={name: [held(holder)] for name, holder in holders.items()},
            queues={name: [waiting(holder) for holder in queue] for name, queue in queues.items()},
        )  # fmt: skip

    def test_of_three(self):
        third = somebody("third", pid=3)
        situation = self.situation({"a": ONE, "b": OTHER, "c": third}, {"b": [ONE], "c": [OTHER], "a": [third]})
        [cause] = causes(situation)
        assert cause.kind == "deadlock"
        assert [part.split(" ")[0] for part in cause.sentence.removeprefix("Deadlock: ").split("; ")] == [
            "one", "other", "third",
        ]  # fmt: skip

    def test_a_lock_that_rests_ends_the_chain(self):
        """Its holder has released it, whatever it waits for now."""
        situation = self.situation({"a": ONE, "b": OTHER}, {"b": [ONE], "a": [OTHER]})
        situation.leases = {**situation.leases, "b": [held(OTHER)._replace(resting=True)]}
        [cause] = causes(situation)
        assert cause.kind == "waits itself"
        assert "which other" not in cause.sentence
        situation.name = "b"
        assert causes(situation) == []

    def test_who_waits_for_a_moment_is_in_no_trouble(self):
        situation = self.situation({"a": ONE, "b": OTHER}, {"a": [OTHER]})
        for ago, expected in ((0.5, []), (2.0, ["deadlock"])):
            situation.queues = {**situation.queues, "b": [waiting(ONE, ago=ago)]}
            assert kinds(situation) == expected

    @pytest.mark.parametrize(("third_waits_for", "expected"), [("c", ["waits itself"] * 2), ("b", ["deadlock"] * 2)])
    def test_of_a_lock_with_slots_all_holders_must_wait(self, third_waits_for, expected):
        """One that goes on makes room."""
        third, fourth = somebody("third", pid=3), somebody("fourth", pid=4)
        queues = {"b": [ONE], "c": [], "a": [OTHER]}
        queues[third_waits_for].append(third)
        situation = self.situation({"b": OTHER, "c": fourth}, queues)
        situation.leases = {**situation.leases, "a": [held(ONE), held(third)]}
        assert kinds(situation) == expected

    def test_one_that_is_certain_goes_before_others(self):
        """Its process may wait for a third one, whose process may wait for it."""
        third = somebody("third", pid=3)
        situation = self.situation({"a": ONE, "b": OTHER, "c": third}, {"b": [ONE], "a": [OTHER]})
        first, last = (waiting(one._replace(thread="")) for one in (ONE, third))
        situation.queues = {"c": [first], "a": [last, waiting(OTHER)], "b": [waiting(ONE)]}
        assert kinds(situation) == ["deadlock"]

    def test_of_many_ways_each_step_is_looked_at_once(self):
        """Each process may wait for the locks of all after it: there are 2 to the power of 40 ways, and no circle."""
        holders = [somebody(str(number), pid=number) for number in range(40)]
        queues = {str(number): [one._replace(thread="") for one in holders[:number]] for number in range(40)}
        situation = self.situation({str(number): one for number, one in enumerate(holders)}, queues)
        situation.name = "0"
        assert kinds(situation) == ["waits itself"]

    def test_behind_the_holder(self):
        """The holder waits for one of two that wait for each other."""
        third = somebody("third", pid=3)
        situation = self.situation({"a": ONE, "b": OTHER, "c": third}, {"b": [ONE, third], "c": [OTHER]})
        [cause] = causes(situation)
        assert cause.kind == "deadlock"
        assert "'a'" not in cause.sentence

    def test_a_holder_that_waits_itself(self):
        [cause] = causes(self.situation({"a": ONE, "b": OTHER}, {"b": [ONE], "a": []}))
        assert cause.kind == "waits itself"
        assert cause.sentence == (
            "Its holder waits itself, for 'b', which other (pid 2 on web-1, MainThread) holds. Explain that lock."
        )

    def test_other_threads_of_the_holders_are_no_circle(self):
        queues = {"b": [somebody("1", thread="Thread-1")], "a": [somebody("2", pid=2, thread="Thread-1")]}
        assert kinds(self.situation({"a": ONE, "b": OTHER}, queues)) == []

    def test_of_processes(self):
        queues = {"b": [ONE._replace(thread="", label="")], "a": [OTHER._replace(thread="", label="")]}
        assert kinds(self.situation({"a": ONE, "b": OTHER}, queues)) == ["possible deadlock"]

    @pytest.mark.parametrize(("has", "expected"), [(None, ["possible deadlock"]), ((), []), (("another",), [])])
    def test_a_name_that_several_threads_or_tasks_have_is_not_enough(self, has, expected):
        situation = self.situation({"a": ONE, "b": OTHER}, {"a": [OTHER]})
        situation.queues = {**situation.queues, "b": [waiting(ONE)._replace(has=has)]}
        assert kinds(situation) == expected

    def test_what_an_open_response_keeps_its_thread_has_left(self):
        situation = self.situation({"a": ONE, "b": OTHER}, {"b": [ONE], "a": [OTHER]})
        situation.leases = {**situation.leases, "b": [held(OTHER, kept=RESPONSE, kept_since=NOW)]}
        assert kinds(situation) == ["possible deadlock"]

    def test_a_process_may_wait_for_what_another_thread_of_it_holds(self):
        assert kinds(self.situation({"a": ONE}, {"a": [ONE._replace(thread="", label="")]})) == []

    def test_one_that_stands_behind_another_of_its_process_waits(self):
        situation = self.situation({"a": ONE, "b": OTHER}, {"a": [OTHER]})
        first = waiting(somebody("first", thread="Thread-1"), waiting(ONE))
        situation.queues = {**situation.queues, "b": [first]}
        assert kinds(situation) == ["deadlock"]

    def test_of_the_past(self):
        told = [
            entry(Event.GRANTED, 9, ONE, "a"), entry(Event.GRANTED, 9, OTHER, "b"),
            entry(Event.WAITS, 8, ONE, "b", seconds=30, text=lease_of(ONE)),
            entry(Event.WAITS, 8, OTHER, "a", seconds=30, text=f"further {lease_of(OTHER)}"),
            entry(Event.TIMED_OUT, 2, ONE, "b"),
        ]  # fmt: skip
        assert kinds(from_journal(told, "a", "default", NOW - 5, None)) == ["deadlock"]
        assert "deadlock" not in kinds(from_journal(told, "a", "default", NOW - 1, None))


class TestLeases:
    def situation(self, lease, entries=(), **about):
        return Situation("a", "default", NOW, leases={"a": [lease]}, entries=entries, **about)

    @pytest.mark.parametrize(("remaining", "expected"), [(14.0, ["holder stopped"]), (20.0, [])])
    def test_a_lease_that_is_not_renewed(self, remaining, expected):
        assert kinds(self.situation(held(ONE, ttl=30.0, remaining=remaining))) == expected

    def test_a_lease_that_is_never_renewed_runs_out(self):
        told = [entry(Event.GRANTED, 25, ONE, ttl=30.0, text=NOT_RENEWED)]
        [lease] = from_journal(told, "a", "default", NOW, None).held
        assert lease.ttl is None
        assert kinds(self.situation(lease._replace(remaining=5.0))) == []

    @pytest.mark.parametrize(("kept", "expected"), [(TRANSACTION, "open transaction"), (RESPONSE, "open response")])
    def test_what_keeps_it(self, kept, expected):
        assert kinds(self.situation(held(ONE, kept=kept, kept_since=NOW - 3))) == [expected]

    def test_what_keeps_it_for_a_moment_is_worth_a_word_where_somebody_waits(self):
        situation = self.situation(held(ONE, kept=TRANSACTION, kept_since=NOW - 0.5))
        assert kinds(situation) == []
        assert ", kept for its transaction. " in explain.holders(situation)[0]
        situation.queues = {"a": [waiting(OTHER, ago=0.1)]}
        assert kinds(situation) == ["open transaction"]

    def test_longer_than_long_held(self):
        [cause] = causes(self.situation(held(ONE, ago=7300.0), long_held=3600.0))
        assert cause.sentence == (
            "one (pid 1 on web-1, MainThread) has held it for 2 h 01 min, longer than LONG_HELD (1 h 00 min)."
        )

    def test_who_gave_up_before_it_was_granted_does_not_count(self):
        told = [entry(Event.TIMED_OUT, 9, OTHER, seconds=10.0)]
        assert kinds(self.situation(held(ONE, ago=5.0), told)) == []

    @pytest.mark.parametrize(("seconds", "expected"), [(1.0, ["long hold"]), (10.0, [])])
    def test_who_waited_for_others_before_it_gives_up_for_a_long_queue(self, seconds, expected):
        told = [entry(Event.TIMED_OUT, 3, OTHER, seconds=seconds)]
        assert kinds(self.situation(held(ONE, ago=5.0), told)) == expected

    def test_a_copy_that_gave_up(self):
        holder, copy = somebody("one", message="m"), somebody("copy", pid=2, message="m")
        told = [entry(Event.TIMED_OUT, 1, copy, seconds=1.0)]
        assert kinds(self.situation(held(holder), told)) == ["task delivered again", "long hold"]


class TestPast:
    """What the journal tells of leases that are over."""

    def kinds(self, *entries):
        return kinds(from_journal(sorted(entries, key=lambda one: one.at), "a", "default", NOW, None))

    def test_a_release_is_an_end(self):
        assert self.kinds(
            entry(Event.GRANTED, 9, ONE), entry(Event.RELEASED, 6, ONE), entry(Event.GRANTED, 5, OTHER)
        ) == []  # fmt: skip

    def test_a_host_whose_clock_is_ahead(self):
        assert self.kinds(
            entry(Event.GRANTED, 9, ONE), entry(Event.GRANTED, 5, OTHER), entry(Event.RELEASED, 4.9, ONE)
        ) == []  # fmt: skip

    def test_a_process_that_noted_more_than_it_could_write(self):
        assert self.kinds(
            entry(Event.GRANTED, 9, ONE), entry(Event.GRANTED, 5, OTHER), entry(Event.GRANTED, 4, ONE, "b")
        ) == []  # fmt: skip

    def test_what_was_noted_just_now_may_be_there_in_part(self):
        """Each process writes what it has noted at a time of its own."""
        told = [entry(Event.GRANTED, 9, ONE), entry(Event.GRANTED, 0.5, OTHER)]
        assert self.kinds(*told) == []
        assert kinds(from_journal(told, "a", "default", NOW + 1, None)) == ["lease ran out"]
        lost = [entry(Event.GRANTED, 9, ONE), entry(Event.LOST, 0.5, ONE, text=FORGOTTEN)]
        assert self.kinds(*lost) == []
        assert kinds(from_journal(lost, "a", "default", NOW + 1, None)) == ["store lost data"]

    def test_of_the_past_more_is_told(self):
        told = [entry(Event.GRANTED, 9, ONE), entry(Event.GRANTED, 5.5, OTHER), entry(Event.GRANTED, 1, OTHER, "b")]
        assert kinds(from_journal(told, "a", "default", NOW - 5, None)) == ["lease ran out"]

    @pytest.mark.parametrize("event", [Event.BOUND_REACHED, Event.DETACHED])
    def test_a_lease_that_is_renewed_no_more_is_to_run_out(self, event):
        told = entry(Event.GRANTED, 9, ONE), entry(event, 8, ONE), entry(Event.GRANTED, 5, OTHER)
        assert self.kinds(*told) == []

    def test_a_lease_that_is_never_renewed_is_to_run_out(self):
        assert self.kinds(entry(Event.GRANTED, 9, ONE, text=NOT_RENEWED), entry(Event.GRANTED, 5, OTHER)) == []

    def test_a_lease_that_another_process_goes_on_with(self):
        told = [
            entry(Event.GRANTED, 9, ONE, lease="1"), entry(Event.DETACHED, 8, ONE, lease="1"),
            entry(Event.ADOPTED, 7, OTHER, lease="1"),
        ]  # fmt: skip
        situation = from_journal(told, "a", "default", NOW, None)
        assert [lease.holder for lease in situation.held] == [OTHER]
        third = entry(Event.GRANTED, 2, somebody("third", pid=3))
        assert self.kinds(*told, entry(Event.RELEASED, 3, OTHER, lease="1"), third) == []
        assert self.kinds(*told, third) == ["lease ran out"]

    def test_of_several_slots_no_lease_is_said_to_have_run_out(self):
        one, other = ONE._replace(slots=2), OTHER._replace(slots=2)
        told = [entry(Event.GRANTED, 9, one), entry(Event.GRANTED, 5, other), entry(Event.RELEASED, 4, other)]
        assert self.kinds(*told) == []
        assert [lease.holder for lease in from_journal(told, "a", "default", NOW - 4.5, None).held] == [one, other]
        assert [lease.holder for lease in from_journal(told, "a", "default", NOW, None).held] == [one]
        assert self.kinds(*told, entry(Event.GRANTED, 2, somebody("third", pid=3))) == ["lease ran out"]

    def test_a_key_that_was_deleted(self):
        reason = "the store no longer knows it: its data was lost, or somebody freed the lock"
        assert self.kinds(entry(Event.GRANTED, 9, ONE), entry(Event.LOST, 5, ONE, text=reason)) == ["store lost data"]

    def test_a_release_by_force_is_no_loss_of_data(self):
        reason = "the store no longer knows it: its data was lost, or somebody freed the lock"
        told = entry(Event.GRANTED, 9, ONE), entry(Event.FREED, 6, ONE), entry(Event.LOST, 5, ONE, text=reason)
        assert self.kinds(*told) == []

    def test_what_is_long_ago_tells_nothing(self):
        told = entry(Event.GRANTED, 2000, ONE), entry(Event.GRANTED, 1000, OTHER), entry(Event.RELEASED, 900, OTHER)
        assert self.kinds(*told) == []
