"""What a fenced write does, and what no other write does to a number."""

from __future__ import annotations

import pickle

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin import ModelAdmin, site
from django.core import serializers
from django.db import DatabaseError, IntegrityError, NotSupportedError, connections, transaction
from django.db.models import Count, F
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from django_distlock import LockLost, lock, locks
from django_distlock.backends.dummy import DummyBackend
from django_distlock.fencing import FencedQuerySet, StaleLease
from django_distlock.testing import lose, override_locks, store_down
from tests.support.databases import ALIAS
from tests.support.fenced.models import ByBaseManager, Customer, Document, Export, Important, Line, Order, Ticket

pytestmark = [pytest.mark.usefixtures("locmem_locks", "database"), pytest.mark.slow]


def stored(model=Order, *columns):
    """What is in the rows."""
    return list(model.objects.order_by("pk").values_list(*(columns or ("status", "fence"))))


@pytest.fixture
def order(database):
    """A row that was written under number 5."""
    return Order.objects.create(status="new", fence=5)


@pytest.fixture
def old(order):
    """As somebody has read it before that."""
    read = Order.objects.get(pk=order.pk)
    read.fence = 0
    return read


@pytest.fixture(params=["sync", "async"])
def do(request):
    """Calls a method of an object, or its twin."""

    def sync(thing, method, *args, **kwargs):
        return getattr(thing, method)(*args, **kwargs)

    def by_twin(thing, method, *args, **kwargs):
        async def called():
            return await getattr(thing, f"a{method}")(*args, **kwargs)

        return async_to_sync(called)()

    return sync if request.param == "sync" else by_twin


@pytest.mark.usefixtures("wherever")
class TestSave:
    def test_it_writes_where_no_larger_number_has(self, order, do):
        for number in (5, 7):
            order.status = f"under {number}"
            do(order, "save", fence=number)
            assert order.fence == number
            assert stored() == [(f"under {number}", number)]

    def test_it_is_refused_where_a_larger_number_has(self, old, do):
        old.status = "late"
        with pytest.raises(StaleLease, match="1 row of fenced.Order .* larger number than 4") as refusal:
            do(old, "save", fence=4)
        assert refusal.value.refused == 1
        assert isinstance(refusal.value, LockLost)
        assert (old.fence, stored()) == (0, [("new", 5)])

    def test_a_new_instance_is_inserted_with_its_number(self, do):
        order = Order(status="fresh")
        do(order, "save", fence=3)
        assert (order.pk is not None, order.fence) == (True, 3)
        other = Order(pk=order.pk + 1, status="with a key")
        do(other, "save", fence=4)
        do(Ticket(), "save", fence=5)
        assert stored() == [("fresh", 3), ("with a key", 4)]
        assert stored(Ticket, "fence") == [(5,)]

    def test_a_row_that_is_gone_is_not_refused(self, order):
        Order.objects.all().delete()
        order.status = "again"
        with pytest.raises(DatabaseError, match="no row to update"), transaction.atomic(ALIAS):
            order.save(fence=4, update_fields=["status"])
        with pytest.raises(DatabaseError, match="no row to update"), transaction.atomic(ALIAS):
            order.save(fence=4, force_update=True)
        assert stored() == []
        order.save(fence=4)
        assert stored() == [("again", 4)]

    def test_a_part_of_it(self, old):
        old.status, old.total = "paid", 9
        old.save(fence=6, update_fields=["status"])
        assert stored(Order, "status", "total", "fence") == [("paid", 0, 6)]
        [partly] = Order.objects.only("status")
        partly.status = "sent"
        partly.save(fence=7)
        assert stored(Order, "status", "total", "fence") == [("sent", 0, 7)]
        with pytest.raises(StaleLease):
            old.save(fence=6, update_fields=["total"])

    def test_a_deferred_row_that_is_gone(self, order):
        [partly] = Order.objects.only("status")
        Order.objects.all().delete()
        with pytest.raises(DatabaseError, match="no row to update"):
            partly.save(fence=9)

    def test_of_a_proxy(self, order):
        read = Important.objects.get()
        read.status = "proxied"
        read.save(fence=6)
        with pytest.raises(StaleLease):
            read.save(fence=5)
        assert stored() == [("proxied", 6)]

    def test_other_arguments_go_by_keyword(self, order):
        with pytest.raises(TypeError, match="by keyword"):
            order.save(False, fence=6)


