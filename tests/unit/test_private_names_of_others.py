"""What the package uses of others although it is private there: all of it is listed here, each with what is relied on.

A release of theirs may change it without a word. Then the test of its name says which part of the package to look at.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import celery
import django
import ninja
import pytest
import redis
import redis.asyncio
from asgiref.sync import AsyncToSync
from celery import Celery, current_task, shared_task
from celery.beat import Scheduler
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth.models import User
from django.core.handlers.base import BaseHandler
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, StreamingHttpResponse
from django.test import RequestFactory
from django.urls import path
from pymysql.connections import Connection as PyMySQLConnection

import django_distlock
from django_distlock.core.transactions import AllDatabases
from django_distlock.decorators import http
from example_project.valkey import Valkey
from tests.support.tools import PATIENCE

PRIVATE = re.compile(r"_[a-zA-Z]\w*")
PUBLIC = {"_meta", "_state", "_base_manager", "_asdict", "_fields", "_make", "_replace"}  # so their documentation says
CALLS = ("getattr", "hasattr", "setattr", "delattr")
OF_PYTHON = {"_getframe", "_is_owned"}
OTHERS = ("django", "redis", "rest_framework", "ninja", "asgiref", "celery", "django_celery_beat", "kombu", "pymysql")
CLOSURE = "<closure>"


class Used(NamedTuple):
    """``what_for`` ends the sentence "The package uses it to ...". ``check`` raises where it has changed."""

    library: str
    name: str
    where: str
    what_for: str
    check: Callable[[], None]


# Django


def connections_of_threads() -> None:
    """They are attributes of a threading.local, by their alias."""
    known = connections._connections._storage
    assert isinstance(known, threading.local)
    assert vars(known)["default"] is connections["default"]


def blocks_of_a_test_case() -> None:
    """Django's TestCase has opened one around this test."""
    assert connections["default"].atomic_blocks[0]._from_testcase is True
    assert transaction.atomic()._from_testcase is False


def views_without_atomic_requests() -> None:
    @transaction.non_atomic_requests(using="other")
    def view(request: HttpRequest) -> None: ...

    assert view._non_atomic_requests == {"other"}
    view._non_atomic_requests = AllDatabases()
    database = connections.settings["default"]
    before, database["ATOMIC_REQUESTS"] = database["ATOMIC_REQUESTS"], True
    try:
        assert BaseHandler().make_view_atomic(view) is view
    finally:
        database["ATOMIC_REQUESTS"] = before


def parts_of_a_stream() -> None:
    response = StreamingHttpResponse(iter([b"before"]))
    assert list(response._iterator) == [b"before"]
    response._iterator = iter([b"after"])
    assert list(response) == [b"after"]


class Rows(list):
    def _clone(self) -> str:
        return "rows of the page"


def rows_of_the_admin() -> None:
    page = ChangeList.__new__(ChangeList)
    page.model_admin = SimpleNamespace(get_paginator=lambda _, *rows: Paginator(*rows), show_full_result_count=False)
    page.queryset, page.list_per_page, page.list_max_show_all, page.show_all = Rows(), 10, 10, False
    page.get_results(RequestFactory().get("/"))
    assert page.result_list == "rows of the page"


def clone_of_rows() -> None:
    class Marked(QuerySet):  # type: ignore[type-arg]
        def _clone(self) -> Marked:
            clone = super()._clone()  # type: ignore[misc]
            clone.mark = "kept"
            return clone  # type: ignore[no-any-return]

    assert Marked(User).filter(pk=1).order_by("pk").mark == "kept"


# redis-py


def connected(server: Valkey) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.connect(str(server.socket))
    opened.settimeout(PATIENCE)
    return opened


def socket_of_a_connection() -> None:
    """It talks over what this method returns."""
    with Valkey() as server:
        for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
            connection = type("Connection", (kind,), {"_connect": lambda _: connected(server)})(protocol=2)
            connection.connect()
            connection.send_packed_command([b"PING\r\n"], check_health=False)
            assert connection.read_response(disable_decoding=True) == b"PONG"
            connection.disconnect()


