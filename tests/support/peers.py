"""Processes that say what they do, and do what they are told."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time

from tests.support.forkserver import Program
from tests.support.tools import PATIENCE

PROLOGUE = """
import os, signal, sys, threading, time
from django.conf import settings
settings.configure(DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "tests.support.history.RecordingBackend", "LOCATION": sys.argv[1],
    "OPTIONS": {"socket_timeout": 30.0, "socket_connect_timeout": 30.0}}})  # a busy machine is no outage
from django_distlock import *
def say(*words):
    print(*words, flush=True)
def told():
    return sys.stdin.readline().strip()
def get_in_and_out():
    handle = lock("name", ttl=float(sys.argv[2]), wait=60, on_lost="log")
    with handle as lease:
        say("in")
        told()
    say("out")
say("ready")
order = told()
"""


class Peer:
    """A Python program that says and is told lines. ``like``: what it has imported, as for ``Program``."""

    def __init__(self, url, code, ttl, prologue=PROLOGUE, like="django"):
        arguments = ["-W", "error", "-c", prologue + code, url, ttl]
        self.process = Program(arguments, like=like, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._said.put((line.strip(), time.monotonic()))

    def says(self, word, within=PATIENCE):
        """Return when it said so."""
        try:
            said, at = self._said.get(timeout=within)
        except queue.Empty:
            raise AssertionError(f"{word!r} was not said within {within} s") from None
        assert said == word
        return at

    def is_silent(self):
        return self._said.empty()

    def tell(self, word="go on"):
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def leaves(self):
        self.tell()
        self.says("out")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def end(self):
        self.kill()
        self._reader.join(PATIENCE)
        self.process.stdin.close()
        self.process.stdout.close()


# Behind what sets folder, seed, names, slots (numbers of them, by name), waits, ttls, holds, pause and threads, and
# begin(), which returns the latest end. It is over before, once there is a file "over" in the folder.
RANDOM_CALLS = """
import asyncio, logging, random, threading, time
from pathlib import Path
from tests.support.history import Journal
random.seed(seed)
journal = Journal(Path(folder))
journal.attach()
logging.disable(logging.CRITICAL)
ends = begin()
def drawn():
    name, wait, ttl = random.choice(names), random.choice(waits), random.choice(ttls)
    number, renew = random.choice(slots.get(name, (1,))), random.random() < 0.8
    return lock(name, wait=wait, ttl=ttl, slots=number, on_lost="log", renew=renew)
def hold():
    return random.choice(holds)
over = Path(folder, "over")
def goes_on():
    return time.monotonic() < float(ends) and not over.exists()
def thread():
    while goes_on():
        try:
            with drawn():
                time.sleep(hold())
        except LockError as error:
            journal.failed(error)
            time.sleep(pause)
async def one():
    try:
        async with drawn():
            await asyncio.sleep(hold())
    except LockError as error:
        journal.failed(error)
        await asyncio.sleep(pause)
async def tasks():
    while goes_on():
        task = asyncio.create_task(one())
        if random.random() < 0.3:
            await asyncio.sleep(random.random() * 0.05)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
beside = [threading.Thread(target=thread) for _ in range(threads)]
for one_thread in beside:
    one_thread.start()
asyncio.run(tasks())
for one_thread in beside:
    one_thread.join()
"""

RANDOM_WORKER = f"""
folder, seed = order.split(" ")
names, waits, ttls = ("one", "one", "two", "several"), (0, 0.3, 2, 5, 5), (0.3, 0.6, 1.2)
slots = {{"several": (1, 2, 5)}}
holds, pause, threads = (0, 0.001, 0.005, 0.02, 0.1), 0.001, 2
def begin():
    say("at work")
    return told()
{RANDOM_CALLS}
say("out")
"""