@pytest.mark.usefixtures("wherever")
class TestQuerySets:
    @pytest.fixture
    def orders(self, database):
        """Two customers; the second order was written by a larger number."""
        one, other = Customer.objects.create(name="one"), Customer.objects.create(name="other")
        numbers = [(one, 5), (one, 9), (other, 5)]
        rows = [Order.objects.create(customer=customer, fence=number) for customer, number in numbers]
        for row in rows:
            Line.objects.create(order=row)
        return rows

    def test_update(self, orders, do):
        fenced = Order.objects.fenced(7)
        assert do(fenced.filter(pk=orders[0].pk), "update", status="paid", total=F("total") + 1) == 1
        with pytest.raises(StaleLease) as refusal:
            do(fenced, "update", status="late")
        assert refusal.value.refused == 1
        assert stored(Order, "status", "total", "fence") == [("paid", 1, 7), ("new", 0, 9), ("new", 0, 5)]
        assert do(fenced.filter(pk=0), "update", status="nobody") == 0

    def test_update_by_what_it_changes(self, orders):
        assert Order.objects.fenced(9).filter(status="new").update(status="paid") == 3
        assert Order.objects.fenced(9).filter(status="new").update(status="paid") == 0

    def test_update_by_other_tables(self, orders):
        mine = Order.objects.fenced(7).filter(customer__name="other")
        assert mine.update(status="paid") == 1
        assert mine.distinct().update(status="paid") == 1
        assert Order.objects.fenced(7).filter(customer__name="nobody").update(status="paid") == 0
        several = Order.objects.fenced(7).annotate(size=Count("lines")).filter(size=1)
        with pytest.raises(StaleLease) as refusal:
            several.update(status="late")
        assert refusal.value.refused == 1
        assert several.exclude(pk=orders[1].pk).update(status="sent") == 2
        assert stored() == [("sent", 7), ("new", 9), ("sent", 7)]

    def test_delete(self, orders, do):
        with pytest.raises(StaleLease) as refusal:
            do(Order.objects.fenced(7), "delete")
        assert refusal.value.refused == 1
        assert len(stored()) == 3
        mine = Order.objects.fenced(7).filter(pk=orders[0].pk)
        assert do(mine, "delete") == (2, {"fenced.Line": 1, "fenced.Order": 1})
        assert do(mine, "delete") == (0, {})
        assert do(Order.objects.fenced(7).filter(customer__name="other"), "delete")[1]["fenced.Order"] == 1
        assert stored() == [("new", 9)]

    def test_claim(self, orders, do):
        Order.objects.filter(pk=orders[0].pk).update(total=5)
        mine = do(Order.objects.fenced(7), "claim", pk=orders[0].pk)
        assert (mine, mine.total, mine.fence) == (orders[0], 5, 7)
        assert do(Order.objects.fenced(7).select_related("customer"), "claim", customer__name="other") == orders[2]
        with pytest.raises(StaleLease):
            do(Order.objects.fenced(7), "claim", pk=orders[1].pk)
        with pytest.raises(Order.DoesNotExist):
            do(Order.objects.fenced(7), "claim", pk=0)
        with pytest.raises(Order.MultipleObjectsReturned):
            do(Order.objects.fenced(11), "claim", status="new")
        assert [number for _, number in stored()] == [7, 9, 7]
        with pytest.raises(TypeError, match="Only a fenced queryset claims"):
            do(Order.objects, "claim", pk=orders[0].pk)

    def test_claims_of_related_managers(self, orders):
        customer = orders[0].customer
        assert customer.orders.fenced(9).update(status="paid") == 2
        assert customer.orders.fenced(9).claim(pk=orders[1].pk).status == "paid"

    def test_create(self, do):
        assert do(Order.objects.fenced(7), "create", status="made").fence == 7
        assert do(Document.objects.fenced(8), "create", name="report", body="draft").written_by == 8
        do(Order.objects.fenced(9), "bulk_create", [Order(status="one"), Order(status="two")])
        assert stored() == [("made", 7), ("one", 9), ("two", 9)]

    def test_create_writes_over_nothing(self):
        Document.objects.create(name="report", body="final", written_by=9)
        for refused in (
            lambda: Document.objects.fenced(7).create(name="report", body="late"),
            lambda: Document.objects.fenced(7).bulk_create([Document(name="report", body="late")]),
        ):
            with pytest.raises(IntegrityError), transaction.atomic(ALIAS):
                refused()
        Document.objects.fenced(7).bulk_create([Document(name="report", body="late")], ignore_conflicts=True)
        assert stored(Document, "body", "written_by") == [("final", 9)]

    def test_a_field_of_another_name_on_a_model_of_another_base(self):
        Document.objects.create(name="report", body="draft")
        assert Document.objects.fenced(7).filter(pk="report").update(body="amended") == 1
        with pytest.raises(StaleLease):
            Document.objects.fenced(6).filter(pk="report").update(body="late")
        assert Document.objects.fenced(8).claim(pk="report").body == "amended"
        assert stored(Document, "body", "written_by") == [("amended", 8)]

    def test_what_is_not_fenced_is_refused(self, orders):
        fenced = Order.objects.fenced(9)
        for refused in (
            lambda: fenced.bulk_update(orders, ["status"]),
            lambda: fenced.bulk_create(orders, update_conflicts=True, unique_fields=["pk"], update_fields=["status"]),
            lambda: fenced.get_or_create(status="new"),
            lambda: fenced.update_or_create({"status": "paid"}, pk=orders[0].pk),
            lambda: fenced.update(fence=99),
            lambda: fenced.filter(fence__lte=9).update(status="paid"),
            lambda: fenced.exclude(total=F("fence")).update(status="paid"),
            lambda: fenced.filter(fence=5).delete(),
            lambda: Export.objects.fenced(9).create(order_ptr=orders[0]),
            lambda: fenced.union(fenced).update(status="paid"),
        ):
            with pytest.raises(NotSupportedError):
                refused()
        with pytest.raises(TypeError, match="slice"):
            fenced[:1].update(status="paid")
        assert [number for _, number in stored()] == [5, 9, 5]


