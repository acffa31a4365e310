"""What people read as the purpose of a holder that has named none: never the name of a server alone."""

from __future__ import annotations

import asyncio
import sys

import pytest

from django_distlock import lock
from django_distlock.core import labels
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


@pytest.mark.parametrize("server", ["/usr/bin/gunicorn", "uvicorn", "/srv/celery/__main__.py", "manage.py"])
def test_in_a_server_it_is_the_function(runs, server):
    runs(server)
    assert pay() == f"{HERE}.pay"
    assert asyncio.run(apay()) == f"{HERE}.apay"
    with AT_IMPORT as lease:
        assert lease.holder.label == HERE


@pytest.mark.parametrize("command", labels.SERVERS)
def test_in_the_server_of_django_it_is_the_function(runs, command):
    runs("manage.py", command, "8000")
    assert pay() == f"{HERE}.pay"


@pytest.mark.parametrize("program", ["/srv/manage.py", "django-admin"])
def test_in_a_command_it_is_the_command(runs, program):
    runs(program, "import_orders", "--password", "secret")
    assert pay() == f"{program.rpartition('/')[2]} import_orders"


def test_in_a_script_it_is_the_script(runs):
    runs("/srv/import.py", "secret")
    namespace = {"__name__": "__main__", "lock": lock}
    exec("with lock('x') as lease: label = lease.holder.label", namespace)
    assert namespace["label"] == "import.py"
