"""Publishes unique tasks as a program of its own: ``python -m tests.support.workers.publisher NAME TIMES [KILLED]``.

Prints the id of each task that it is given. KILLED: the signal of Celery at which it kills itself.
"""

import os
import signal
import sys

import django
from celery import signals

from tests.support.workers import app

name, times, *killed = sys.argv[1:]
django.setup()
for each in killed:
    getattr(signals, each).connect(lambda **_: os.kill(os.getpid(), signal.SIGKILL), weak=False)
for _ in range(int(times)):
    print(app.unique.delay(name).id, flush=True)
