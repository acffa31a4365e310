"""The front page, and the views to buy an item: one with the lock and one without."""

import time

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST, require_safe

from django_distlock import distributed_lock

from . import pages
from .models import Item, Purchase

PAYMENT = 0.1  # seconds that the payment provider takes


@require_safe
def front_page(request: HttpRequest) -> HttpResponse:
    return HttpResponse(pages.front(request, Item.objects.order_by("name")))


@require_POST
@distributed_lock("shop:item:{item_id}")
def buy(request: HttpRequest, item_id: int) -> HttpResponse:
    """One buyer of an item at a time. Meanwhile, other buyers of it get 409; buyers of other items do not wait."""
    return sell(request, item_id)


@require_POST
def buy_unlocked(request: HttpRequest, item_id: int) -> HttpResponse:
    """For the demonstration only: two buyers read the same stock, and both get the last piece."""
    return sell(request, item_id)


def sell(request: HttpRequest, item_id: int) -> HttpResponse:
    item = get_object_or_404(Item, pk=item_id)
    if not item.stock:
        return HttpResponse(pages.sold_out(item), status=410)
    pay(item)
    # The transaction begins and commits inside the lock, so the next buyer reads the new stock. It does not include
    # the payment, because SQLite has one writer, and the buyers of all other items would wait for it.
    with transaction.atomic():
        item.stock -= 1
        item.save(update_fields=["stock"])
        Purchase.objects.create(item=item, price=item.price)
    messages.success(request, f"{item.name}: it is yours.")
    return redirect("front_page")


def pay(item: Item) -> None:
    """Simulates the payment provider."""
    time.sleep(PAYMENT)