def streams_of_a_connection() -> None:
    """It talks over the streams that this method notes."""

    async def connect(connection: redis.asyncio.Connection) -> None:
        connection._reader, connection._writer = await asyncio.open_unix_connection(sock=connected(server))

    async def talk(kind: type) -> None:
        connection = type("Connection", (kind,), {"_connect": connect})(protocol=2)
        await connection.connect()
        await connection.send_packed_command([b"PING\r\n"], check_health=False)
        assert await connection.read_response(disable_decoding=True) == b"PONG"
        await connection.disconnect()

    with Valkey() as server:
        for kind in (redis.asyncio.Connection, redis.asyncio.SSLConnection, redis.asyncio.UnixDomainSocketConnection):
            asyncio.run(talk(kind))


# Others


def operations_of_a_path() -> None:
    """The view of a path is a function of ``ninja.operation`` with the object in a variable ``self``."""
    api = ninja.NinjaAPI(urls_namespace="private")

    @api.get("/there")
    def there(request: HttpRequest) -> None: ...

    [url] = [url for url in api.urls[0] if url.pattern.match("there")]
    match = path("", url.callback).resolve("")
    assert http.is_for_programs(SimpleNamespace(resolver_match=match, get_host=None))


def task_that_waits() -> None:
    """Which thread waits for a task is in a ContextVar."""
    assert isinstance(AsyncToSync.executors._storage._data, ContextVar)


def task_that_runs() -> None:
    @shared_task(name="runs")
    def work() -> None:
        found.append(current_task._get_current_object())

    found: list[object] = []
    work.apply()
    assert found == [work]


def run_of_a_task() -> None:
    def work() -> None: ...

    task = shared_task(name="retries", autoretry_for=(OSError,))(work)
    assert task._orig_run is work


def heap_of_beat() -> None:
    """It is filled anew where it is None."""
    app = Celery(set_as_current=False)
    scheduler = Scheduler(app, lazy=True)
    scheduler._heap = None
    scheduler.tick()
    assert scheduler._heap == []


def socket_of_pymysql() -> None:
    assert PyMySQLConnection(defer_connect=True)._sock is None


USED = [
    Used("django", "_connections", "core/transactions.py", "find open transactions quickly", connections_of_threads),
    Used("django", "_from_testcase", "core/transactions.py", "tell a test from a transaction", blocks_of_a_test_case),
    Used(
        "django",
        "_non_atomic_requests",
        "core/transactions.py",
        "open the transaction of a view inside its lock",
        views_without_atomic_requests,
    ),
    Used("django", "_iterator", "decorators/http.py", "hold a lock until a stream is read", parts_of_a_stream),
    Used("django", "_clone", "monitoring/admin_querysets.py", "offer its rows to the admin's list", rows_of_the_admin),
    Used("django", "_clone", "fencing.py", "keep the number of a fenced queryset", clone_of_rows),
    Used("redis", "_connect", "backends/redis/connection.py", "open sockets in time", socket_of_a_connection),
    Used("redis", "_reader", "backends/redis/connection.py", "open streams in time", streams_of_a_connection),
    Used("redis", "_writer", "backends/redis/connection.py", "open streams in time", streams_of_a_connection),
    Used("ninja", CLOSURE, "decorators/http.py", "know the view of a request", operations_of_a_path),
    Used("asgiref", "_storage", "core/transactions.py", "find open transactions quickly", connections_of_threads),
    Used("asgiref", "_data", "core/transactions.py", "know quickly that no thread waits for a task", task_that_waits),
    Used("celery", "_get_current_object", "decorators/task_context.py", "keep the task that runs", task_that_runs),
    Used("celery", "_orig_run", "celery/tasks.py", "tell a task from a helper", run_of_a_task),
    Used("celery", "_heap", "celery/beat.py", "let beat look at its entries again", heap_of_beat),
    Used("pymysql", "_sock", "backends/database/connections.py", "leave a parent's socket", socket_of_pymysql),
]


