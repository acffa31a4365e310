"""An answer wakes all who wait for it, whenever they began to."""

from __future__ import annotations

import threading

import pytest

from django_distlock.utils.shared_answer import SharedAnswer
from django_distlock.utils.wakeup import WakeEvent
from tests.support.interrupts import at_each_point
from tests.support.tools import PATIENCE


def waiting_for(answer):
    event = WakeEvent()
    answer.notify(event)
    return event


def test_wakes_who_waits_and_who_comes_late():
    answer = SharedAnswer()
    early = [waiting_for(answer), waiting_for(answer)]
    assert not answer.is_there
    assert not early[0].wait(0)
    answer.find(lambda: 5)
    assert answer.is_there
    assert [event.wait(0) for event in (*early, waiting_for(answer))] == [True] * 3
    assert answer.result() == 5


def test_an_error_is_an_answer():
    answer = SharedAnswer()
    event = waiting_for(answer)
    answer.find(lambda: {}["key"])
    assert event.wait(0)
    for _ in range(2):
        with pytest.raises(KeyError, match="key"):
            answer.result()


def test_a_wait_that_is_interrupted_keeps_nobody_else_waiting():
    answers = {}

    def wait(name):
        answers[name] = answer = SharedAnswer()
        waiting_for(answer).wait(0)

    points = dict(at_each_point(wait, "utils/shared_answer.py", "utils/wakeup.py"))
    assert len(points) >= 5
    done = []

    def find():
        for answer in answers.values():
            event = waiting_for(answer)
            answer.find(lambda: 5)
            done.append(event.wait(0))

    thread = threading.Thread(target=find, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done == [True] * len(answers)