@pytest.mark.usefixtures("wherever")
class TestChildrenOfFencedModels:
    @pytest.fixture
    def export(self, database):
        return Export.objects.create(country="AT", fence=5)

    def test_save(self, export):
        export.country, export.status = "CH", "sent"
        export.save(fence=7)
        assert stored(Export, "country", "status", "fence") == [("CH", "sent", 7)]
        export.country = "late"
        with pytest.raises(StaleLease):
            export.save(fence=6)
        new = Export(country="FR")
        new.save(fence=8)
        assert stored(Export, "country", "fence") == [("CH", 7), ("FR", 8)]

    @pytest.mark.parametrize("named_by", ["order_ptr", "order_ptr_id"])
    def test_a_child_of_a_row_that_is_there(self, order, named_by):
        parent = {"order_ptr": order, "order_ptr_id": order.pk}[named_by]
        child = Export(**{named_by: parent}, country="IT", status="of the child")
        with pytest.raises(StaleLease):
            child.save(fence=4)
        with pytest.raises(StaleLease):
            child.save(fence=4, force_insert=True)
        assert stored() == [("new", 5)]
        child.save(fence=6, force_insert=True)
        assert stored(Export, "country", "status", "fence") == [("IT", "of the child", 6)]

    def test_querysets(self, export):
        mine = Export.objects.fenced(7)
        assert mine.filter(country="AT").update(country="CH", status="sent") == 1
        assert mine.claim(country="CH").status == "sent"
        late = Export.objects.fenced(6)
        for refused in (
            lambda: late.update(country="late"),
            lambda: late.update(status="late"),
            lambda: late.claim(pk=export.pk),
            late.delete,
        ):
            with pytest.raises(StaleLease) as refusal:
                refused()
            assert refusal.value.refused == 1
        assert stored(Export, "country", "status", "fence") == [("CH", "sent", 7)]
        assert mine.delete() == (2, {"fenced.Export": 1, "fenced.Order": 1})


