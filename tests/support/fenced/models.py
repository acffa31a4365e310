"""Models whose rows are fenced, in the alias ``locks``."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar

from django.db import models

from django_distlock.fencing import FencedModel, FencedQuerySet, FenceField


class Customer(models.Model):
    name = models.CharField(max_length=20)

    class Meta:
        app_label = "fenced"

    def __str__(self) -> str:
        return self.name


class Order(FencedModel):
    status = models.CharField(max_length=20, default="new")
    total = models.IntegerField(default=0)
    customer = models.ForeignKey(Customer, models.SET_NULL, null=True, related_name="orders")

    class Meta:  # inherits nothing
        app_label = "fenced"
        ordering: ClassVar[Any] = ["customer__name", "pk"]

    def __str__(self) -> str:
        return self.status


class Line(models.Model):
    """With it, a deletion of orders takes several statements."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="lines")

    class Meta:
        app_label = "fenced"

    def __str__(self) -> str:
        return str(self.pk)


class Export(Order):
    """A table of its own; the number is in that of its parent."""

    country = models.CharField(max_length=20, default="DE")

    class Meta:
        app_label = "fenced"


class Important(Order):
    class Meta:
        app_label = "fenced"
        proxy = True


class ByBaseManager(Order):
    class Meta:
        app_label = "fenced"
        proxy = True
        base_manager_name = "objects"


class Document(models.Model):
    """Has the field, and no ``save(fence=...)``."""

    name = models.CharField(max_length=20, primary_key=True)
    body = models.TextField()
    written_by = FenceField()

    objects = FencedQuerySet.as_manager()

    class Meta:
        app_label = "fenced"

    def __str__(self) -> str:
        return self.name


class Ticket(FencedModel):
    """Guarded by one lock; its key has a default."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    fence = FenceField(lock="ticket:{ticket_id}")
    seat = models.CharField(max_length=20, default="")

    class Meta:
        app_label = "fenced"

    def __str__(self) -> str:
        return self.seat


MODELS = [Customer, Order, Line, Export, Document, Ticket]


class Router:
    """To the alias ``locks``."""

    def db_for_read(self, model: type[models.Model], **hints: Any) -> str | None:
        return "locks" if model._meta.app_label == "fenced" else None

    db_for_write = db_for_read
