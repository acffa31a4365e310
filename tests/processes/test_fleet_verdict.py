"""The judge of the fleet tests: what it calls late, lost and wrong."""

from __future__ import annotations

import pytest

from tests.support.fleet.verdict import EVERYBODY, Claim, Faults, Rhythm, Sent, Verdict, judge

NOBODY = Faults({}, {})


def claim(at: float, by: str = "b1", entry: str = "e", moment: float | None = None) -> Claim:
    return Claim(entry, f"{entry} at {at} by {by}", by, at, at + 0.001 if moment is None else moment, at)


def sent(claim: Claim, at: float | None = None, number: int = 1) -> Sent:
    return Sent(
        claim.entry, f"{claim.token} #{number}", claim.token, 0.0, claim.by, claim.moment + 0.01 if at is None else at
    )


def judged(claims, sends=None, faults=NOBODY, kind="wall", period=2.0, begin=100.0, end=109.0):
    sends = [sent(one) for one in claims] if sends is None else sends
    return judge({"e": Rhythm(kind, period)}, ["b1", "b2"], claims, sends, faults, begin, end)


def each_two_seconds(*, but: tuple[float, ...] = ()) -> list[Claim]:
    return [claim(at) for at in (100.0, 102.0, 104.0, 106.0, 108.0) if at not in but]


@pytest.mark.parametrize("kind", ["wall", "every"])
def test_a_run_in_each_period_is_right(kind):
    verdict = judged(each_two_seconds(), kind=kind)
    assert verdict.figures() == {**Verdict().figures(), "claims": 5, "sends": 5}
    assert verdict.excused == 0


def test_a_message_that_was_seen_where_it_was_sent_and_where_it_ran_is_one():
    claims = each_two_seconds()
    assert judged(claims, [sent(one) for one in claims] * 2).figures()["sends"] == 5


@pytest.mark.parametrize("at", [106.5, 107.9])
@pytest.mark.parametrize("kind", ["wall", "every"])
def test_two_claims_of_one_run_are_wrong(at, kind):
    after = claim(108.0 if kind == "wall" else at + 2)
    [complaint] = judged([*each_two_seconds(but=(108.0,)), claim(at, "b2"), after], kind=kind, end=after.at).wrong
    assert complaint.startswith("claimed twice")


def test_two_messages_of_one_claim_are_wrong():
    claims = each_two_seconds()
    [complaint] = judged(claims, [*map(sent, claims), sent(claims[2], number=2)]).wrong
    assert complaint.startswith("sent 2 times")


def test_a_message_that_nobody_claimed_is_wrong():
    claims = each_two_seconds()
    [complaint] = judged(claims, [*map(sent, claims), sent(claim(105.0))]).wrong
    assert complaint.startswith("sent without a claim")


@pytest.mark.parametrize("kind", ["wall", "every"])
def test_a_run_that_nobody_claimed_is_wrong_unless_all_were_hindered(kind):
    claims = each_two_seconds(but=(104.0,))
    assert judged(claims, kind=kind).wrong[0].startswith("due at 104.00, claimed at 106.00")
    one = Faults({"b1": [(103.0, 107.0)]}, {})
    assert len(judged(claims, faults=one, kind=kind).wrong) == 1
    both = Faults({"b1": [(103.0, 105.0), (104.9, 107.0)], "b2": [(104.3, 105.8)]}, {})
    verdict = judged(claims, faults=both, kind=kind)
    assert (verdict.wrong, verdict.late_claims) == ([], 1)
    store = Faults({EVERYBODY: [(103.0, 105.8)]}, {})
    assert judged(claims, faults=store, kind=kind).late_claims == 1


def test_the_last_runs_are_not_forgotten():
    assert judged(each_two_seconds(but=(108.0,))).wrong[0].startswith("due at 108.00, claimed at 109.00")
    assert judged(each_two_seconds(), end=111.0).wrong[0].startswith("due at 110.00")


def test_an_entry_that_the_store_does_not_know_is_wrong():
    assert judged([], []).wrong == ["e is not known to the store"]


def test_an_entry_that_did_not_run_yet_counts_from_what_the_store_was_told():
    told = claim(99.0, by="")
    assert judged([told], [], period=60.0).figures()["wrong"] == 0
    assert judged([told], []).wrong[0].startswith("due at 100.00, claimed at 109.00")


def test_a_claim_without_a_message_is_wrong_unless_its_beat_was_ended_then():
    claims = each_two_seconds()
    messages = [sent(one) for one in claims if one.at != 104.0]
    assert judged(claims, messages).wrong[0].startswith("claimed and not sent")
    for ended, lost in ((104.05, 1), (103.9, 0), (105.0, 0)):
        died = Faults({"b1": [(ended, ended + 1)]}, {"b1": [ended]})
        assert judged(claims, messages, died).lost == lost
    stopped = Faults({"b1": [(104.01, 107.0), (107.0, 120.0)]}, {"b1": [107.0]})
    assert judged(claims, messages, stopped).lost == 1