@pytest.mark.usefixtures("wherever")
class TestNothingLowersANumber:
    def refuses(self, number=4):
        with pytest.raises(StaleLease):
            Order.objects.fenced(number).update(status="late")
        return stored(Order, "fence") == [(5,)]

    def test_save_of_what_was_read_before(self, old):
        """Read, fenced write by another, plain ``save()`` of the old instance: a late holder is refused still."""
        old.status = "unfenced"
        old.save()
        assert self.refuses()
        old.save(update_fields=["status", "fence"])
        assert self.refuses()
        assert stored() == [("unfenced", 5)]

    def test_an_instance_can_be_saved_and_copied_afterwards(self, old):
        old.save()
        assert "fence" in vars(old)
        old.save()
        old.pk = None
        old.save()
        assert len(stored()) == 2

    def test_an_instance_made_by_hand(self, order):
        Order(pk=order.pk, status="by hand").save()
        assert self.refuses()

    def test_update_or_create(self, order):
        found, created = Order.objects.update_or_create({"status": "unfenced", "fence": 1}, pk=order.pk)
        assert (found, created) == (order, False)
        assert self.refuses()
        assert Order.objects.get_or_create(pk=order.pk) == (order, False)

    def test_save_of_a_child(self):
        export = Export.objects.create(fence=5)
        export.fence = 0
        export.save()
        assert self.refuses()

    def test_update_and_bulk_methods(self, order):
        order.fence = 0
        for refused in (
            lambda: Order.objects.update(fence=0),
            lambda: Order.objects.update(fence=F("fence") - 1),
            lambda: Order.objects.bulk_update([order], ["fence"]),
            lambda: Order.objects.bulk_update([order], ["status"]),
            lambda: Order.objects.bulk_create(
                [order], update_conflicts=True, unique_fields=["pk"], update_fields=["fence"]
            ),
        ):
            with pytest.raises(NotSupportedError):
                refused()
        assert Order.objects.update(status="unfenced") == 1
        assert self.refuses()

    def test_the_admin(self, order, settings):
        class Admin(ModelAdmin):
            fields = ("status", "total")

        admin = Admin(Order, site)
        read = Order.objects.get()
        Order.objects.fenced(6).update(total=1)
        form = admin.get_form(RequestFactory().get("/"))({"status": "by admin", "total": 3}, instance=read)
        assert form.is_valid()
        admin.save_model(None, form.save(commit=False), form, change=True)
        assert stored() == [("by admin", 6)]
        assert "fence" not in ModelAdmin(Order, site).get_form(RequestFactory().get("/")).base_fields

    def test_loaddata_writes_what_it_says(self, order):
        text = serializers.serialize("json", [order]).replace('"fence": 5', '"fence": 2')
        for read in serializers.deserialize("json", text):
            read.save()
        assert stored() == [("new", 2)]


