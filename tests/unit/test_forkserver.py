"""Programs that are forked end as those that an interpreter was started for."""

from __future__ import annotations

import pytest

from tests.support import forkserver

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
