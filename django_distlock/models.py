"""Locks as Django's admin sees them. No table stands behind them: the rows come from inventory.py."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Self

from django.db import models
from django.utils.translation import gettext_lazy as _

from .tickets import LockInfo


class NoRows(models.Manager["HeldLock"]):
    """``dumpdata`` and whatever else walks over all models finds nothing, and asks for no table."""

    def get_queryset(self) -> models.QuerySet[HeldLock]:
        return super().get_queryset().none()


class HeldLock(models.Model):
    """One lease as it was seen. The primary key holds a digest of its token, so that it names this very lease."""

    class State(models.TextChoices):
        HELD = "held", _("held")
        HANDED_OVER = "handed over", _("being handed over")
        RESTING = "resting", _("released, resting")

    id: models.TextField[str, str] = models.TextField(_("id"), primary_key=True)
    name: models.TextField[str, str] = models.TextField(_("name"))
    using: models.TextField[str, str] = models.TextField(_("backend"))
    state: models.TextField[str, str] = models.TextField(_("state"), choices=State.choices)
    label: models.TextField[str, str] = models.TextField(_("label"), blank=True)
    holder: models.TextField[str, str] = models.TextField(_("holder"), blank=True)
    granted_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        _("granted at"), null=True
    )
    remaining: models.FloatField[float | None, float | None] = models.FloatField(_("seconds left"), null=True)
    fence: models.BigIntegerField[int, int] = models.BigIntegerField(_("fencing number"))
    waiting: models.PositiveIntegerField[int | None, int | None] = models.PositiveIntegerField(_("waiting"), null=True)

    objects = NoRows()

    info: LockInfo

    class Meta:
        managed = False
        default_permissions = ("view", "release")
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")
        ordering: ClassVar[Any] = ("name", "using")
        base_manager_name = "objects"

    def __str__(self) -> str:
        return self.name

    @property
    def state_text(self) -> str:
        """For people."""
        return str(self.State(self.state).label)

    @classmethod
    def seen(cls, info: LockInfo, *, key: str, remaining: float | None, waiting: int | None) -> Self:
        """A row for what a backend showed."""
        state = cls.State.HANDED_OVER if info.holder is None else cls.State.RESTING if info.resting else cls.State.HELD
        row = cls(
            id=key,
            name=info.name,
            using=info.using,
            state=state,
            label=info.holder.label if info.holder else "",
            holder=info.holder.process if info.holder else "",
            granted_at=info.granted_at,
            remaining=remaining,
            fence=info.fence,
            waiting=waiting,
        )
        row.info = info
        row._state.adding = False
        return row