@pytest.mark.django_db
@pytest.mark.parametrize("used", USED, ids=lambda used: f"{used.library}-{used.name}")
def test_it_is_as_it_was(used: Used) -> None:
    try:
        used.check()
    except Exception as error:  # whatever their change leads to
        library = importlib.import_module(used.library)
        version = getattr(library, "__version__", None) or getattr(library, "VERSION", "")
        pytest.fail(
            f"{used.library} {version} has changed {used.name}, which is private there. The package uses it to"
            f" {used.what_for}: see {used.where}. {type(error).__name__}: {error}"
        )


@pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="the schedulers of beat cannot be imported there")
def test_all_that_is_used_is_listed() -> None:
    """Take a public way. Where there is none, list the name with a check of what is relied on."""
    found = private_names_of_others(Path(django_distlock.__file__).parent)
    listed = {used.name for used in USED}
    assert {name: sorted(places) for name, places in found.items() if name not in listed} == {}
    assert listed - found.keys() == set(), "take it from the list"


def private_names_of_others(package: Path) -> dict[str, set[str]]:
    """Where each is used in this package, as far as its code tells. The package is one that can be imported."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in package.rglob("*.py")}
    own: defaultdict[Path, set[str]] = defaultdict(set)
    for file, tree in trees.items():
        own[file.parent] |= attributes_of(tree)
    for file, tree in trees.items():
        for name, line in touched(tree, own[file.parent] | PUBLIC | OF_PYTHON):
            found[name].add(f"{file.relative_to(package)}:{line}")
    for made in classes_of(package):
        others = {name for base in made.__mro__ if is_of_others(base) for name in private_names_of(base)}
        inherited = {name for base in made.__mro__ if is_own(base) for name in private_names_of(base)}
        for name in inherited & others - PUBLIC:
            found[name].add(f"{made.__module__}.{made.__qualname__}")
    return dict(found)


def attributes_of(tree: ast.Module) -> set[str]:
    """Private names that its classes have."""
    found = set()
    for made in ast.walk(tree):
        if isinstance(made, ast.ClassDef):
            for node in ast.walk(made):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.add(name)
                    case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                        found.add(name)
                    case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                        found.add(name)
    return {name for name in found if PRIVATE.fullmatch(name)}


def touched(tree: ast.Module, own: set[str]) -> Iterator[tuple[str, int]]:
    """Private names of what is no object of the package: those that it defines in the same folder are its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue  # see the classes
            case ast.Attribute(attr=name) if PRIVATE.fullmatch(name) and name not in own:
                yield name, node.lineno
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                if function in CALLS and PRIVATE.fullmatch(name) and name not in own:
                    yield name, node.lineno
            case ast.Call(func=ast.Attribute(attr="getclosurevars")):
                yield CLOSURE, node.lineno
            case ast.ImportFrom(module=str(module), level=0) if module.startswith(OTHERS):
                for name in [*module.split("."), *(alias.name for alias in node.names)]:
                    if PRIVATE.fullmatch(name):
                        yield name, node.lineno


def classes_of(package: Path) -> Iterable[type]:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages([str(package)], f"{package.name}.")
        if django.VERSION >= (6, 0) or ".django_tasks" not in module.name
    ]
    return {value for module in modules for value in vars(module).values() if is_class_of(module, value)}


def is_class_of(module: ModuleType, value: object) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


def is_own(made: type) -> bool:
    return made.__module__.startswith("django_distlock")


def is_of_others(made: type) -> bool:
    return made.__module__.split(".")[0] in OTHERS


def private_names_of(made: type) -> set[str]:
    """What the class has, and what its methods touch."""
    found = set(vars(made))
    for value in vars(made).values():
        if getattr(value, "__module__", "") == "dataclasses":  # which made it
            continue
        if code := getattr(getattr(value, "__func__", value), "__code__", None):
            found.update(code.co_names)
    return {name for name in found if PRIVATE.fullmatch(name)}
