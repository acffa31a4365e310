"""What people read as the purpose of a holder that has named none: never the name of a server alone."""

from __future__ import annotations

import asyncio
import sys

import pytest

from django_distlock import current_lease, distributed_lock, lock
from django_distlock.core import labels
from django_distlock.testing import held_elsewhere
from django_distlock.types import program

HERE = __name__
AT_IMPORT = lock("made when the module was imported")

pytestmark = pytest.mark.usefixtures("locmem_locks")


@pytest.fixture
def runs(monkeypatch):
    """As if this process were started as that."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [*arguments])
        for known in (program, labels.of_function):
            known.cache_clear()

    yield run
    monkeypatch.undo()
    run(*sys.argv)


def pay():
    with lock("order:{}", 7) as lease:
        return lease.holder.label


async def apay():
    async with lock("order:{}", 7) as lease:
        return lease.holder.label


@distributed_lock("order:{pk}")
def ship(pk):
    return current_lease().holder.label


@distributed_lock("order:{pk}")
async def aship(pk):
    return current_lease().holder.label


@distributed_lock("order:{pk}")
def ships(pk):
    yield current_lease().holder.label


def of_decorated_functions():
    return {ship(7), asyncio.run(aship(7)), *ships(7)}


@pytest.mark.parametrize("server", ["/usr/bin/gunicorn", "uvicorn", "/srv/celery/__main__.py", "manage.py"])
def test_in_a_server_it_is_the_function(runs, server):
    runs(server)
    assert pay() == f"{HERE}.pay"
    assert asyncio.run(apay()) == f"{HERE}.apay"
    assert of_decorated_functions() == {f"{HERE}.{name}" for name in ("ship", "aship", "ships")}
    with AT_IMPORT as lease:
        assert lease.holder.label == HERE


@pytest.mark.parametrize("command", labels.SERVERS)
def test_in_a_command_that_serves_it_is_the_function(runs, command):
    """It answers requests or runs tasks, so that its name says no more than that of gunicorn or celery."""
    runs("manage.py", command, "8000")
    assert pay() == f"{HERE}.pay"


@pytest.mark.parametrize("program", ["/srv/manage.py", "django-admin"])
def test_in_a_command_it_is_the_command(runs, program):
    runs(program, "import_orders", "--password", "secret")
    command = f"{program.rpartition('/')[2]} import_orders"
    assert pay() == command
    assert of_decorated_functions() == {command}


def test_what_is_skipped_in_a_command_is_the_function(runs, caplog):
    caplog.set_level("INFO")
    runs("manage.py", "import_orders")
    with held_elsewhere("name"):
        distributed_lock("name", on_busy="skip")(pay)()
    assert f"{HERE}.pay is skipped. The lock 'name' (default) is busy" in caplog.text


def test_in_a_script_it_is_the_script(runs):
    runs("/srv/import.py", "secret")
    namespace = {"__name__": "__main__", "lock": lock}
    exec("with lock('x') as lease: label = lease.holder.label", namespace)
    assert namespace["label"] == "import.py"
