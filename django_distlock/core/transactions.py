"""What happens to locks at COMMIT and ROLLBACK.

A lock that is released before COMMIT protects nothing, because the next holder reads old data. So a lease that is
left inside a transaction is held until the outermost transaction ends, or the transaction is opened inside the lock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

from asgiref.sync import AsyncToSync
from django.core.signals import request_finished
from django.db import connections, transaction
from django.db.transaction import Atomic, TransactionManagementError

from ..exceptions import LockTimeout
from ..journal import TRANSACTION
from .holds import Retainer, raises_when_lost
from .lease import Lease

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

P = ParamSpec("P")
R = TypeVar("R")

Transaction = ref["BaseDatabaseWrapper"]  # the transaction that is open on a connection


# asgiref keeps the connections of each thread here. A call for each alias takes longer than the rest of a release.
_of_thread = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]
_knows_threads = isinstance(_of_thread, threading.local)
# asgiref keeps here which thread waits for a task. Its own method builds an error message if none does.
_of_awaited_tasks = getattr(getattr(AsyncToSync.executors, "_storage", None), "_data", None)


def _initialized() -> Sequence[BaseDatabaseWrapper]:
    """The connections of this thread or task, as ``connections.all(initialized_only=True)``, but faster."""
    if _knows_threads:
        known = vars(_of_thread)
        if not known:
            return ()
        if _get_running_loop() is None:
            return [known[alias] for alias in connections.settings if alias in known]
        if "cvar" not in known:  # beside them, asgiref keeps those of tasks here
            return []
    return connections.all(initialized_only=True)


def open_here() -> list[Transaction]:
    """The transactions that are open in this thread, except those in which Django's TestCase wraps tests."""
    return [ref(connection) for connection in _initialized() if _is_open(connection)]


class Around:
    """The transactions around a task: those of its thread, and those of the thread that waits for it.

    The waiting thread is asked at once, but may be busy with something else, and then answers later or never.
    """

    def __init__(self) -> None:
        self._asked = _submit_to_waiting_thread(open_here) if _is_awaited_by_a_thread() else None

    def known(self) -> list[Transaction]:
        asked = self._asked
        return open_here() + (asked.result() if asked and asked.done() and not asked.cancelled() else [])

    async def is_known(self, within: float | None) -> bool:
        """Wait for the answer, at most so many seconds."""
        if self._asked and not self._asked.done():
            await asyncio.wait([asyncio.wrap_future(self._asked)], timeout=within)
        return self._asked is None or self._asked.done()


def refuse(lock: str, opened: Sequence[Transaction]) -> NoReturn:
    databases = ", ".join(repr(connection.alias) for each in opened if (connection := each()))
    raise TransactionManagementError(
        f"{lock} is asked for inside a transaction of the database {databases}, which in_atomic='refuse' forbids. Take"
        " the lock first and open the transaction inside it, or use in_atomic='defer'."
    )


def refuse_unknown(lock: str, name: str, using: str) -> NoReturn:
    raise LockTimeout(
        f"Whether {lock} is asked for inside a transaction, which in_atomic='refuse' forbids, is not known: the thread"
        " that waits for this task in async_to_sync was busy with something else. Wait longer, or keep it free of slow"
        " work.",
        name=name,
        using=using,
    )


def retain_until_commit(lease: Lease) -> None:
    """Retain the lease, unless it is lost, until the transactions that are open in this thread have ended.

    With autocommit off, the end of ``atomic()`` is not a COMMIT, and Django calls no hooks at a COMMIT.
    """
    for connection in _initialized():
        if _is_open(connection) and connection.commit_on_exit and lease.is_held:
            opened = ref(connection)
            if opened not in lease._retainers:
                _give(connection, Deferral(lease, opened))


async def aretain_until_commit(lease: Lease) -> None:
    """``retain_until_commit()`` for tasks. If it is cancelled, the thread that has the transactions finishes it."""
    retain_until_commit(lease)
    if not _is_awaited_by_a_thread() or not lease.is_held:
        return
    # Belongs to the work given to that thread, which may drop it undone when it no longer waits.
    meanwhile = Retainer(lease)
    if (held := _submit_to_waiting_thread(retain_until_commit, lease)) is not None:
        try:
            await asyncio.shield(asyncio.wrap_future(held))
        except BaseException:
            held.add_done_callback(lambda _: meanwhile.release(promptly=False))
            raise
    meanwhile.drop()


class AllDatabases(set[str]):
    """The databases whose ATOMIC_REQUESTS the user switched off for a view.

    To Django it seems to hold them all, so that it opens no transaction around the view: the decorator opens
    it inside the lock.
    """

    def __contains__(self, alias: object) -> bool:
        return True

    def leaves(self, alias: str) -> bool:
        return not super().__contains__(alias)


def take_over(function: Any, view: Any) -> None:
    """Mark the view that is made from the function."""
    view._non_atomic_requests = AllDatabases(getattr(function, "_non_atomic_requests", ()))


