"""A program: the example shop's views on PostgreSQL, many buyers at once. Prints what was sold, as JSON."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import django
from django.conf import settings

BUYERS, PURCHASES, PIECES = 8, 24, 5
PATIENT = {"redis": {"socket_timeout": 30.0}, "database": {"timeout": 30.0}}  # a busy machine is no outage of a store


def buy(item_id: int, action: str) -> int:
    from django.db import connection
    from django.test import Client

    try:
        return Client(headers={"host": "localhost"}).post(f"/items/{item_id}/{action}").status_code
    finally:
        connection.close()


def main(database: dict[str, object]) -> dict[str, object]:
    from example_project import settings as shop_settings

    shop = {name: getattr(shop_settings, name) for name in dir(shop_settings) if name.isupper()}
    locks = {"default": {**shop["DISTRIBUTED_LOCKS"]["default"], "OPTIONS": PATIENT[os.environ["SHOP_BACKEND"]]}}
    settings.configure(**{**shop, "DATABASES": {"default": database}, "DISTRIBUTED_LOCKS": locks})
    django.setup()
    from django.core.management import call_command

    from django_distlock.backends.common.timing import Timing
    from example_project.shop import views
    from example_project.shop.models import Item

    call_command("migrate", verbosity=0)
    views.PAYMENT = 0.01
    Timing.shortest_call = 30.0  # buyers do not wait for the lock
    report: dict[str, object] = {}
    for action in ("buy-unlocked", "buy"):
        item = Item.objects.create(name=action, price=1, stock=PIECES, delivered=PIECES)
        with ThreadPoolExecutor(BUYERS) as buyers:
            answers = list(buyers.map(lambda _, pk=item.pk, what=action: buy(pk, what), range(PURCHASES)))
        report[action] = {"answers": sorted(set(answers)), "sold": item.purchases.count()}
    return report


if __name__ == "__main__":
    os.environ["SHOP_LOCKS"] = sys.argv[1]
    print(json.dumps(main(json.loads(sys.argv[2]))))
