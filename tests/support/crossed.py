"""A deadlock of two threads."""

from __future__ import annotations

import threading

from django_distlock import lock
from tests.support.tools import PATIENCE


class Crossed:
    """Two threads, each of which holds a lock and waits for that of the other."""

    def __init__(self):
        self.both = threading.Barrier(3, timeout=PATIENCE)
        self.threads = [
            threading.Thread(target=self.run, args=names, name=names[0]) for names in (("a", "b"), ("b", "a"))
        ]
        self.ends = threading.Event()

    def run(self, own, other):
        with lock(own, label=f"needs {other}"):
            self.both.wait()
            wanted = lock(other, label=f"needs {other}", wait=60)
            while not self.ends.is_set() and not wanted.acquire(timeout=5):
                pass
            if wanted.locked() and self.ends.is_set() and wanted.lease:
                wanted.release()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.both.wait()

    def __exit__(self, *_):
        self.ends.set()
        for thread in self.threads:
            thread.join()