def test_a_message_long_after_its_claim_is_wrong_unless_its_beat_was_stopped_then():
    claims = [*each_two_seconds(but=(104.0,)), late := claim(104.0, "b2")]
    messages = [sent(one, 107.0 if one is late else None) for one in claims]
    assert judged(claims, messages).wrong[0].startswith("sent 3.00 s after its claim")
    verdict = judged(claims, messages, Faults({"b2": [(104.01, 106.9)]}, {}))
    assert (verdict.wrong, verdict.late_sends) == ([], 1)


@pytest.mark.parametrize(("moment", "stopped", "unheard"), [(104.9, 107.0, 1), (104.9, 105.2, 0), (104.2, 107.0, 0)])
def test_a_claim_whose_answer_came_too_late_may_be_lost_to_the_next_one(moment, stopped, unheard):
    """But only if its beat was stopped until the next run was claimed: else it asks again, and has it."""
    claims = [*each_two_seconds(but=(104.0,)), lost := claim(104.0, moment=moment)]
    messages = [sent(one) for one in claims if one is not lost]
    verdict = judged(claims, messages, Faults({"b1": [(104.1, stopped)]}, {}))
    assert (verdict.unheard, len(verdict.wrong)) == (unheard, 1 - unheard)


def test_a_stamp_that_is_told_again_is_no_claim_and_one_that_moves_on_is_wrong():
    claims = each_two_seconds()
    messages = [sent(one) for one in claims]
    for at in (100.0, 104.0):
        assert judged([*claims, claim(at, by="", moment=105.0)], messages).wrong == []
    assert judged([*claims, claim(104.1, by="", moment=105.0)], messages).wrong[0].startswith("moved on without a run")


@pytest.mark.parametrize(
    ("emptied", "b1", "b2", "forgotten"),
    [
        ([104.01], [(104.02, 107.0)], [(103.9, 104.4)], 1),  # b2 did not hear of it
        ([104.01], [(104.02, 107.0)], [(104.02, 107.0)], 1),  # nor could it, in 10 ms
        ([], [(104.02, 107.0)], [(103.9, 104.4)], 0),
        ([103.0], [(104.02, 107.0)], [(103.9, 104.4)], 0),  # before
        ([104.01], [], [(103.9, 104.4)], 0),  # b1 could tell
        ([104.6], [(104.62, 107.0)], [], 0),  # b2 could: it heard of it before
    ],
)
def test_a_run_may_be_claimed_again_only_if_the_store_and_all_who_knew_forgot_it(emptied, b1, b2, forgotten):
    claims = [*each_two_seconds(but=(106.0, 108.0)), claim(105.8, "b2", moment=106.5), claim(106.0), claim(108.0)]
    faults = Faults({"b1": b1, "b2": b2}, {}, emptied)
    verdict = judged(claims, faults=faults)
    assert (verdict.forgotten, len(verdict.wrong)) == (forgotten, 1 - forgotten)


def test_a_beat_that_was_ended_remembers_nothing():
    claims = [*each_two_seconds(but=(106.0, 108.0)), claim(105.9, "b2"), claim(106.0), claim(108.0)]
    ended = Faults({"b1": [(104.2, 104.3)], "b2": [(103.9, 104.1)]}, {"b1": [104.2]}, [104.05])
    assert judged(claims, faults=ended).forgotten == 1


def test_an_entry_that_is_not_settled_is_late():
    claims = each_two_seconds(but=(104.0,))
    faults = Faults({}, {}, [103.0], {"e": [(103.1, 105.7)], "other": [(100.0, 110.0)]})
    assert judged(claims, faults=faults).late_claims == 1
    assert judged(claims, faults=Faults({}, {}, [103.0], {"other": [(100.0, 110.0)]})).wrong


def test_time_that_a_beat_or_the_servers_waited_for_a_processor_is_no_chance():
    late = [*each_two_seconds(but=(104.0, 106.0)), claim(104.9), claim(106.0)]
    busy = {who: [(103.0, 5.0), (104.0, 5.0), (105.0, 5.6), (109.0, 5.6)] for who in ("b1", "b2", "others")}
    for who in ([], ["others"], ["b1"]):
        assert judged(late, faults=Faults({}, {}, waited={name: busy[name] for name in who})).wrong
    for who in (["b1", "b2"], [EVERYBODY]):
        waited = dict.fromkeys(who, busy["b1"])
        assert judged(late, faults=Faults({}, {}, waited=waited)).late_claims == 1
    a_little = [(103.0, 5.0), (110.0, 5.6)]
    assert judged(late, faults=Faults({}, {}, waited={"b1": a_little, "b2": a_little})).wrong
