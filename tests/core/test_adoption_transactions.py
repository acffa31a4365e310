import pytest
from django.db import transaction
from django.test import TestCase

from django_distlock import adopt, lock
from django_distlock.testing import held_here


@pytest.mark.django_db(transaction=True)
def test_adopted_defers(locmem_locks):
    with lock("name") as lease:
        text = lease.detach()
    with transaction.atomic():
        with adopt(text):
            pass
        assert lock("name").locked()
        assert held_here() == []
    assert not lock("name").locked()


@pytest.mark.django_db(transaction=True)
def test_detach_in_atomic(locmem_locks):
    with transaction.atomic():
        with lock("name") as lease:
            text = lease.detach()
        assert lock("name").locked()
    assert lock("name").locked()
    with adopt(text):
        pass
    assert not lock("name").locked()


@pytest.mark.usefixtures("no_lock_left")
class TestIt(TestCase):
    def test_pending(self):
        with transaction.atomic(), lock("name"):
            pass
        a = transaction.atomic()
        a.__enter__()
        with lock("other"):
            pass
        assert lock("other").locked()
        assert held_here() == []
        a.__exit__(None, None, None)
