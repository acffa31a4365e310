"""The file beside a SQLite database in which its locks are."""

from __future__ import annotations

from contextlib import ExitStack
from urllib.parse import quote

import pytest

from django_distlock import lock, locks
from django_distlock.backends.database.files import own_file

from .conftest import DATABASE
from .databases import known_database

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
