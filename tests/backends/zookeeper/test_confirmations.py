"""Until when a session lasts for certain."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from django_distlock.backends.zookeeper.confirmations import RESOLUTION, Confirmations, ZooKeeperSession
from django_distlock.utils.clock import clock, safe_deadline

TIMEOUT = 8.0  # so a later request counts for one that was sent 2 s before, or more


def confirmations(*moments):
    """Of requests that were sent and answered then; one moment stands for both."""
    made = Confirmations(TIMEOUT)
    for moment in moments:
        made.answered(*(moment if isinstance(moment, tuple) else (moment, moment)))
    return made


def test_nothing_is_known_before_anything_is_answered():
    assert confirmations().until == -inf


def test_one_answer_says_nothing_of_what_the_leader_heard():
    """The follower that gave it may have been cut off since, without a ping to the leader."""
    assert confirmations(100.0).until == -inf


def test_the_last_but_one_counts_from_when_it_was_sent():
    assert confirmations((100.0, 100.5), 103.0).until == safe_deadline(100.0, TIMEOUT)
    assert confirmations((100.0, 100.5), (103.0, 103.5), 106.0).until == safe_deadline(103.0, TIMEOUT)


def test_one_that_was_answered_shortly_before_does_not_count():
    assert confirmations(100.0, 101.9).until == -inf
    assert confirmations(100.0, 101.9, 102.1).until == safe_deadline(100.0, TIMEOUT)
    assert confirmations(100.0, 101.0, 103.1).until == safe_deadline(101.0, TIMEOUT)


def test_of_two_that_came_together_the_first_does_not_count():
    """They were held up on their way to a follower, which was cut off when it had passed on the second."""
    assert confirmations((100.0, 103.2), (103.0, 103.2)).until == -inf
    assert confirmations((100.0, 103.2), (103.0, 103.2), 105.2).until == safe_deadline(100.0, TIMEOUT)


def test_a_connection_counts_from_when_it_was_begun():
    """Its server has asked the leader, before it answered."""
    made = confirmations(100.0, 103.0)
    made.connected(104.0)
    assert made.until == safe_deadline(104.0, TIMEOUT)
    made.connected(99.0)
    assert made.until == safe_deadline(104.0, TIMEOUT)


requests = st.lists(
    st.tuples(st.floats(0, 1000), st.floats(0, 5)).map(lambda one: (one[0], one[0] + one[1])), max_size=60
)


@given(requests)
def test_it_never_says_too_much(moments):
    """In whatever order answers come, as those to several threads do."""
    made = confirmations(*moments)
    assert made.until <= safe_deadline(latest_proven(moments), TIMEOUT)


@given(st.lists(st.floats(0, 1000), max_size=60).map(sorted))
def test_it_says_what_is_proven_but_for_a_little(moments):
    made = confirmations(*moments)
    proven = latest_proven([(moment, moment) for moment in moments])
    assert made.until >= safe_deadline(proven, TIMEOUT) - made.spacing / RESOLUTION - 1e-9


def latest_proven(moments):
    proven = (
        sent_at for sent_at, answered_at in moments if any(answered_at <= other - TIMEOUT / 4 for other, _ in moments)
    )
    return max(proven, default=-inf)


def test_a_session_that_is_over_holds_nothing():
    session = ZooKeeperSession(1, TIMEOUT)
    session.connected(clock(), TIMEOUT)
    assert clock() < session.until
    assert not session.is_about_to_end
    session.is_over = True
    session.connected(clock(), TIMEOUT)
    assert session.until == -inf
    assert session.is_about_to_end


def test_another_server_may_agree_to_less():
    """From then on the leader keeps the session for that."""
    session = ZooKeeperSession(1, TIMEOUT)
    session.connected(100.0, TIMEOUT)
    session.connected(101.0, TIMEOUT / 2)
    assert session.confirmed_until == safe_deadline(101.0, TIMEOUT / 2)
    assert session.timeout == TIMEOUT / 2
    session.connected(102.0, TIMEOUT)
    assert session.timeout == TIMEOUT / 2
