"""Questions that are asked at the same time: in which context, and what becomes of errors and interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from contextvars import ContextVar

import pytest
from django.utils import translation

from django_distlock.utils.parallel import ask_in_parallel
from tests.support.tools import PATIENCE


def test_questions_are_asked_in_the_context_of_who_asks():
    variable = ContextVar("variable")
    variable.set("mine")
    with translation.override("de"):
        answers = ask_in_parallel({number: lambda: (variable.get(), translation.get_language()) for number in range(3)})
    assert answers == dict.fromkeys(range(3), ("mine", "de"))


def test_they_are_asked_at_the_same_time_and_answered_by_their_keys():
    all_there = threading.Barrier(3)
    answers = ask_in_parallel({number: lambda number=number: (all_there.wait(10), number)[1] for number in range(3)})
    assert answers == {0: 0, 1: 1, 2: 2}


def test_a_single_question_needs_no_thread():
    assert ask_in_parallel({"only": threading.current_thread}) == {"only": threading.current_thread()}
    assert ask_in_parallel({}) == {}


def test_a_mistake_is_raised_where_it_was_asked_for():
    with pytest.raises(ZeroDivisionError):
        ask_in_parallel({"right": lambda: 1, "wrong": lambda: 1 / 0})


ASKING = """
import os
import time
import django
from django.conf import settings
settings.configure()
django.setup()
from django_distlock.utils.parallel import ask_in_parallel
def hang():
    os.write(1, b"asked\\n")  # a lock of print() may be held when the interpreter ends
    time.sleep(600)
ask_in_parallel({"first": lambda: time.sleep(600), "last": hang})
"""


def test_ctrl_c_does_not_wait_for_who_hangs():
    process = subprocess.Popen(
        [sys.executable, "-c", ASKING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE / 2)
    if process.poll() is None:  # Python ignores an interrupt that strikes in a finalizer
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=2 * PATIENCE)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode == -signal.SIGINT
