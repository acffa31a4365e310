"""``manage.py fill_shop``: puts every item in stock again, deletes all purchases, and makes a superuser."""

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand
from django.db import transaction

from example_project.shop.models import Item, Purchase

TEAS = {
    "Assam": 9, "Ceylon": 8, "Darjeeling": 14, "Earl Grey": 7, "Genmaicha": 12,
    "Gunpowder": 9, "Keemun": 13, "Lapsang Souchong": 11, "Rooibos": 6, "Sencha": 10,
}  # fmt: skip
PIECES = 3
LOGIN = PASSWORD = "demo"


class Command(BaseCommand):
    help = f"Puts {PIECES} pieces of each item in stock, forgets all purchases, and makes the superuser {LOGIN}."

    @transaction.atomic
    def handle(self, **options: Any) -> None:
        Purchase.objects.all().delete()
        for name, price in TEAS.items():
            Item.objects.update_or_create(name=name, defaults={"price": price, "delivered": PIECES, "stock": PIECES})
        users = get_user_model().objects
        if not users.filter(username=LOGIN).exists():
            users.create_superuser(LOGIN, password=PASSWORD)
        if options["verbosity"]:
            self.stdout.write(f"{len(TEAS)} items, {PIECES} pieces of each. The admin's login is {LOGIN} / {PASSWORD}.")
