"""How many updates are lost when a lock is released before COMMIT, and how many when it is not.

    python lost_updates.py '{"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "…", "HOST": "…"}'

Makes a table of its own in that database and drops it. A second argument is the number of requests of each thread. The
threads share one process, so the locks are in memory.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from django.conf import settings

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY="for this program only",
    DATABASES={"default": {**json.loads(sys.argv[1]), "ATOMIC_REQUESTS": True}},
    DISTRIBUTED_LOCKS={"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}},
)
django.setup()

from django.db import connection, models, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import Client  # noqa: E402
from django.urls import path  # noqa: E402
from django.utils.decorators import method_decorator  # noqa: E402
from django.views import View  # noqa: E402

from django_distlock import distributed_lock, lock  # noqa: E402

THREADS, REQUESTS = 8, int(sys.argv[2]) if sys.argv[2:] else 25


class Account(models.Model):  # noqa: DJ008 - nobody reads its name
    balance = models.IntegerField(default=0)

    class Meta:
        app_label = "lost_updates"


def add_one() -> None:
    account = Account.objects.get(pk=1)
    account.balance += 1
    account.save()


def deposit(request: HttpRequest) -> HttpResponse:
    add_one()
    return page()


@method_decorator(distributed_lock("account:1", wait=60), name="dispatch")
class DispatchView(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return deposit(request)


class HandlerView(View):
    @distributed_lock("account:1", wait=60)
    def post(self, request: HttpRequest) -> HttpResponse:
        return deposit(request)


def view_with_helper(request: HttpRequest) -> HttpResponse:
    distributed_lock("account:1", wait=60)(add_one)()
    return page()


def view_with_block(request: HttpRequest) -> HttpResponse:
    with transaction.atomic(), lock("account:1", wait=60):
        add_one()
    return page()


def careless_view(request: HttpRequest) -> HttpResponse:
    with lock("account:1", wait=60, in_atomic="ignore"):
        add_one()
    return page()


def page() -> HttpResponse:
    time.sleep(0.002)  # what else the view does before its transaction is committed
    return HttpResponse("deposited")


VIEWS: dict[str, Any] = {
    "released before COMMIT": careless_view,
    "@distributed_lock on a view": distributed_lock("account:1", wait=60)(deposit),
    "on dispatch of a class view": DispatchView.as_view(),
    "on a handler of a class view": HandlerView.as_view(),
    "on a function the view calls": view_with_helper,
    "with lock(...) in the view": view_with_block,
}
urlpatterns = [path(f"{number}/", view) for number, view in enumerate(VIEWS.values())]


def post(number: int) -> int:
    """How many requests were answered well; a stricter transaction refuses what would be lost."""
    client = Client(raise_request_exception=False, headers={"host": "localhost"})
    try:
        return sum(client.post(f"/{number}/").status_code == 200 for _ in range(REQUESTS))
    finally:
        connection.close()


def main() -> None:
    logging.disable(logging.ERROR)  # of what is refused
    with connection.schema_editor() as schema:
        schema.create_model(Account)
    try:
        for number, kind in enumerate(VIEWS):
            Account.objects.update_or_create(pk=1, defaults={"balance": 0})
            with ThreadPoolExecutor(THREADS) as threads:
                answered = sum(threads.map(post, [number] * THREADS))
            lost = answered - Account.objects.get(pk=1).balance
            print(f"{kind:30}{lost:4} of {THREADS * REQUESTS} lost, {THREADS * REQUESTS - answered:4} refused")
    finally:
        with connection.schema_editor() as schema:
            schema.delete_model(Account)
        connection.close()


if __name__ == "__main__":
    main()
