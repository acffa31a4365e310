"""The file of SQLite with the locks: its path and its tables."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from django.db import connections

from ...exceptions import LockBackendError
from ...models import ROWS_OF_DATABASE_BACKEND
from ...utils.clock import clock, wall_clock_us
from ...utils.guards import new_guard
from ..common.backoff import Backoff, retry
from ..common.timing import Timing

SUFFIX = "-locks"
GATE_OPENS = 5.0  # seconds after which a gate opens by itself, where the fork or what should open it did not come
GATE_LOOKS = 0.1  # seconds between looks at whether it has


def own_file(name: str | Path) -> str:
    """The file with the locks of a SQLite database, beside it.

    A transaction that writes has a whole file to itself. With the locks in the same file, a caller inside a transaction
    would wait for itself.
    """
    own, vfs = real_path(name) + SUFFIX, parse_qs(urlsplit(str(name)).query).get("vfs")
    # Only this part of a URI is used: mode=ro, immutable or nolock are not about this file.
    return f"file:{quote(own)}?vfs={quote(vfs[0])}" if vfs and is_uri(name) else own


def real_path(name: str | Path) -> str:
    """The path without symbolic links, by which SQLite finds its logs, so that one database has one file of locks."""
    return os.path.realpath(_without_scheme(name))


def _without_scheme(name: str | Path) -> str:
    if not is_uri(name):
        return str(name)
    from urllib.request import url2pathname

    return url2pathname(urlsplit(str(name)).path)


def is_uri(name: str | Path) -> bool:
    return str(name).startswith("file:")


def databases_in(file: str | None) -> Iterator[str]:
    """The aliases of DATABASES that use this file of SQLite."""
    for alias, settings in connections.settings.items():
        is_sqlite = str(settings["ENGINE"]).rpartition(".")[2].startswith(("sqlite", "spatialite"))
        if file and is_sqlite and real_path(settings["NAME"]) == real_path(file):
            yield alias


def is_in_memory(name: str | Path) -> bool:
    return ":memory:" in str(name) or "mode=memory" in str(name)


class TemporaryFile:
    """A file for the locks of a database in memory. Both belong to one process alone."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="distlock-")
        self.name = str(Path(folder, "locks"))
        self.remove = weakref.finalize(self, _remove, folder, os.getpid())


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves the file to its parent
        shutil.rmtree(folder, ignore_errors=True)


def make_file(file: str) -> None:
    """Create the file, unless it exists, with the owner and mode of its database, as SQLite creates its logs.

    So users who may read or write the database may do the same with its locks, whichever process came first.
    Raises OSError, and LockBackendError if a symbolic link stands there.
    """
    if sys.platform == "win32":
        return
    path = Path(_without_scheme(file))
    with _making:  # closing a file drops all locks of the process on it, so no other thread may use it yet
        try:
            if stat.S_ISLNK(path.lstat().st_mode):
                error = LockBackendError(f"{path} is a symbolic link. Delete it: locks are beside the database.")
                error.is_final = True
                raise error
            return
        except FileNotFoundError:
            pass
        try:
            database = Path(str(path).removesuffix(SUFFIX)).stat()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except (FileNotFoundError, FileExistsError):
            return  # no database yet: SQLite creates both in the same way; or another process was faster
        try:
            with suppress(PermissionError):  # only root may change the owner
                os.fchown(descriptor, database.st_uid if os.geteuid() == 0 else -1, database.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(database.st_mode))
        finally:
            os.close(descriptor)


_making = new_guard()


def prepare_file(wrapper: Any, timeout: float, timing: Timing) -> None:
    """Make the tables of the locks if they are missing. ``timeout``: seconds to wait for others that make them."""
    raw = wrapper.connection
    raw.create_function("distlock_now", 0, lambda: wall_clock_us())
    raw.execute("PRAGMA synchronous = NORMAL")
    existing = {table for (table,) in raw.execute("SELECT name FROM sqlite_master")}
    if missing := [model for model in ROWS_OF_DATABASE_BACKEND if model._meta.db_table not in existing]:
        _make_tables(wrapper, missing, timeout, timing)
    # SQLite itself would pause for a millisecond before it looks again, longer than most writers need.
    raw.execute("PRAGMA busy_timeout = 0")


def _make_tables(wrapper: Any, missing: list[Any], timeout: float, timing: Timing) -> None:
    raw, busy = wrapper.connection, wrapper.Database.OperationalError
    # Then readers do not wait for writers. While others switch, SQLite raises an error at once.
    backoff = Backoff(clock() + timeout, timing.retry_pause_shortest, timing.retry_pause_longest)
    retry(lambda: raw.execute("PRAGMA journal_mode = WAL"), lambda error: isinstance(error, busy), backoff)
    with wrapper.schema_editor(collect_sql=True, atomic=False) as editor:
        statements = [editor.table_sql(model)[0] for model in missing]
    for statement in statements:
        raw.execute(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))


class ForkGate:
    """A fork waits until no connection is in use, and no connection is used until the process has forked.

    File locks of the system belong to a process, so a child has none of its parent's. But SQLite remembers them in
    memory, and the child has a copy of that. It would treat its parent's locks as its own, and read and write without
    any. Locks of connections that were closed before the fork are not in that memory.
    """

    def __init__(self) -> None:
        self._guard = new_guard()
        self._changed = threading.Condition(self._guard)
        self._users: set[object] = set()
        self._forking: dict[int, float] = {}  # until when each of these threads keeps the others out, on clock()

    @contextmanager
    def using(self) -> Iterator[None]:
        user = object()
        try:
            with self._guard:
                self._wait_until_open()
                self._users.add(user)
            yield
        finally:
            self._users.discard(user)
            if self._forking:
                with self._guard:
                    self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Let no other thread pass until ``open()``. Returns whether the last user left within ``timeout`` seconds.

        CPython goes on where a hook of a fork was interrupted. So the gate opens by itself if nobody opens it.
        """
        with self._guard:
            self._forking[threading.get_ident()] = clock() + timeout + GATE_OPENS
            return self._changed.wait_for(lambda: not self._users, timeout)

    def open(self) -> None:
        self._forking.pop(threading.get_ident(), None)
        with self._guard:
            self._changed.notify_all()

    def _wait_until_open(self) -> None:
        while self._is_closed():
            self._changed.wait(GATE_LOOKS)

    def _is_closed(self) -> bool:
        if not self._forking:
            return False
        me, now = threading.get_ident(), clock()
        return any(until > now for thread, until in list(self._forking.items()) if thread != me)
