"""Databases with the tables of ``tests.support.fenced``."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from django.db import connections, transaction

from tests.support.databases import ALIAS


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def database(request, settings):
    """The alias of its name, which has the tables, and which a router chooses for them."""
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "tests.support.fenced"]
    from tests.support.fenced.models import MODELS

    request.getfixturevalue(f"{request.param}_database")
    settings.DATABASE_ROUTERS = ["tests.support.fenced.models.Router"]
    connection = connections[ALIAS]
    with connection.schema_editor() as schema:
        for model in MODELS:
            schema.create_model(model)
    yield request.param
    with connection.schema_editor() as schema:
        for model in reversed(MODELS):
            schema.delete_model(model)


@pytest.fixture(params=["autocommit", "atomic"])
def wherever(request, database):
    """In a transaction, and in none."""
    with transaction.atomic(ALIAS) if request.param == "atomic" else nullcontext():
        yield
