"""Unique tasks of ``django.tasks``: at the top of a module, where it wants them. Django 6."""

from __future__ import annotations

from django_distlock import distributed_lock
from django_distlock.django_tasks import unique_task

runs = []  # what bodies noted


@unique_task("work:{number}", ttl=1000)
def work(number=7, what="return"):
    runs.append((number, what))
    return _done(work, number, what)


def _done(task, number, what):
    if what == "raise":
        raise ValueError(what)
    if what == "object":
        return object()
    if what == "look":
        found = task.unique_find(number)
        return found and [found.task_id, found.state]
    if what == "again":
        again = task.enqueue(number)
        return again and again.id
    return what


@unique_task("work:{number}", ttl=1000, on_duplicate="raise")
def raising(number):
    runs.append((number, "raising"))


@unique_task("work:{number}", ttl=1000, on_duplicate="drop")
def dropping(number):
    runs.append((number, "dropping"))


@unique_task("start:{number}", until="start", ttl=1000)
def at_start(number, what="return"):
    runs.append((number, what))
    return _done(at_start, number, what)


@unique_task("success:{number}", until="success", ttl=1000)
def at_success(number, what="return"):
    runs.append((number, what))
    return _done(at_success, number, what)


@unique_task("guarded:{number}", until="start", ttl=1000)
@distributed_lock("run:{number}", on_busy="skip")
def guarded(number, what="return"):
    runs.append((number, what))
    return _done(guarded, number, what)


@unique_task("awaited:{number}", until="start", ttl=1000)
@distributed_lock("run:{number}", on_busy="skip")
async def guarded_awaited(number):
    runs.append((number, await guarded_awaited.aunique_find(number)))


@unique_task("context:{number}", takes_context=True)
def with_context(context, number):
    return [context.task_result.id, with_context.unique_find(number).task_id]


@unique_task("awaited:{number}")
async def awaited(number):
    found = await awaited.aunique_find(number)
    return [number, found.state]


def account_of(number):
    return f"account {number}"


@unique_task(name=account_of, takes_context=True)
def by_callable(context, number):
    runs.append(number)


@unique_task
def whole(number=1):
    runs.append(number)


@unique_task("constant")
def constant(number=1):
    runs.append(number)


@unique_task("away:{number}", using="away")
def away(number):
    runs.append(number)


@unique_task("away:{number}", using="away", on_unavailable="run")
def away_but_run(number):
    runs.append(number)
    return number


@unique_task("brief:{number}", using="brief", ttl=1000)
def brief(number):
    runs.append(number)
    return number
