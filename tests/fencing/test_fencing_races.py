"""Two holders whose statements meet: the smaller number is refused, wherever the larger one comes in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from django_distlock.fencing import StaleLease
from tests.support.databases import ALIAS
from tests.support.fenced.models import Customer, Document, Export, Line, Order
from tests.support.tools import eventually

pytestmark = [pytest.mark.usefixtures("locmem_locks"), pytest.mark.slow]

servers = pytest.mark.parametrize("tables", ["postgres", "mariadb"], indirect=True)

WAITING = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
    "mariadb": "SELECT variable_value FROM information_schema.global_status"
    " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'",
}


@pytest.fixture
def elsewhere(database):
    """Runs work in a thread, on a connection of its own, and gives a future."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit
        pool.submit(connections.close_all).result()


@pytest.fixture
def another(database):
    """An alias of the same database, for a second connection of the thread."""
    connections.settings["another"] = connections.settings[ALIAS]
    yield "another"
    connections["another"].close()
    del connections["another"]
    del connections.settings["another"]


def waits(database, another):
    """Whether a session waits for a row."""
    with connections[another].cursor() as cursor:
        cursor.execute(WAITING[database])
        return int(cursor.fetchone()[0])


LATE = {
    "save": lambda export: save(export, status="late"),
    "update": lambda _: Order.objects.fenced(5).update(status="late"),
    "update by a join": lambda _: Order.objects.fenced(5).filter(customer__name="one").update(status="late"),
    "update of a child": lambda _: Export.objects.fenced(5).update(country="late", status="late"),
    "delete": lambda _: Order.objects.fenced(5).delete(),
    "delete by a join": lambda _: Order.objects.fenced(5).filter(customer__name="one").delete(),
    "delete of a child": lambda _: Export.objects.fenced(5).delete(),
    "claim": lambda export: Order.objects.fenced(5).claim(pk=export.pk),
    "claim by a join": lambda _: Order.objects.fenced(5).claim(customer__name="one"),
}


def save(export, **values):
    vars(export).update(values)
    export.save(fence=5)


@pytest.fixture
def export(database):
    found = Export.objects.create(customer=Customer.objects.create(name="one"), fence=5)
    Line.objects.create(order=found)
    return found


@servers
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_a_late_write_that_waits_for_a_row(database, another, elsewhere, export, late, ends):
    with transaction.atomic(ALIAS):
        Order.objects.fenced(9).claim(pk=export.pk)
        writing = elsewhere(LATE[late], export)
        eventually(lambda: waits(database, another))
        transaction.set_rollback(ends == "ROLLBACK", ALIAS)
    if ends == "COMMIT":
        with pytest.raises(StaleLease) as refusal:
            writing.result()
        assert refusal.value.refused == 1
        assert list(Export.objects.values_list("status", "country", "fence")) == [("new", "DE", 9)]
    else:
        writing.result()


def after_the_claim(what):
    """Of a fenced write that runs in ``with connection.execute_wrapper(...)``: something that somebody else does."""

    def execute_all(execute, sql, *rest):
        result = execute(sql, *rest)
        if sql.endswith("FOR UPDATE"):
            what()
        return result

    return execute_all


@servers
def test_a_row_that_comes_before_the_insert(another):
    """Somebody with a larger number inserts it. An UPDATE would write over it."""

    def insert():
        Order(pk=1, status="of the successor").save(fence=9, using=another)

    with pytest.raises(IntegrityError), connections[ALIAS].execute_wrapper(after_the_claim(insert)):
        Order(pk=1, status="late").save(fence=5)
    assert list(Order.objects.values_list("status", "fence")) == [("of the successor", 9)]


@servers
def test_a_row_that_comes_before_the_update(another):
    mine = Order.objects.create(fence=5)

    def insert():
        Order(total=1).save(fence=9, using=another)

    with connections[ALIAS].execute_wrapper(after_the_claim(insert)):
        assert Order.objects.fenced(5).filter(status="new").update(status="late") == 1
    assert list(Order.objects.order_by("pk").values_list("status", "fence")) == [("late", 5), ("new", 9)]
    assert mine in Order.objects.filter(status="late")


@servers
def test_a_row_that_comes_in_while_others_are_deleted(another):
    """It has the number of the late one, and begins to match; then somebody with a larger number claims it."""
    gone, kept = Order.objects.create(fence=5), Order.objects.create(status="old", fence=5)
    Line.objects.create(order=gone)
    happened = []

    def others_first(execute, sql, *rest):
        if sql.startswith("SELECT") and "FOR UPDATE" not in sql and not happened:
            happened.append("matches")
            Order.objects.using(another).filter(pk=kept.pk).update(status="new")
        if sql.startswith("DELETE") and "fenced_order" in sql:
            happened.append("claimed")
            Order.objects.using(another).fenced(9).claim(pk=kept.pk)
        return execute(sql, *rest)

    with connections[ALIAS].execute_wrapper(others_first):
        Order.objects.fenced(5).filter(status="new").delete()
    assert happened == ["matches", "claimed"]
    assert list(Order.objects.values_list("status", "fence")) == [("new", 9)]


REPEATABLE_READ = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"


@pytest.fixture
def prepare(database):
    """``prepare(*statements)``: for the session of the test, which ends with it."""

    def execute(*statements):
        with connections[ALIAS].cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    yield execute
    connections[ALIAS].close()


@servers
def test_a_claim_reads_the_row_as_it_is_now(database, another, prepare):
    """Also where the transaction has begun to read before, and the claim changes nothing."""
    Document.objects.create(name="report", body="draft", written_by=5)
    if database == "mariadb":
        prepare(REPEATABLE_READ, "SET SESSION innodb_snapshot_isolation = OFF")
    with transaction.atomic(ALIAS):
        assert Document.objects.get().body == "draft"
        Document.objects.using(another).update(body="amended")
        assert Document.objects.fenced(5).claim(pk="report").body == "amended"


@servers
def test_at_repeatable_read_the_database_refuses(database, another, prepare):
    Document.objects.create(name="report", body="draft", written_by=5)
    if database == "mariadb":
        prepare(REPEATABLE_READ, "SET SESSION innodb_snapshot_isolation = ON")
    else:
        prepare("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    refused = "could not serialize|Record has changed"
    with pytest.raises(OperationalError, match=refused), transaction.atomic(ALIAS):
        assert Document.objects.get().body == "draft"
        Document.objects.using(another).fenced(9).update(body="of the successor")
        Document.objects.fenced(5).update(body="late")
    assert Document.objects.get().body == "of the successor"
