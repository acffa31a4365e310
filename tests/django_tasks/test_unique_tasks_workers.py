"""Unique tasks of django.tasks in real workers: what is left when a publisher or a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing

import pytest
from django import VERSION

from django_distlock import locks
from django_distlock.unique.publishing import UniqueHolder
from tests.support.programs import ROOT
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(VERSION < (6, 0), reason="django.tasks comes with Django 6")]

TTL = 2.0  # of the alias


@pytest.fixture(autouse=True)
def the_locks(server, settings):
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": server.url, "TTL": TTL}
    }
    yield
    locks.close()


class Table:
    """A database with messages, and the programs that use it."""

    def __init__(self, folder, server):
        self._folder, self._workers = folder, []
        plan = {"database": str(folder / "database.sqlite3"), "locks": server.url, "folder": str(folder)}
        self._environment = {
            **os.environ,
            "TABLE_WORKERS": json.dumps(plan),
            "DJANGO_SETTINGS_MODULE": "tests.support.table_workers.settings",
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run(self._django("migrate", "--verbosity=0"), env=self._environment, cwd=ROOT, check=True)

    @staticmethod
    def _django(*arguments):
        return [sys.executable, "-m", "django", *arguments]

    def worker(self):
        started = subprocess.Popen(
            self._django("db_worker", "--interval=0.1", "--no-startup-delay", "--no-reload"),
            env=self._environment, cwd=ROOT, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._workers.append(started)
        return started

    def publisher(self, name, times=1, killed=()):
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.table_workers.publisher", name, str(times), *killed],
            env=self._environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def publish(self, name):
        """The id of the message that has the name."""
        program = self.publisher(name)
        return program.communicate(timeout=60)[0].strip()

    def killed(self, name, when):
        program = self.publisher(name, killed=[when])
        program.communicate(timeout=60)
        assert program.returncode == -signal.SIGKILL

    def journal(self, name):
        file = self._folder / name
        return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def pid_of_first_run(self, name):
        return int((self._folder / name).read_text().split()[1])

    def set_back(self, task_id):
        """By hand, as after the death of its worker."""
        with closing(sqlite3.connect(self._folder / "database.sqlite3", timeout=60)) as connection, connection:
            set_back = "UPDATE django_tasks_database_dbtaskresult SET status = 'READY' WHERE id = ?"
            changed = connection.execute(set_back, (task_id.replace("-", ""),))
            assert changed.rowcount == 1

    def go(self, name):
        (self._folder / f"{name}.go").touch()

    def end_workers(self):
        while self._workers:
            worker = self._workers.pop()
            worker.kill()
            worker.wait()


@pytest.fixture(scope="module")
def migrated(tmp_path_factory, server):
    return Table(tmp_path_factory.mktemp("table"), server)


@pytest.fixture
def table(migrated):
    yield migrated
    migrated.end_workers()


@pytest.fixture
def name():
    return uuid.uuid4().hex[:12]


def holder(name):
    [leases] = locks["default"].look([f"unique:{name}"])
    return UniqueHolder.of(leases[0]) if leases else None


def is_free(name):
    return holder(name) is None


def test_publishers_beside_each_other(table, name):
    """Two with 50 each, while the first task waits and while it is at work."""
    table.worker()
    programs = [table.publisher(name, 50) for _ in range(2)]
    ids = [program.communicate(timeout=120)[0].split() for program in programs]
    assert [len(each) for each in ids] == [50, 50]
    assert len({*ids[0], *ids[1]}) == 1
    eventually(lambda: table.journal(name))
    table.go(name)
    eventually(lambda: is_free(name))
    assert table.journal(name) == ["run", "done"]


def test_the_name_of_a_worker_that_is_killed_is_free_after_the_ttl(table, name):
    worker = table.worker()
    first = table.publish(name)
    eventually(lambda: table.journal(name))
    assert table.publish(name) == first
    worker.kill()
    worker.wait()
    if left := holder(name):
        assert (left.task_id, left.state) == (first, "running")
        assert left.info.remaining <= TTL
    eventually(lambda: is_free(name))
    table.go(name)
    assert table.publish(name) != first
    table.worker()
    eventually(lambda: table.journal(name) == ["run", "run", "done"])
    eventually(lambda: is_free(name))


def test_a_message_that_is_run_again_while_the_lease_of_a_killed_worker_lasts(table, name):
    workers = [table.worker(), table.worker()]
    sent = table.publish(name)
    eventually(lambda: table.journal(name))
    pid = table.pid_of_first_run(name)
    [at_work] = [worker for worker in workers if worker.pid == pid]
    at_work.kill()
    at_work.wait()
    table.go(name)
    table.set_back(sent)
    eventually(lambda: table.journal(name) == ["run", "run", "done"])
    eventually(lambda: is_free(name))
    assert table.journal(name) == ["run", "run", "done"]


def test_a_publisher_that_is_killed_before_it_writes(table, name):
    table.killed(name, "before")
    if left := holder(name):
        assert left.state == "queued"
        assert left.info.remaining <= TTL
    eventually(lambda: is_free(name))
    table.go(name)
    table.publish(name)
    table.worker()
    eventually(lambda: table.journal(name) == ["run", "done"])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_publisher_that_is_killed_before_it_lengthens_the_lease(table, name, is_late):
    table.killed(name, "after")
    if left := holder(name):
        assert left.info.remaining <= TTL
    if is_late:
        eventually(lambda: is_free(name))
    table.worker()
    eventually(lambda: table.journal(name))  # it takes the name anew
    found = holder(name)
    assert found.state == "running"
    assert table.publish(name) == found.task_id
    table.go(name)
    eventually(lambda: is_free(name))
    assert table.journal(name) == ["run", "done"]


def test_a_publisher_that_is_killed_before_commit(table, name):
    """The database undoes what it wrote."""
    table.killed(name, "commit")
    assert is_free(name)
    table.go(name)
    table.publish(name)
    table.worker()
    eventually(lambda: table.journal(name) == ["run", "done"])
    eventually(lambda: is_free(name))
    assert table.journal(name) == ["run", "done"]


def test_a_publisher_that_is_killed_after_commit(table, name):
    """Its message has no lease, and takes the name when it is run."""
    table.killed(name, "committed")
    assert is_free(name)
    table.worker()
    eventually(lambda: table.journal(name))
    found = holder(name)
    assert (found.state, table.publish(name)) == ("running", found.task_id)
    table.go(name)
    eventually(lambda: is_free(name))
    assert table.journal(name) == ["run", "done"]
