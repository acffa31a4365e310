"""``manage.py runlocked`` in a real terminal, where Ctrl-C goes to it and to its program at the same time."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time

import pytest

from tests.support.admin_pages import hold
from tests.support.terminal import PYTHON
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.once]

# Tells each signal, as soon as it comes, and ends a while after the first one.
TELLING = """
import os, signal, socket, sys
told, tell = socket.socketpair()
tell.setblocking(False)
signal.set_wakeup_fd(tell.fileno())
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
os.write(1, b"<up>")
first = told.recv(1)
told.settimeout(0.5)
number = first
try:
    while number:
        os.write(1, b"<%s>" % signal.Signals(number[0]).name.encode())
        number = told.recv(1)
except TimeoutError:
    sys.exit(40 + first[0])
"""
DEAF = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("<up>", flush=True)
input()
sys.exit(7)
"""


def runlocked(*arguments: str) -> list[str]:
    return [PYTHON, "example_project/manage.py", "runlocked", "backup", *arguments]


@pytest.mark.parametrize(("key", "number"), [("C", signal.SIGINT), ("\\", signal.SIGQUIT)])
def test_the_program_gets_the_signal_of_a_key_once(terminal, valkey_locks, key, number):
    terminal.start(*runlocked("--", PYTHON, "-c", TELLING))
    eventually(lambda: terminal.shows("<up>"))
    assert valkey_locks.look(["backup"]) != [[]]
    # Stopped, so that two signals would be two: of equal ones that wait to be delivered a process gets one.
    terminal.process.send_signal(signal.SIGSTOP)
    terminal.press(key)
    eventually(lambda: terminal.shows(f"<{number.name}>"))
    terminal.process.send_signal(signal.SIGCONT)
    assert terminal.ended() == 40 + number
    assert re.findall(r"<(\w+)>", terminal.text) == ["up", number.name]
    assert "Traceback" not in terminal.text
    assert valkey_locks.look(["backup"]) == [[]]


def test_a_program_that_does_not_mind_ctrl_c_goes_on_under_the_lock(terminal, valkey_locks):
    terminal.start(*runlocked("--", PYTHON, "-c", DEAF))
    eventually(lambda: terminal.shows("<up>"))
    terminal.press("C")
    eventually(lambda: terminal.shows("^C"))
    time.sleep(0.3)
    assert terminal.process.poll() is None
    assert valkey_locks.look(["backup"]) != [[]]
    terminal.type("go on")  # the program reads from the terminal, as without a lock
    assert terminal.ended() == 7
    assert valkey_locks.look(["backup"]) == [[]]


def test_a_program_that_ctrl_c_ends(terminal, valkey_locks):
    terminal.start(*runlocked("--", "sh", "-c", "echo '<up>'; exec sleep 60"))
    eventually(lambda: terminal.shows("<up>"))
    terminal.press("C")
    assert terminal.ended() == 128 + signal.SIGINT
    assert "sh was ended by SIGINT" in terminal.text
    assert valkey_locks.look(["backup"]) == [[]]


def test_other_signals_are_passed_on_there_too(terminal, valkey_locks):
    terminal.start(*runlocked("--", PYTHON, "-c", TELLING))
    eventually(lambda: terminal.shows("<up>"))
    terminal.process.terminate()
    assert terminal.ended() == 40 + signal.SIGTERM
    assert re.findall(r"<(\w+)>", terminal.text) == ["up", "SIGTERM"]


def test_ctrl_c_while_it_waits_leaves_nothing_behind(terminal, valkey_locks, store):
    hold(valkey_locks, "backup")
    terminal.start(*runlocked("--wait", "60", "--", "echo", "ran"))
    eventually(lambda: store.exists("lock|q:backup"))
    terminal.press("C")
    assert terminal.ended() == 128 + signal.SIGINT
    assert "Traceback" not in terminal.text
    assert "ran" not in terminal.text
    assert not store.exists("lock|q:backup")


def test_in_the_background_of_a_shell_ctrl_c_is_not_meant_for_it(terminal, valkey_locks):
    """And a signal that is sent to it goes on to its program, because no key has sent it there."""
    script = f'set -m; {shlex.join(runlocked("--", PYTHON, "-c", TELLING))} & wait $!; echo "<code $?>"'
    terminal.start("bash", "-c", script)
    eventually(lambda: terminal.shows("<up>"))
    [[info]] = valkey_locks.look(["backup"])
    os.kill(info.holder.pid, signal.SIGINT)
    eventually(lambda: terminal.shows("<code "))
    assert terminal.ended() == 0
    assert terminal.text.count("<SIGINT>") == 1
    assert f"<code {40 + signal.SIGINT}>" in terminal.text
    assert valkey_locks.look(["backup"]) == [[]]
