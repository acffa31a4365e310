"""Locks among real processes: killed, stopped, forked, exiting."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from django.db import connections

from django_distlock import LockNotHeld, lock, locks
from tests.support.forkserver import Program, end_all
from tests.support.programs import PROLOGUE, heard
from tests.support.tools import ALLOWANCE, PATIENCE, backend_on, eventually

pytestmark = pytest.mark.seconds(3)

HOLDS_A_SLOT = """
import json, sys, time
import django
from django.conf import settings
from tests.support.mysql_driver import is_driver_there
is_driver_there()
settings.configure(INSTALLED_APPS=["django_distlock"], **json.loads(sys.argv[1]))
django.setup()
from django_distlock import lock
lock("name", slots=3, ttl=6).acquire()
print("held", flush=True)
time.sleep(60)
"""

shared = backend_on("redis", "cluster", "postgres", "mariadb", "sqlite")


def test_three_that_have_a_slot_each_and_are_killed_block_others_for_their_ttl_at_most(shared, settings):
    """S7, on each store that processes share."""
    databases, location = {"default": {}}, settings.DISTRIBUTED_LOCKS["default"]["LOCATION"]
    if location in list(connections.settings):
        known = connections.settings[location]
        databases[location] = {key: known[key] for key in ("ENGINE", "NAME", "USER", "HOST")}
    about = json.dumps({"DATABASES": databases, "DISTRIBUTED_LOCKS": settings.DISTRIBUTED_LOCKS})
    arguments = ["-W", "error", "-c", HOLDS_A_SLOT, about]
    holders = [Program(arguments, like="django", stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        assert [heard(holder) for holder in holders] == ["held"] * 3
        time.sleep(2.5)  # renewed meanwhile
        assert lock("name", slots=3).usage().held == 3
    finally:
        end_all(holders)
    killed = time.monotonic()
    with ExitStack() as stack:
        slots = [stack.enter_context(lock("name", slots=3, ttl=60, wait=PATIENCE)).slot for _ in range(3)]
        assert time.monotonic() - killed < 6 + 2 + ALLOWANCE
        assert sorted(slots) == [1, 2, 3]


class TestEndOfAHolder:
    def test_killed_it_blocks_others_for_its_ttl_at_most(self, program):
        """S7."""
        holder = program("lock('name').acquire(); say('held'); time.sleep(60)")
        assert heard(holder) == "held"
        time.sleep(1)  # renewed meanwhile
        holder.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with lock("name", wait=PATIENCE):
            assert time.monotonic() - killed < 2 + 1 + ALLOWANCE

    @pytest.mark.parametrize(
        "end",
        [
            "pass",
            "sys.exit(3)",
            "import signal; signal.signal(15, lambda *_: sys.exit(0)); os.kill(os.getpid(), 15)",
        ],
    )
    def test_exiting_normally_it_frees_what_it_holds(self, program, end):
        holder = program(f"mutex = lock('name', ttl=60); mutex.acquire(); say('held'); {end}", like=None)
        assert heard(holder) == "held"
        holder.wait(PATIENCE)
        assert not lock("name").locked()

    def test_exiting_it_leaves_the_rest_of_min_hold(self, program):
        holder = program("mutex = lock('name', ttl=60, min_hold=30); mutex.acquire(); say('held')", like=None)
        assert heard(holder) == "held"
        holder.wait(PATIENCE)
        [info] = locks["default"].held()
        assert info.resting
        assert 20 < info.remaining <= 30

    @pytest.mark.parametrize("way", ["thread", "task"])
    def test_exiting_it_frees_nothing_under_which_a_thread_still_works(self, program, way):
        """Daemon threads run on while others do something at the exit."""
        work = {
            "thread": "def work():\n    with lock('name', ttl=6) as lease: use(lease)\n",
            "task": "async def main():\n    async with lock('name', ttl=6) as lease: use(lease)\n"
            "def work(): asyncio.run(main())\n",
        }[way]
        holder = program(
            "import asyncio, threading\n"
            "def use(lease):\n    leases.append(lease); held.set(); time.sleep(60)\n"
            "from tests.support.leases import wait_for_renewal\n"
            "def later():\n    wait_for_renewal(leases[0]); say(leases[0].state, lock('name').locked())\n"
            f"{work}"
            "leases, held = [], threading.Event()\n"
            "threading.Thread(target=work, daemon=True).start(); held.wait()\n",
            first="import atexit; atexit.register(lambda: later())\n",  # before ours, so called after it
        )
        assert heard(holder) == "held True"
        holder.wait(PATIENCE)
        eventually(lambda: not lock("name").locked(), 60)

    @pytest.mark.parametrize("who", ["thread", "task", "left"])
    def test_exiting_it_frees_what_nobody_works_under_any_more(self, program, who):
        holder = program(
            "import asyncio, threading\n"
            "kept = []\n"
            "def work():\n    kept.append(lock('name', ttl=60)); kept[0].acquire()\n"
            "async def awork():\n    kept.append(lock('name', ttl=60)); await kept[0].aacquire()\n"
            + {
                "thread": "thread = threading.Thread(target=work); thread.start(); thread.join()",
                "task": "asyncio.run(awork())",
                "left": "threading.Thread(target=lambda: (asyncio.run(awork()), time.sleep(60)), daemon=True).start()\n"
                "while not kept or not kept[0].locked(): time.sleep(0.01)\n"
                "time.sleep(0.3)",
            }[who],
            like=None,
        )
        holder.wait(60)
        assert not lock("name").locked()

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    @pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
    def test_children_of_multiprocessing_free_what_they_hold(self, valkey_locks, valkey, method):
        child = multiprocessing.get_context(method).Process(target=hold_and_return, args=(valkey.url,))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert not lock("name").locked()

    def test_exiting_it_says_nothing(self, program):
        holder = program(
            "import threading; mutex = lock('name'); mutex.acquire()\n"
            "waiter = threading.Thread(target=lock('name', wait=0.1).acquire); waiter.start(); waiter.join()\n"
            "locks.close()",
            like=None,
            stderr=subprocess.PIPE,
        )
        assert holder.stderr.read() == ""
        assert holder.wait(60) == 0

    def test_exiting_it_leaves_the_queues(self, program, valkey_locks, store):
        with lock("name"):
            waiter = program(
                "import threading\n"
                "from django_distlock.backends.common.timing import Timing; Timing.look_interval = 60\n"
                "threading.Thread(target=lock('name', wait=60).acquire, daemon=True).start()\n"
                "while not locks.service('default').queue.queued(): time.sleep(0.01)\n"
                "time.sleep(0.3); say('queued')\n",
                like=None,
            )
            assert heard(waiter) == "queued"
            waiter.wait(60)
            assert not store.exists("lock|q:name")

    @pytest.mark.skipif(sys.version_info >= (3, 12), reason="the module that makes subinterpreters is another one")
    def test_in_a_subinterpreter_it_leaves_no_thread_behind(self, program):
        """As under mod_wsgi. A thread that is there at the end of a subinterpreter aborts the process."""
        inside = (
            "from django.conf import settings\n"
            "settings.configure(DISTRIBUTED_LOCKS={locks!r})\n"
            "import threading\n"
            "from django_distlock import lock\n"
            "first = lock('name'); first.acquire(); timer = threading.Timer(0.3, first.release); timer.start()\n"
            "second = lock('name', wait=60); second.acquire(); timer.join()\n"
            "print('held', flush=True); second.release()\n"
            "import atexit; atexit._run_exitfuncs()\n"  # which mod_wsgi calls before it ends an interpreter
        )
        holder = program(
            "import _xxsubinterpreters as interpreters\n"
            f"code = 'import sys; sys.path[:0] = {{path!r}}\\n' + {inside!r}\n"
            "code = code.format(path=sys.path, locks=settings.DISTRIBUTED_LOCKS)\n"
            "interpreter = interpreters.create(isolated=False)\n"
            "interpreters.run_string(interpreter, code); interpreters.destroy(interpreter); say('ended')\n"
        )
        assert (heard(holder), heard(holder)) == ("held", "ended")
        assert holder.wait(60) == 0

    def test_stopped_past_its_ttl_it_learns_that_it_lost(self, program):
        """S1, S5: it believes in nothing that others may have by now."""
        holder = program(
            "lease = lock('name', on_lost='log', ttl=0.6).__enter__()\n"
            "say('held')\n"
            "while lease.state == 'held': time.sleep(0.005)\n"
            "say(lease.state); sys.stdin.read()"
        )
        assert heard(holder) == "held"
        holder.send_signal(signal.SIGSTOP)
        with lock("name", wait=PATIENCE):
            holder.send_signal(signal.SIGCONT)
            assert heard(holder) == "lost"
            assert lock("name").locked()


def hold_and_return(url):
    from django.conf import settings

    if not settings.configured:
        settings.configure()
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": url}
    }
    mutex = lock("name", ttl=60)
    assert mutex.acquire()
    hold_and_return.kept = mutex


@pytest.mark.parametrize("protocol", [2, 3])
def test_without_hiredis(valkey_locks, valkey, protocol):
    """redis-py's own parsers, which read from the socket in another way."""
    code = (
        "import sys; sys.modules['hiredis'] = None\n" + PROLOGUE + "import asyncio, threading\n"
        "from django_distlock.types import LockRequest, Holder\n"
        "first = lock('name', ttl=30); first.acquire()\n"
        "threading.Timer(0.2, first.release).start()\n"
        "waiting = lock('name', wait=10)\n"
        "assert waiting.acquire(); say(len(list(locks['default'].held()))); waiting.release()\n"
        "async def main():\n"
        "    first = lock('other'); await first.aacquire()\n"
        "    handle = lock('other', wait=10); waiting = asyncio.create_task(handle.__aenter__())\n"
        "    await asyncio.sleep(0.2); await first.arelease()\n"
        "    lease = await waiting; await lease.arenew(60); await lease.arelease(); say(lease.state)\n"
        "asyncio.run(main())\n"
    )
    url = f"{valkey.url}&protocol={protocol}"
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout.split("\n")[:2] == ["1", "released"], done.stderr


def test_processes_exclude_each_other(program, tmp_path):
    """Four processes add to a number in a file, read and written apart."""
    number = tmp_path / "number"
    number.write_text("0")
    code = (
        "from pathlib import Path\n"
        f"path = Path({str(number)!r})\n"
        "for _ in range(50):\n"
        "    with lock('name', wait=60):\n"
        "        seen = int(path.read_text()); time.sleep(0.0005); path.write_text(str(seen + 1))\n"
    )
    workers = [program(code) for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    assert number.read_text() == "200"
    with pytest.raises(LockNotHeld):
        lock("name").release()
