"""Programs that are forked end as those that an interpreter was started for, and know nothing of each other."""

from __future__ import annotations

import signal
import socket
import subprocess

import pytest

from tests.support import forkserver
from tests.support.programs import in_a_fork

ENDS = {
    "returns": "print('done')",
    "exits": "import sys; sys.exit(3)",
    "exits with a large number": "import sys; sys.exit(300)",
    "exits with a bool": "import sys; sys.exit(True)",
    "exits with nothing": "raise SystemExit",
    "exits with a text": "import sys; sys.exit('bye')",
    "closes its output": "import sys; sys.stdout.close()",
    "is interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "forks": "import os, sys\nif not os.fork():\n    sys.exit(4)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
    "has work left": """
import atexit, threading, time
class Told:
    def __del__(self):
        print("finalized")
told = Told()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
""",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_one_that(code):
    forked, started = (forkserver.run(["-c", code], like=like, timeout=60, check=False) for like in ("django", None))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_one_that_fails_tells_of_it():
    done = forkserver.run(["-c", "1 / 0"], timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_one_that_runs_has_no_status_until_it_is_killed():
    with forkserver.Program(["-c", "import time; time.sleep(60)"]) as program:
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.kill()
        assert program.wait(60) == program.poll() == -signal.SIGKILL


def test_processes_that_are_forked_have_the_server_in_common():
    parent = "import os; print(os.getppid())"
    mine = forkserver.run(["-c", parent], timeout=60).stdout
    assert mine == f"{forkserver.server('django').process.pid}\n"
    assert in_a_fork(lambda: forkserver.run(["-c", parent], timeout=60).stdout) == mine


def test_one_has_no_files_of_another():
    """What it would keep open would not end with the other."""
    files = "import os; print(len(os.listdir('/proc/self/fd')))"
    alone = forkserver.run(["-c", files], timeout=60).stdout
    with forkserver.Program(["-c", "input()"], stdin=subprocess.PIPE) as other:
        assert forkserver.run(["-c", files], timeout=60).stdout == alone
        other.kill()


def test_who_ends_before_it_has_said_what_it_wants_leaves_others_alone(monkeypatch):
    def fail(*_):
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendall", fail, raising=False)
        with pytest.raises(ConnectionError):
            forkserver.run(["-c", "pass"], timeout=60)
    assert forkserver.run(["-c", "print(1)"], timeout=60).stdout == "1\n"
