"""Locks as Django's admin shows them, and the tables of the database backend."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Self

from django.db import models
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .types import LockInfo
from .utils.text import printable

LONGEST_KEY = 1000  # bytes: enough for 200 characters, a hash and a prefix


class NoRows(models.Manager[Any]):
    """No rows, and no query, for ``dumpdata`` and other code that walks over all models."""

    def get_queryset(self) -> models.QuerySet[Any]:
        return super().get_queryset().none()


class NotByQueries(models.QuerySet[Any]):
    """Raises RuntimeError when it is evaluated, because no database has these rows; an empty answer would be wrong."""

    @property
    def db(self) -> str:
        raise RuntimeError(f"{self.model.__name__} has no table, so it cannot be queried. {self.model.source}")


def title_of(info: LockInfo) -> str:
    """Returns the name of a lock, with the slot of this lease if it has several: "export:7, slot 2 of 3"."""
    name, slots = printable(info.name), info.slots
    if slots is None:
        return gettext("%(name)s, slot %(slot)d") % {"name": name, "slot": info.slot} if info.slot > 1 else name
    text = gettext("%(name)s, slot %(slot)d of %(slots)d") % {"name": name, "slot": info.slot, "slots": slots}
    return text if slots > 1 else name


class HeldLock(models.Model):
    """One lease in a snapshot. It has no table: monitoring/inventory.py makes the rows.

    The primary key contains a digest of the token, so that it names this very lease.
    """

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

    nothing = NoRows()  # the first manager, so Django makes it the default
    objects = NotByQueries.as_manager()

    source = "locks[alias].held() of django_distlock says who holds which lock."
    info: LockInfo
    situation: Any = None  # the situation of the lock, if a page explains it

    class Meta:
        managed = False
        default_permissions = ("view", "release")
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")
        ordering: ClassVar[Any] = ("name", "using")
        base_manager_name = "nothing"

    def __str__(self) -> str:
        return self.name

    @property
    def state_text(self) -> str:
        """The translated state."""
        return str(self.State(self.state).label)

    @classmethod
    def seen(cls, info: LockInfo, *, key: str, remaining: float | None, waiting: int | None) -> Self:
        """Returns a row for a lease that a backend showed."""
        state = cls.State.HANDED_OVER if info.holder is None else cls.State.RESTING if info.resting else cls.State.HELD
        row = cls(
            id=key,
            name=title_of(info),
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


class BeatRun(models.Model):
    """An entry of beat's schedule in a snapshot. Like HeldLock it has no table."""

    id: models.TextField[str, str] = models.TextField(_("id"), primary_key=True)
    entry: models.TextField[str, str] = models.TextField(_("entry"))
    using: models.TextField[str, str] = models.TextField(_("backend"))
    last_run_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(_("last run"), null=True)
    host: models.TextField[str, str] = models.TextField(_("sent by host"), blank=True)
    next_run_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        _("next expected"), null=True
    )

    nothing = NoRows()
    objects = NotByQueries.as_manager()

    source = "locks[alias].runs() of django_distlock says when the entries of beat last ran."

    class Meta:
        managed = False
        default_permissions = ("view", "operate")
        verbose_name = _("beat run")
        verbose_name_plural = _("beat runs")
        ordering: ClassVar[Any] = ("entry", "using")
        base_manager_name = "nothing"

    def __str__(self) -> str:
        return self.entry


class KeyField(models.BinaryField):  # type: ignore[type-arg]
    """Bytes that every database compares as bytes, so that no collation makes two names one."""

    def db_type(self, connection: Any) -> str | None:
        # MySQL cannot index a whole BLOB.
        return f"varbinary({self.max_length})" if connection.vendor == "mysql" else super().db_type(connection)


class DatabaseLock(models.Model):
    """One lock of the database backend. The row stays after the release, because it keeps the fencing number.

    Moments are microseconds of Unix time by the clock of the database. Only ``backends/database`` reads and writes
    these rows.
    """

    name = KeyField(primary_key=True, max_length=LONGEST_KEY)  # KEY_PREFIX, a colon, and the name, in UTF-8
    # The format of the columns from token on, except fence, expires and careful_until, which never change their meaning
    format: models.SmallIntegerField[int, int] = models.SmallIntegerField()
    version: models.BigIntegerField[int, int] = models.BigIntegerField()  # grows with every change
    # The lease in the first slot:
    token: models.CharField[str, str] = models.CharField(max_length=26)  # empty when it is free
    state: models.CharField[str, str] = models.CharField(max_length=1)  # h, c, r or f, as state.py says
    fence: models.BigIntegerField[int, int] = models.BigIntegerField()  # the number of the last grant
    expires: models.BigIntegerField[int, int] = models.BigIntegerField()  # when the lease runs out, or ended
    holder: models.TextField[str, str] = (
        models.TextField()
    )  # JSON; empty when nobody holds it; for a claim, the inbox of the waiter
    others: models.TextField[str, str] = models.TextField()  # leases in other slots than the first; JSON, see sql.py
    waiters: models.TextField[str, str] = models.TextField()  # records of one length, see state.py
    retired: models.TextField[str, str] = models.TextField()  # tokens that no longer get the lock; JSON
    careful_until: models.BigIntegerField[int, int] = (
        models.BigIntegerField()
    )  # for others, waiters and tokens: see state.py

    objects = NoRows()

    class Meta:
        db_table = "distlock_lock"
        default_permissions = ()
        verbose_name = _("row of the database backend")
        verbose_name_plural = _("rows of the database backend")

    def __str__(self) -> str:
        return bytes(self.name).decode(errors="replace")


class DatabaseRun(models.Model):
    """When an entry of beat's schedule last ran, as the database backend keeps it.

    Moments are microseconds of Unix time: ``ran_at`` by the clock of the beat, the others by that of the database.
    Only ``backends/database`` reads and writes these rows.
    """

    name = KeyField(primary_key=True, max_length=LONGEST_KEY)  # KEY_PREFIX, a colon, and the name, in UTF-8
    ran_at: models.BigIntegerField[int, int] = models.BigIntegerField()
    token: models.CharField[str, str] = models.CharField(max_length=26)  # the token of the claim that made the stamp
    stamp: models.TextField[str, str] = models.TextField()  # JSON of a LastRun
    settled_at: models.BigIntegerField[int, int] = models.BigIntegerField()  # before this, no beat gets a run
    expires: models.BigIntegerField[int, int] = models.BigIntegerField()

    objects = NoRows()

    class Meta:
        db_table = "distlock_run"
        default_permissions = ()
        verbose_name = _("run in the database backend")
        verbose_name_plural = _("runs in the database backend")

    def __str__(self) -> str:
        return bytes(self.name).decode(errors="replace")


class DatabaseEntry(models.Model):
    """An entry of a journal of the database backend. Only ``backends/database`` reads and writes these rows."""

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    journal = KeyField(max_length=LONGEST_KEY)  # KEY_PREFIX
    entry: models.TextField[str, str] = models.TextField()  # the text of a JournalEntry

    objects = NoRows()

    class Meta:
        db_table = "distlock_journal"
        default_permissions = ()
        verbose_name = _("entry of a journal of the database backend")
        verbose_name_plural = _("entries of journals of the database backend")

    def __str__(self) -> str:
        return self.entry


ROWS_OF_DATABASE_BACKEND = (DatabaseLock, DatabaseRun, DatabaseEntry)
