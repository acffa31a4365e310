"""``manage.py reconcile``: runs the nightly task now."""

from typing import Any

from django.core.management.base import BaseCommand

from example_project.shop.tasks import reconcile


class Command(BaseCommand):
    help = "Sets the stock of every item to what came in less what was bought."

    def handle(self, **options: Any) -> None:
        if report := reconcile():
            said = "{counted} items counted, {wrong} with a wrong stock, {oversold} pieces oversold."
            self.stdout.write(said.format(**report))
        else:
            self.stdout.write("Skipped: another process is at it, or was a moment ago.")
