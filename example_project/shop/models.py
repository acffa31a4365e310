"""The items that the shop sells, and the purchases."""

from django.db import models


class Item(models.Model):
    name = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    delivered = models.PositiveIntegerField(help_text="Pieces that came in so far.")
    stock = models.PositiveIntegerField(help_text="Pieces left to sell.")

    def __str__(self) -> str:
        return self.name


class Purchase(models.Model):
    item = models.ForeignKey(Item, models.PROTECT, related_name="purchases")
    price = models.DecimalField(max_digits=8, decimal_places=2)
    bought_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.item} for {self.price}"
