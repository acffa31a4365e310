"""Calls of a decorated function: acquires the lock of each call, and gives the answer if that fails."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from typing import Any, Literal

from asgiref.sync import sync_to_async

from .. import names
from ..core import labels, transactions
from ..core.group import Leases, LockGroup, leases_of
from ..core.lease import Lease
from ..core.lock import Lock
from ..exceptions import LockBackendError, LockError, LockNotAcquired, UnusableLockName
from ..options import Options, settled
from ..types import shown
from ..utils.events import about_event
from . import answers, http, key, task_context

logger = logging.getLogger("django_distlock")

MakeKey = Callable[[tuple[Any, ...], dict[str, Any]], str]


class Skip:
    """An ``on_busy`` or ``on_unavailable`` that returns a value. The skipped call is logged."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __call__(self, problem: LockError, /, *args: Any, **kwargs: Any) -> Any:
        return self.value


class LockedCallable:
    """One decorated function, coroutine function or generator."""

    _known_view = ""

    def __init__(
        self,
        function: Callable[..., Any],
        name: Any,
        using: str,
        on_busy: Any,
        on_unavailable: Any,
        hold_until: Literal["response", "return"],
        options: Options,
        slots_of: Callable[..., int] | None = None,
        retry_for: float | None = None,
        stands_by: bool = False,
    ) -> None:
        self.function = function
        self.kind = key.kind_of(function)
        self.decorated: Any = None
        self._make_key: MakeKey | None = None
        self._template = ""
        if isinstance(name, list | tuple):
            self._keys = [_key(function, names.check_name(each) if each is None else each) for each in name]
        else:
            self._make_key, self._template = _key(function, name)
        self._using = using
        self._on_busy = on_busy
        self._on_unavailable = on_unavailable  # None also for "run", because the lock itself does that
        self._hold_until = hold_until
        self._options = options
        self._caller = key.module_and_name(function)
        self._slots_of = slots_of
        self._retry_for = retry_for
        self._stands_by = stands_by  # whether a run of a task waits for a moment before it is sent again
        self._given_label = str(options.given.get("label", ""))
        self.takes_over = options.given.get("in_atomic") != "ignore"
        if on_unavailable == "retry" and self.kind is not key.Kind.FUNCTION:
            raise ValueError(
                f"on_unavailable is 'retry', which sends tasks of Celery again, and {key.dotted_path(function)} is"
                f" no function that could be one: choose 'raise', 'run', 'skip', skip(value) or a callable."
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if http.is_async_dispatch(self.function, args):
            return self.acall(args, kwargs)
        request = http.request_of(args, kwargs)
        run = task_context.celery_run_of(self.decorated)
        if databases := self._databases(request):
            with ExitStack() as released:
                return self._call(args, kwargs, request, run, databases, released)
        return self._call(args, kwargs, request, run)

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        request: Any,
        run: Any,
        databases: Sequence[str] = (),
        released: ExitStack | None = None,
    ) -> Any:
        try:
            lock = self._lock(args, kwargs, request, run, stands_by=self._stands_by)
            try:
                lease = lock.__enter__()
            except LockBackendError as failure:
                if not (run and run.had_little_time(failure)):
                    raise
                lock = self._lock(args, kwargs, request, run)
                lease = lock.__enter__()
        except (LockNotAcquired, LockBackendError, UnusableLockName) as problem:
            if run and isinstance(problem, LockNotAcquired):
                try:
                    run.handle_busy(problem, retries=self._on_busy == "retry")
                except LockBackendError as failure:
                    return self._answer(failure, request, args, kwargs, run)
            return self._answer(problem, request, args, kwargs, run)
        try:
            if begins := task_context.beginning_of(self.decorated):
                begins()
            if run or released:
                with ExitStack() as stack:
                    if run:
                        stack.enter_context(run.holding(lease))
                    if released:
                        stack.enter_context(transactions.opened(databases, leases_of(lease), released))
                    result = self._result(args, kwargs)
            else:
                result = self._result(args, kwargs)
            self._retain(lease, result, request)
        except BaseException as error:
            lock.__exit__(None, error, None)  # no call before this one: a second interrupt could arrive in it
            raise
        lock.__exit__(None, None, None)
        return result

    async def acall(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = http.request_of(args, kwargs)
        if self._databases(request):
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")  # Django's own message
        async with AsyncExitStack() as stack:
            try:
                lease: Lease | Leases = await stack.enter_async_context(self._lock(args, kwargs, request))
            except (LockNotAcquired, LockBackendError, UnusableLockName) as problem:
                return await self._aanswer(problem, request, args, kwargs)
            if begins := task_context.beginning_of(self.decorated):
                await sync_to_async(begins)()
            result = self.function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            self._retain(lease, result, request)
            return result

    def iterate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[Any, Any, Any]:
        request = http.request_of(args, kwargs)
        with ExitStack() as stack:
            lock = self._lock(args, kwargs, request)
            try:
                stack.enter_context(lock)
            except (LockNotAcquired, LockBackendError) as problem:
                return (yield from self._answer(problem, request, args, kwargs) or ())
            return (yield from self.function(*args, **kwargs))

    @asynccontextmanager
    async def aiterated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[AsyncGenerator[Any, Any]]:
        request = http.request_of(args, kwargs)
        async with AsyncExitStack() as stack:
            lock = self._lock(args, kwargs, request)
            try:
                await stack.enter_async_context(lock)
            except (LockNotAcquired, LockBackendError) as problem:
                items = _each(await self._aanswer(problem, request, args, kwargs))
            else:
                items = self.function(*args, **kwargs)
            yield await stack.enter_async_context(aclosing(items))

    def _lock(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], request: Any, run: Any = None, *, stands_by: bool = False
    ) -> Lock | LockGroup:
        label, message, options = self._label(args, request, run), run.message if run else "", self._options
        if self._slots_of is not None:
            options = settled(**{**options.given, "slots": self._slots_of(*args, **kwargs)})
        if self._make_key:
            name = self._make_key(args, kwargs)
            if run:
                options = run.waiting([name], options, self._retry_for, stands_by=stands_by)
            return Lock(name, self._using, options, label, message, template=self._template)
        lock_names = [make_key(args, kwargs) for make_key, _ in self._keys]
        if run:
            options = run.waiting(lock_names, options, self._retry_for, stands_by=stands_by)
        handles = [
            Lock(name, self._using, options, label, message, template=template)
            for name, (_, template) in zip(lock_names, self._keys, strict=True)
        ]
        return LockGroup(handles, options.own.wait)

    def _view(self) -> str:
        """Returns the dotted path of the function; for a method, with the class of the view."""
        self._known_view = self._known_view or key.dotted_path_of_view(self.function)
        return self._known_view

    def _label(self, args: tuple[Any, ...], request: Any, run: Any) -> str:
        return self._label_of_call(args, request, run) or labels.here(self._caller)

    def _label_of_call(self, args: tuple[Any, ...], request: Any, run: Any) -> str:
        """Returns the label of the call; "" if only the function is known."""
        if run:
            return f"{self._given_label} {run.label}".strip()
        if self._given_label:
            return self._given_label
        if request is not None:
            return http.label(request, self._view())
        return task_context.label(args)

    def _answer(
        self, problem: Exception, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None
    ) -> Any:
        """Returns a result in place of the function's result. Raises the problem itself if there is none."""
        choice = self._chosen(problem)
        if run and choice == "retry":
            run.retry(problem, self._retry_for)
        if isinstance(choice, Skip):
            level = logging.INFO if isinstance(problem, LockNotAcquired) else logging.WARNING
            skipped = self._label_of_call(args, request, run) or key.dotted_path(self.function)
            about = self._about("skipped", reason=getattr(problem, "reason", None))
            logger.log(level, "%s is skipped. %s", shown(skipped), problem, extra=about)
        if callable(choice):
            return choice(problem, *args, **kwargs)
        if choice is None and request is not None and http.is_view(request, self.decorated):
            form = self._on_busy if isinstance(self._on_busy, answers.Respond) else answers.DEFAULT
            return form.answer(request, problem, self._view())
        raise problem

    def _about(self, event: str, **more: object) -> dict[str, Any]:
        return about_event(event, alias=self._using, template=self._template or None, **more)

    def _chosen(self, problem: Exception) -> Any:
        """Returns what to do about the problem: "raise", "retry", or a callable. None: no option says it."""
        if isinstance(problem, LockNotAcquired):
            return self._on_busy
        choice = self._on_unavailable
        if choice is not None and isinstance(problem, LockBackendError) and (choice == "raise" or not problem.is_final):
            return choice
        return "raise" if self._on_busy in ("raise", "retry") else None

    async def _aanswer(self, problem: Exception, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self._on_busy, answers.Respond) or isinstance(self._on_unavailable, answers.Respond):
            # Templates may do what must not be done in an event loop
            return await sync_to_async(self._answer)(problem, request, args, kwargs)
        result = self._answer(problem, request, args, kwargs)
        return await result if inspect.isawaitable(result) else result

    def _databases(self, request: Any) -> list[str]:
        """The databases in which the view needs a transaction that Django left to the decorator."""
        if request is None or not self.takes_over:
            return []
        aliases = transactions.taken_over(http.routed_view(request))
        return aliases if aliases and http.is_view(request, self.decorated) else []

    def _result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of the function.

        Raises TypeError for an awaitable, because its work would begin after the release of the lock.
        """
        result = self.function(*args, **kwargs)
        if http.is_response(result) or not inspect.isawaitable(result):  # the first check is fast
            return result
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            f"{key.dotted_path(self.function)} is no 'async def' but returned an awaitable, which would run without the"
            " lock. Put @distributed_lock on the coroutine function itself, or mark this one by"
            " asgiref.sync.markcoroutinefunction."
        )

    def _retain(self, lease: Lease | Leases, result: Any, request: Any) -> None:
        if self._hold_until == "response" and http.is_unfinished(result):
            for each in leases_of(lease):
                http.retain_until_finished(each, result, request)


def _key(function: Callable[..., Any], name: Any) -> tuple[MakeKey, str]:
    """Returns a function that makes the name of the lock of a call, and the template of the name."""
    return key.make_key(function, name), names.template_of(name) if isinstance(name, str) else ""


async def _each(answer: Any) -> AsyncGenerator[Any, Any]:
    """The items of the answer to a busy lock, in place of those of an async generator."""
    if hasattr(answer, "__aiter__"):
        async for item in answer:
            yield item
    else:
        for item in answer or ():
            yield item
