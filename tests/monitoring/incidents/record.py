"""Makes each incident on a Valkey server of its own, and writes what is known of its lock meanwhile to a file.

``python -m tests.monitoring.incidents.record [NAME ...]``; default: all. Each takes some seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from django.conf import settings

from example_project.valkey import Valkey
from tests.monitoring.incidents import HERE, to_data

PROLOGUE = """
import sys, time
from django.conf import settings
settings.configure(DEBUG=True, DISTRIBUTED_LOCKS={"default": {
    "BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": sys.argv[1], "TTL": 4,
    "JOURNAL": int(sys.argv[2]) or None}})
from django_distlock import *
def say(word):
    print(word, flush=True)
def wait_for(name, **options):
    say("asks")
    with lock(name, **options):
        say("has it")
        sys.stdin.readline()
"""

WRITTEN = 0.6  # seconds after which what a process has noted is in the journal


class Host:
    """Where the incident happens: its processes, and its server."""

    def __init__(self, server: Valkey, journal: int = 1000) -> None:
        self.server, self.journal = server, journal
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, label: str, code: str) -> subprocess.Popen[str]:
        """A process called so; its ``run()`` returns when it has said something."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + f"LABEL = {label!r}\n" + code, self.server.url, str(self.journal)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.processes.append(process)
        self.hear(process)
        return process

    def hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        assert process.stdout.readline()

    def tell(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


INCIDENTS: dict[str, tuple[Callable[[Host], object], str, int]] = {}


def incident(name: str, lock: str, journal: int = 1000) -> Callable[[Callable[[Host], object]], None]:
    def add(makes: Callable[[Host], object]) -> None:
        INCIDENTS[name] = makes, lock, journal

    return add


HOLDS_AND_WAITS = """
with lock({0!r}, label=LABEL):
    say("holds")
    sys.stdin.readline()
    with lock({1!r}, label=LABEL, wait=30):
        pass
"""
HOLDS = """
with lock({0!r}, label=LABEL, on_lost="log"):
    say("holds")
    sys.stdin.readline()
say("ends")
sys.stdin.readline()
"""


def _deadlock(host: Host) -> None:
    both = [
        host.run("invoices", HOLDS_AND_WAITS.format("account:1", "account:2")),
        host.run("refunds", HOLDS_AND_WAITS.format("account:2", "account:1")),
    ]
    for each in both:
        host.tell(each)
        time.sleep(0.3)
    time.sleep(1.5)


incident("deadlock", "account:1")(_deadlock)
incident("deadlock_without_a_journal", "account:1", journal=0)(_deadlock)


@incident("slow_reader", "report:7")
def _slow_reader(host: Host) -> None:
    host.run(
        "",
        """
import django; django.setup()
from django.http import HttpRequest, StreamingHttpResponse
@distributed_lock("report:{pk}")
def report(request, pk):
    return StreamingHttpResponse(map(str, range(1000)))
request = HttpRequest(); request.method, request.path = "GET", "/report"
chunks = iter(report(request, pk=7))
next(chunks)
say("streams")
sys.stdin.readline()
""",
    )
    host.run("nightly", 'wait_for("report:7", label=LABEL, wait=60)')
    time.sleep(2)


@incident("holder_stopped", "order:42")
def _holder_stopped(host: Host) -> None:
    holder = host.run("pay", HOLDS.format("order:42"))
    host.run("ship", 'wait_for("order:42", label=LABEL, wait=60)')
    time.sleep(WRITTEN)
    os.kill(holder.pid, signal.SIGSTOP)
    time.sleep(2.6)


@incident("holder_stopped_and_went_on", "order:42")
def _holder_stopped_and_went_on(host: Host) -> None:
    holder = host.run("pay", HOLDS.format("order:42"))
    waiter = host.run("ship", 'wait_for("order:42", label=LABEL, wait=60)')
    time.sleep(WRITTEN)
    os.kill(holder.pid, signal.SIGSTOP)
    host.hear(waiter)
    time.sleep(1)
    os.kill(holder.pid, signal.SIGCONT)
    host.tell(holder)
    host.hear(holder)
    time.sleep(1)


@incident("holder_killed", "order:42")
def _holder_killed(host: Host) -> None:
    holder = host.run("pay", HOLDS.format("order:42"))
    waiter = host.run("ship", 'wait_for("order:42", label=LABEL, wait=60)')
    time.sleep(WRITTEN)
    holder.kill()
    host.hear(waiter)
    time.sleep(1)


@incident("failover", "order:42")
def _failover(host: Host) -> None:
    for name in ("order:42", "order:43", "order:44"):
        host.run(f"pay {name}", HOLDS.format(name))
    time.sleep(WRITTEN)
    client = redis.Redis.from_url(host.server.url)
    client.delete("lock:order:42", "lock:order:43", "lock:order:44")  # as if the replica had not got them yet
    client.close()
    time.sleep(3)  # until they are renewed
    host.run("ship", HOLDS.format("order:42"))
    time.sleep(WRITTEN)


@incident("task_delivered_again", "report:monthly")
def _task_delivered_again(host: Host) -> None:
    host.run(
        "",
        """
import threading
from tests.support.deliveries import Shop
shop = Shop()
@shop.app.task(name="work", shared=False, acks_late=True)
@distributed_lock("report:monthly", wait=60)
def build_report():
    sys.stdin.readline()
with shop:
    build_report.delay()
    message = shop.next()
    for _ in range(2):
        threading.Thread(target=shop.deliver, args=(message,), daemon=True).start()
        time.sleep(0.5)
    say("is delivered twice")
    time.sleep(60)
""",
    )
    time.sleep(1)


@incident("starvation", "stock")
def _starvation(host: Host) -> None:
    host.run("rebuild index", HOLDS.format("stock"))
    for number in (1, 2, 3):
        host.run(
            f"buy {number}", 'lock("stock", label=LABEL, wait=0.4).acquire(); say("gave up"); sys.stdin.readline()'
        )
    host.run("buy 4", 'wait_for("stock", label=LABEL, wait=60)')
    time.sleep(1)


@incident("healthy_queue", "stock")
def _healthy_queue(host: Host) -> None:
    for number in range(3):
        host.run(
            f"buy {number}",
            """
say("begins")
while True:
    with lock("stock", label=LABEL, wait=60):
        time.sleep(0.02)
    time.sleep(0.01)
""",
        )
    time.sleep(2)


@incident("healthy_long_job", "report:monthly")
def _healthy_long_job(host: Host) -> None:
    host.run("monthly report", HOLDS.format("report:monthly"))
    time.sleep(6)  # longer than the TTL


@contextmanager
def host(journal: int) -> Iterator[Host]:
    with Valkey() as server:
        found = Host(server, journal)
        try:
            yield found
        finally:
            found.end()


def main(names: list[str]) -> None:
    settings.configure(DISTRIBUTED_LOCKS={})
    from django_distlock.backends.redis import RedisBackend
    from django_distlock.monitoring.causes import causes
    from django_distlock.monitoring.situation import gather

    for name in names or INCIDENTS:
        makes, lock, journal = INCIDENTS[name]
        with host(journal) as at:
            makes(at)
            entry = {"LOCATION": at.server.url, "JOURNAL": journal or None}
            situation = gather(RedisBackend("default", entry), lock)
        path = HERE / f"{name}.json"
        path.write_text(json.dumps(to_data(situation), indent=1) + "\n")
        print(name, *(f"\n    {cause.sentence}" for cause in causes(situation)))


if __name__ == "__main__":
    main(sys.argv[1:])