def taken_over(view: Any) -> list[str]:
    """The databases for which the decorator must open a transaction because Django did not."""
    switched_off = getattr(view, "_non_atomic_requests", None)
    if not isinstance(switched_off, AllDatabases):
        return []
    wanted = [alias for alias, database in connections.settings.items() if database["ATOMIC_REQUESTS"]]
    return [alias for alias in wanted if switched_off.leaves(alias) and not _is_open(connections[alias])]


@contextmanager
def opened(aliases: Sequence[str], leases: Sequence[Lease], released: ExitStack) -> Iterator[None]:
    """Transactions around the body of a view. They are rolled back if a lock of the view is lost.

    ``released`` ends when the lock is released. Then the hooks of the transactions run.
    """
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(_opened(alias, released))
        yield
        _ensure_held(leases)


def _ensure_held(leases: Sequence[Lease]) -> None:
    for lease in leases:
        if raises_when_lost(lease):
            lease.ensure_held()


@contextmanager
def _opened(alias: str, released: ExitStack) -> Iterator[None]:
    connection = connections[alias]
    is_outermost = not connection.in_atomic_block
    with transaction.atomic(using=alias):
        yield
        if is_outermost and connection.commit_on_exit and (hooks := _take_hooks(connection)):
            transaction.on_commit(partial(released.callback, _run_hooks, connection, hooks), using=alias)


def _take_hooks(connection: BaseDatabaseWrapper) -> list[Any]:
    """Deferrals stay, because only their connection may refer to them."""
    hooks = _hooks_of_program(connection)
    connection.run_on_commit = [entry for entry in connection.run_on_commit if _is_deferral(entry[1])]
    return hooks


def _run_hooks(connection: BaseDatabaseWrapper, hooks: list[Any]) -> None:
    connection.run_on_commit = hooks + connection.run_on_commit
    connection.run_and_clear_commit_hooks()


class Deferral(Retainer):
    """Only its connection owns it, calls it after COMMIT, and drops it at ROLLBACK and at ``close()``.

    Django has no hook for a rollback, but it drops its hooks at every end of a transaction. A hook that belongs to no
    savepoint survives the rollback of every savepoint.
    """

    what = TRANSACTION

    def __init__(self, lease: Lease, opened: Transaction) -> None:
        self._transaction = opened  # first: an interrupt in the next line leaves it to __del__
        super().__init__(lease, opened)

    def over(self) -> None:
        self.release()

    def __del__(self) -> None:
        if self._lease and not sys.is_finalizing():
            is_collected = self._transaction() is None  # with its connection, and maybe by the garbage collector
            self.release(promptly=not is_collected)


class _Block(Atomic):
    """Stands for the outermost block of a test inside the blocks of its TestCase, which never commit."""

    def __init__(self, block: Atomic) -> None:
        super().__init__(block.using, block.savepoint, block.durable)  # type: ignore[attr-defined]  # the stubs lag
        self.deferrals: list[Deferral] = []


def _give(connection: BaseDatabaseWrapper, deferral: Deferral) -> None:
    outermost = _outermost(connection)
    if outermost == 0:
        # First: else a hook that raises would keep it.
        hooks: list[Any] = connection.run_on_commit
        hooks.insert(0, (set(), deferral.over, True))
        return
    block = connection.atomic_blocks[outermost]
    if not isinstance(block, _Block):
        block = connection.atomic_blocks[outermost] = _Block(block)
    block.deferrals.append(deferral)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if not connection.in_atomic_block or connection.closed_in_transaction:
        return False
    return not connection.atomic_blocks or _outermost(connection) < len(connection.atomic_blocks)


def _outermost(connection: BaseDatabaseWrapper) -> int:
    """The index of the first block that is not a TestCase's own."""
    blocks: list[Any] = connection.atomic_blocks
    return next((place for place, block in enumerate(blocks) if not block._from_testcase), len(blocks))


def _is_awaited_by_a_thread() -> bool:
    """Whether a thread waits in ``async_to_sync`` for the task that runs; its transactions are around the task."""
    if isinstance(_of_awaited_tasks, ContextVar) and _of_awaited_tasks.get(None) is None:
        return False
    return getattr(AsyncToSync.executors, "current", None) is not None


def _submit_to_waiting_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R] | None:
    """None if the thread no longer waits: the task has outlived the call that began it."""
    try:
        submitted: Future[R] = AsyncToSync.executors.current.submit(work, *args, **kwargs)
    except RuntimeError:
        return None
    return submitted


def _drop_leftovers(**_: Any) -> None:
    """A commit that failed in an unusual way leaves its hooks behind until the connection is closed."""
    for connection in _initialized():
        if not connection.in_atomic_block and any(_is_deferral(entry[1]) for entry in connection.run_on_commit):
            connection.run_on_commit = _hooks_of_program(connection)


def _hooks_of_program(connection: BaseDatabaseWrapper) -> list[Any]:
    return [entry for entry in connection.run_on_commit if not _is_deferral(entry[1])]


def _is_deferral(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Deferral)


request_finished.connect(_drop_leftovers)
