"""What the write of a holder does that was stopped after its read, and goes on when somebody else has had the lock.

    python late_holder.py '{"ENGINE": "django.db.backends.postgresql", "NAME": "trial", "USER": "…", "HOST": "…"}'

Makes its tables in that empty database, and keeps the locks there as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from django.conf import settings

TTL = 3

settings.configure(
    DATABASES={"default": json.loads(sys.argv[1])},
    INSTALLED_APPS=["django_distlock"],
    DISTRIBUTED_LOCKS={"default": {"BACKEND": "django_distlock.backends.database.DatabaseBackend", "TTL": TTL}},
    LOGGING_CONFIG=None,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection, models  # noqa: E402

from django_distlock import LockLost, lock  # noqa: E402
from django_distlock.fencing import FencedModel, StaleLease  # noqa: E402


class Account(models.Model):  # noqa: DJ008 - nobody reads its name
    balance = models.IntegerField(default=100)

    class Meta:
        app_label = "late_holder"


class FencedAccount(FencedModel):
    balance = models.IntegerField(default=100)

    class Meta:
        app_label = "late_holder"


def withdraw(amount: int) -> None:
    with lock("account:{}", 1, wait=60):
        account = Account.objects.get(pk=1)
        account.balance -= amount
        with before_the_write():
            account.save()


def withdraw_fenced(amount: int) -> None:
    with lock("account:{}", 1, wait=60) as lease:
        account = FencedAccount.objects.fenced(lease).claim(pk=1)
        account.balance -= amount
        with before_the_write():
            account.save(fence=lease)


WAYS: dict[str, tuple[Any, Any]] = {"Account": (withdraw, Account), "FencedAccount": (withdraw_fenced, FencedAccount)}
stops = len(sys.argv) > 2


@contextmanager
def before_the_write() -> Iterator[None]:
    """The late holder stops itself when its UPDATE is about to be sent, after all checks of its own."""

    def stop(execute: Any, sql: str, *rest: Any) -> Any:
        global stops
        if stops and sql.startswith("UPDATE"):
            stops = False
            os.kill(os.getpid(), signal.SIGSTOP)
        return execute(sql, *rest)

    with connection.execute_wrapper(stop):
        yield


def late_holder(way: str) -> None:
    """A process of its own."""
    try:
        WAYS[way][0](30)
    except StaleLease as error:
        print(f"StaleLease, refused={error.refused}")
    except LockLost:
        print("LockLost, after its write")


def main() -> None:
    call_command("migrate", verbosity=0)
    with connection.schema_editor() as schema:
        for _, model in WAYS.values():
            schema.create_model(model)
    for way, (withdraws, model) in WAYS.items():
        model.objects.create(pk=1)
        late = subprocess.Popen([sys.executable, *sys.argv, way], stdout=subprocess.PIPE, text=True)
        try:
            _, status = os.waitpid(late.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it has ended"
            withdraws(50)  # waits until the lease of the late holder has run out
            print(f"{way}: the successor leaves {model.objects.get(pk=1).balance};", end=" ")
            late.send_signal(signal.SIGCONT)
            told, _ = late.communicate()
        finally:
            late.kill()
        print(f"the late holder is told {told.strip()}; {model.objects.get(pk=1).balance} is left")


if __name__ == "__main__":
    late_holder(sys.argv[2]) if stops else main()
