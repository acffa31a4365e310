"""Locks among real processes: killed, stopped, forked, exiting."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from django_distlock import LockNotHeld, State, lock, locks
from django_distlock.tickets import Ticket, new_token

from .tools import PATIENCE, eventually

PROLOGUE = """
import os, sys, time
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": sys.argv[1], "TTL": 2}})
from django_distlock import *
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def program(valkey_locks, valkey):
    """Starts Python programs that share the store; ends what is left of them."""
    started = []

    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROLOGUE + code, valkey.url],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # to be ended with all that it starts
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def heard(process):
    return process.stdout.readline().strip()


def in_a_fork(work):
    """Run in a forked child, which leaves without cleaning up; return its text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, str(work()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


class TestEndOfAHolder:
    def test_killed_it_blocks_others_for_its_ttl_at_most(self, program):
        """S7."""
        holder = program("lock('name').acquire(); say('held'); time.sleep(60)")
        assert heard(holder) == "held"
        time.sleep(1)  # renewed meanwhile
        holder.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with lock("name", wait=PATIENCE):
            assert time.monotonic() - killed < 2 + 1

    @pytest.mark.parametrize(
        "end",
        [
            "pass",
            "sys.exit(3)",
            "import signal; signal.signal(15, lambda *_: sys.exit(0)); os.kill(os.getpid(), 15)",
        ],
    )
    def test_exiting_normally_it_frees_what_it_holds(self, program, end):
        holder = program(f"mutex = lock('name', ttl=60); mutex.acquire(); say('held'); {end}")
        assert heard(holder) == "held"
        holder.wait(PATIENCE)
        assert not lock("name").locked()

    def test_exiting_it_leaves_the_rest_of_min_hold(self, program):
        holder = program("mutex = lock('name', ttl=60, min_hold=30); mutex.acquire(); say('held')")
        assert heard(holder) == "held"
        holder.wait(PATIENCE)
        [info] = locks["default"].held()
        assert info.resting
        assert 20 < info.remaining <= 30

    def test_a_handle_kept_by_a_thread_at_exit(self, program):
        holder = program(
            "import threading\n"
            "held = threading.Event()\n"
            "work = lambda: (lock('name', ttl=60).__enter__(), say('held'), held.set(), time.sleep(60))\n"
            "threading.Thread(target=work, daemon=True).start()\n"
            f"held.wait({PATIENCE})"
        )
        assert heard(holder) == "held"
        holder.wait(PATIENCE)
        assert not lock("name").locked()

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    @pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
    def test_children_of_multiprocessing_free_what_they_hold(self, valkey_locks, valkey, method):
        child = multiprocessing.get_context(method).Process(target=hold_and_return, args=(valkey.url,))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert not lock("name").locked()

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


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestFork:
    """S8: what a parent holds is nothing to its child."""

    def test_a_child_neither_releases_nor_believes(self, valkey_locks):
        handle = lock("name")
        with handle as lease:
            assert in_a_fork(lambda: lease.state) == "lost"
            assert "LockNotHeld" in in_a_fork(handle.release)
            assert "LockNotHeld" in in_a_fork(lease.release)
            assert "LockLost" in in_a_fork(lease.ensure_held)
            assert locks["default"].look(["name"])[0].token == lease.token
            lease.ensure_held()

    def test_leaving_with_in_the_child_releases_nothing(self, valkey_locks):
        handle = lock("name")
        with handle as lease:
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    handle.__exit__(None, None, None)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert locks["default"].look(["name"])[0].token == lease.token

    def test_a_child_that_exits_normally_frees_nothing_of_its_parent(self, program, valkey_locks):
        parent = program(
            "with lock('name', ttl=60):\n    if not os.fork(): sys.exit(0)\n    os.wait(); say(lock('name').locked())"
        )
        assert heard(parent) == "True"

    def test_a_child_does_not_renew(self, program):
        parent = program(
            "mutex = lock('name', ttl=1); mutex.acquire()\n"
            "if not os.fork(): time.sleep(60)\n"
            "say('held'); os.kill(os.getpid(), 9)"
        )
        assert heard(parent) == "held"
        eventually(lambda: not lock("name").locked(), 3)

    def test_a_child_can_take_and_renew_its_own_at_once(self, valkey_locks):
        def work():
            with lock("child's", ttl=0.8) as lease:
                time.sleep(1.6)
                return lease.state

        with lock("parent's"):
            assert in_a_fork(work) == "held"

    def test_a_child_of_a_busy_process_does_not_hang(self, valkey_locks):
        """Other threads are inside the backend at the moment of the fork."""
        done = threading.Event()

        def churn():
            while not done.is_set():
                with lock("churned", wait=None):
                    pass

        threads = [threading.Thread(target=churn) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_a_fork(lambda: lock("child's", wait=5).__enter__().state) == "held"
                locks["default"].release(ticket_of("child's"))
        finally:
            done.set()
            for thread in threads:
                thread.join(PATIENCE)

    def test_tokens_never_repeat_across_fork(self):
        assert in_a_fork(new_token) != new_token()

    def test_a_locked_handle_is_not_released_by_another_process(self, valkey_locks):
        with lock("name") as lease:
            assert in_a_fork(lambda: lock("name", wait=0).acquire()) == "False"
            assert lease.state is State.HELD


def ticket_of(name):
    info = locks["default"].look([name])[0]
    return Ticket(name, 10.0, info.holder, token=info.token)


@pytest.mark.parametrize("protocol", [2, 3])
def test_without_hiredis(valkey_locks, valkey, protocol):
    """redis-py's own parsers, which read from the socket in another way."""
    code = (
        "import sys; sys.modules['hiredis'] = None\n" + PROLOGUE + "import asyncio, threading\n"
        "from django_distlock.tickets import Ticket, Holder\n"
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
