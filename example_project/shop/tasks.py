"""The shop's nightly task."""

from collections import Counter

from celery import shared_task
from django.db import transaction

from django_distlock import distributed_lock, lock

from .models import Item

CLOCKS_DIFFER = 5  # seconds at most between the machines that start the task at the same hour


@shared_task
@distributed_lock("shop:reconcile", on_busy="skip", min_hold=CLOCKS_DIFFER)
def reconcile() -> dict[str, int]:
    """Set the stock of every item to the delivered pieces minus the bought ones.

    Returns how many items were counted, how many had a wrong stock, and how many pieces were sold that were never
    delivered. Returns None if another process does it now, or did it a moment ago.
    """
    report = Counter(counted=0, wrong=0, oversold=0)
    for item_id in Item.objects.values_list("pk", flat=True):
        with lock("shop:item:{}", item_id):  # the lock of views.buy, so that nobody sells the item meanwhile
            report.update(recount(item_id))
    return dict(report)


@shared_task
def tick() -> None:
    """An example of a task that beat starts every few seconds; see beats.py."""


@transaction.atomic
def recount(item_id: int) -> dict[str, int]:
    item = Item.objects.get(pk=item_id)
    left = item.delivered - item.purchases.count()
    was, item.stock = item.stock, max(left, 0)
    if was != item.stock:
        item.save(update_fields=["stock"])
    return {"counted": 1, "wrong": int(was != item.stock), "oversold": max(-left, 0)}
