"""Databases with the tables of ``tests.support.fenced``."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings

from tests.support.databases import ALIAS, known_database


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"])
def tables(request, tmp_path_factory, django_db_blocker):
    """Made once on each database: the alias leads there, and a router chooses it for them."""
    if request.param == "sqlite":
        there = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path_factory.mktemp("fenced") / "rows")}
    else:
        there = request.getfixturevalue(request.param).settings()
    apps, routers = [*settings.INSTALLED_APPS, "tests.support.fenced"], ["tests.support.fenced.models.Router"]
    with override_settings(INSTALLED_APPS=apps, DATABASE_ROUTERS=routers):
        from tests.support.fenced.models import MODELS

        with django_db_blocker.unblock(), known_database(there):
            with connections[ALIAS].schema_editor() as schema:
                for model in MODELS:
                    schema.create_model(model)
            yield request.param
            with connections[ALIAS].schema_editor() as schema:
                for model in reversed(MODELS):
                    schema.delete_model(model)


@pytest.fixture
def database(tables):
    """Its name. It has the tables, which are empty, and a connection of this test's own."""
    from tests.support.fenced.models import MODELS

    yield tables
    connections[ALIAS].close()
    with connections[ALIAS].cursor() as cursor:
        for model in reversed(MODELS):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


@pytest.fixture(params=["autocommit", "atomic"])
def wherever(request, database):
    """In a transaction, and in none."""
    with transaction.atomic(ALIAS) if request.param == "atomic" else nullcontext():
        yield
