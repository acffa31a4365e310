"""The file beside a SQLite database in which its locks are."""

from __future__ import annotations

import os
import stat
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import pytest

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.database import sqlite
from django_distlock.backends.database.sqlite import ForkGate, own_file
from tests.support.databases import known_database
from tests.support.interrupts import Interrupt, at_each_point
from tests.support.programs import in_a_fork
from tests.support.stores import DATABASE
from tests.support.tools import PATIENCE

SQLITE = "django.db.backends.sqlite3"


@pytest.fixture
def aliases(settings, django_db_blocker):
    """``aliases(one, another)``: both are SQLite databases of these names, with locks under the same aliases."""
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())

        def know(*names):
            aliases = [f"alias{number}" for number, _ in enumerate(names)]
            for alias, name in zip(aliases, names, strict=True):
                stack.enter_context(known_database({"ENGINE": SQLITE, "NAME": name}, alias))
            settings.DISTRIBUTED_LOCKS = {alias: {"BACKEND": DATABASE, "LOCATION": alias} for alias in aliases}
            return aliases

        yield know
        locks.close()


class TestLinks:
    """As deployments have them: releases/1/db.sqlite3 and releases/2/db.sqlite3 lead to shared/db.sqlite3."""

    @pytest.fixture
    def shared(self, tmp_path):
        """A database, and two links to it, one over a folder, with names that a URI has to quote."""
        (tmp_path / "shared folder").mkdir()
        database = tmp_path / "shared folder" / "db.sqlite3"
        (tmp_path / "link").symlink_to(database)
        (tmp_path / "folder").symlink_to(database.parent)
        return database, tmp_path / "link", tmp_path / "folder" / "db.sqlite3"

    def test_whoever_reaches_it_by_a_link_has_the_same_locks(self, shared, aliases):
        direct, *linked = aliases(*shared)
        with lock("name", using=direct, wait=0):
            assert [lock("name", using=alias, wait=0).acquire() for alias in linked] == [False, False]
        assert len({locks[alias].keyspace for alias in (direct, *linked)}) == 1
        assert sorted(path.name for path in shared[0].parent.glob("*-locks")) == ["db.sqlite3-locks"]
        assert not shared[1].with_name("link-locks").exists()

    @pytest.mark.parametrize(
        "uri", ["file:{}", "file://{}", "file://localhost{}?timeout=3", "file:{}?mode=ro&nolock=1#x"]
    )
    def test_so_does_a_uri(self, shared, aliases, uri):
        direct, by_uri = aliases(shared[0], uri.format(quote(str(shared[1]))))
        with lock("name", using=direct, wait=0):
            assert lock("name", using=by_uri, wait=0).acquire() is False
        with lock("name", using=by_uri, wait=0):
            assert lock("name", using=direct, wait=0).acquire() is False

    def test_a_way_to_lock_files_of_its_own_counts_for_the_locks_too(self, shared, aliases):
        name = f"file:{quote(str(shared[1]))}?vfs=unix-dotfile&mode=ro"
        assert own_file(name) == f"file:{quote(str(shared[0]))}-locks?vfs=unix-dotfile"
        [alias] = aliases(name)
        with lock("name", using=alias, wait=0):
            assert shared[0].with_name("db.sqlite3-locks").exists()

    def test_a_relative_name(self, shared, aliases, monkeypatch):
        monkeypatch.chdir(shared[0].parent)
        direct, relative, by_uri = aliases(shared[0], "db.sqlite3", "file:db.sqlite3?mode=rwc")
        with lock("name", using=direct, wait=0):
            assert lock("name", using=relative, wait=0).acquire() is False
            assert lock("name", using=by_uri, wait=0).acquire() is False
        monkeypatch.chdir("/")
        with lock("name", using=relative, wait=0):  # where it was when the settings were read
            assert lock("name", using=direct, wait=0).acquire() is False


@pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are those of POSIX")
class TestOwner:
    """Whoever came first made the file: a command that root ran once, say."""

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
    def test_the_file_and_its_logs_are_as_the_database(self, sqlite_database, settings, mode):
        database = Path(sqlite_database["NAME"])
        database.touch()
        owner = 65534 if os.geteuid() == 0 else os.geteuid()
        os.chown(database, owner, owner if os.geteuid() == 0 else -1)
        database.chmod(mode)
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": DATABASE, "LOCATION": "locks"}}
        with lock("name"):
            made = {path.name: path.stat() for path in database.parent.iterdir()}
        assert sorted(made) == [f"shop.sqlite3{end}" for end in ("", "-locks", "-locks-shm", "-locks-wal")]
        for found in made.values():
            assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (
                mode, owner, made["shop.sqlite3"].st_gid
            )  # fmt: skip
        locks.close()

    def test_before_there_is_a_database(self, sqlite_locks):
        with lock("name"):
            assert not Path(sqlite_locks.pool.file.removesuffix("-locks")).exists()

    def test_what_was_made_before_is_left_as_it_is(self, sqlite_locks):
        file = Path(sqlite_locks.pool.file)
        Path(str(file).removesuffix("-locks")).touch()
        file.touch()
        file.chmod(0o660)
        with lock("name"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o660

    def test_one_that_was_deleted_is_left_also_by_connections_that_stand(self, sqlite_locks):
        """Others lock in the new one."""
        with lock("name"):
            pass
        file = Path(sqlite_locks.pool.file)
        for path in file.parent.glob(f"{file.name}*"):
            path.unlink()
        with lock("name"):
            assert file.exists()

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_link_that_somebody_put_there_is_not_followed(self, sqlite_locks, tmp_path, exists):
        victim = tmp_path / "victim"
        if exists:
            victim.touch()
        link = Path(sqlite_locks.pool.file)
        link.symlink_to(victim)
        with pytest.raises(LockBackendError, match="-locks is a symbolic link. Delete it"):
            lock("name").acquire()
        assert not exists or victim.read_bytes() == b""
        assert victim.exists() is exists
        link.unlink()

    @pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
    @pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root becomes another user")
    def test_a_file_of_somebody_else(self, aliases):
        with TemporaryDirectory() as folder:  # pytest's own are for one user
            Path(folder).chmod(0o777)
            [alias] = aliases(f"{folder}/db.sqlite3")
            with lock("name", using=alias):
                pass

            def work():
                os.setegid(65534)
                os.seteuid(65534)
                return lock("name", using=alias).acquire()

            answer = in_a_fork(work)
        assert "to which this user cannot write. Give it the owner and the mode of the database" in answer


def test_an_interrupted_fork_lets_others_pass(monkeypatch):
    """CPython goes on after what a hook of a fork has raised."""
    monkeypatch.setattr(sqlite, "GATE_OPENS", 0.2)
    gates, passed = {}, []

    def fork(name):
        gate = gates[name] = ForkGate()
        for hook in (lambda: gate.close(0.0), gate.open):
            with suppress(Interrupt):
                hook()

    def use():
        for gate in gates.values():
            with gate.using():
                passed.append(gate)

    points = dict(at_each_point(fork, "backends/database/sqlite.py", threading.__file__))
    assert len(points) >= 10
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert len(passed) == len(gates), [*points.values()][len(passed) :][:1]


def test_who_is_interrupted_lets_others_fork():
    gates, forked = {}, []

    def use(name):
        gate = gates[name] = ForkGate()
        with gate.using():
            pass

    def fork():
        for gate in gates.values():
            forked.append(gate.close(0.0))
            gate.open()

    points = dict(at_each_point(use, "backends/database/sqlite.py", threading.__file__))
    assert len(points) >= 5
    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert forked == [True] * len(gates), [*points.values()][len(forked) :][:1]
