"""Queues tasks: ``python -m tests.support.table_workers.publisher NAME TIMES [KILLED]``. Prints the id of each.

KILLED: when it kills itself. "before": before the row is written; "after": when it is, and not told yet; "commit":
before the COMMIT of its transaction; "committed": after that, and before it is decided.
"""

import os
import signal
import sys
from contextlib import nullcontext

import django
from django.db import transaction
from django.db.models.signals import pre_save
from django.tasks.signals import task_enqueued

from tests.support.table_workers.tasks import work

django.setup()
name, times, killed = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""


def kill(**_):
    os.kill(os.getpid(), signal.SIGKILL)


if killed in ("before", "after"):
    {"before": pre_save, "after": task_enqueued}[killed].connect(kill)
with transaction.atomic() if killed.startswith("commit") else nullcontext():
    if killed == "committed":
        transaction.on_commit(kill)
    for _ in range(times):
        print(work.enqueue(name).id, flush=True)
    if killed == "commit":
        kill()