class TestLeases:
    def test_a_lease_and_its_number_are_one(self, order):
        with lock("order:{}", 1) as lease:
            order.save(fence=lease)
            assert order.fence == lease.fence
            Order.objects.fenced(lease.fence).update(status="paid")
            assert Order.objects.fenced(lease).claim(pk=order.pk).status == "paid"

    def test_one_that_is_over_is_refused_before_any_query(self, order, do):
        with lock("order:{}", 1, on_lost="log") as lost:
            fenced = Order.objects.fenced(lost)
            lose(lost)
        with lock("order:{}", 1) as released:
            pass
        with lock("order:{}", 1) as detached:
            detached.detach()
        with store_down(), lock("order:{}", 2, on_unavailable="run") as ungranted:
            pass
        with CaptureQueriesContext(connections[ALIAS]) as queries:
            for lease in (lost, released, detached, ungranted):
                for late in (
                    lambda lease=lease: do(order, "save", fence=lease),
                    lambda lease=lease: do(Order.objects.fenced(lease), "update", status="late"),
                    lambda lease=lease: do(Order.objects.fenced(lease).filter(customer__name=""), "delete"),
                    lambda lease=lease: do(Order.objects.fenced(lease), "claim", pk=order.pk),
                    lambda lease=lease: do(Order.objects.fenced(lease), "create"),
                    lambda: do(fenced, "update", status="late"),
                ):
                    with pytest.raises(StaleLease, match=r"^Nothing was written\. ") as refusal:
                        late()
                    assert refusal.value.refused == 0
        assert not queries.captured_queries

    def test_what_is_no_number_of_a_lease(self, order):
        for wrong in (0, -1, 2**63):
            with pytest.raises(ValueError, match="number of no lease"):
                order.save(fence=wrong)
        for wrong in ("5", 5.0, True, lock("order:1")):
            with pytest.raises(TypeError, match="a lease, or the number of one"):
                Order.objects.fenced(wrong)
        with pytest.raises(TypeError, match="no FenceField"):
            FencedQuerySet(Customer).fenced(5)

    def test_one_of_a_backend_that_excludes_nobody(self, order):
        with override_locks(f"{DummyBackend.__module__}.{DummyBackend.__qualname__}"), lock("order:{}", 1) as lease:
            with pytest.raises(ValueError, match="excludes nobody"):
                order.save(fence=lease)
            with pytest.raises(ValueError, match="excludes nobody"):
                Order.objects.fenced(lease)

    def test_one_of_a_lock_that_several_hold_at_once(self, order):
        with lock("order:{}", 1, slots=2) as lease:
            with pytest.raises(ValueError, match="one of 2 at once"):
                order.save(fence=lease)
            with pytest.raises(ValueError, match="one of 2 at once"):
                Order.objects.fenced(lease)

    def test_one_of_another_lock_than_the_field_names(self, settings, locmem_locks):
        settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", "other"), settings.DISTRIBUTED_LOCKS["default"])
        with lock("ticket:{}", 1) as right, lock("order:{}", 1) as wrong, lock("ticket:{}", 1, using="other") as alias:
            ticket = Ticket()
            for lease in (wrong, alias):
                with pytest.raises(ValueError, match=r"guarded by the lock 'ticket:\{\}' \(default\)"):
                    ticket.save(fence=lease)
                with pytest.raises(ValueError, match="guarded by the lock"):
                    Ticket.objects.fenced(lease)
            ticket.save(fence=right)
            assert stored(Ticket, "fence") == [(right.fence,)]
        locks.close()

    def test_the_error_can_be_sent_elsewhere(self):
        error = pickle.loads(pickle.dumps(StaleLease("late", refused=2)))
        assert (str(error), error.refused) == ("late", 2)


def test_nothing_is_written_where_one_of_several_rows_refuses(order):
    """Nor is their number, and the transaction around goes on."""
    other = Order.objects.create(fence=9)
    with transaction.atomic(ALIAS):
        with pytest.raises(StaleLease):
            Order.objects.fenced(7).update(status="late")
        Customer.objects.create(name="later")
    assert stored() == [("new", 5), ("new", 9)]
    assert Customer.objects.count() == 1
    with pytest.raises(StaleLease):
        Order.objects.fenced(7).filter(pk__in=[order.pk, other.pk]).delete()
    assert stored() == [("new", 5), ("new", 9)]


def test_a_model_whose_base_manager_is_fenced(order):
    read = ByBaseManager.objects.get()
    read.status = "saved"
    read.save()
    read.save(fence=6)
    with pytest.raises(StaleLease):
        read.save(fence=5)
    assert stored() == [("saved", 6)]
