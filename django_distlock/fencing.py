"""Fencing that a model enforces: each row keeps the largest number that has written it, and refuses smaller ones.

Every fenced write first claims its rows, in the same transaction. An UPDATE marks the rows that no larger number has
written, and so locks them. Then a locking read finds the rows that refuse. The count of an UPDATE alone does not show
whether a missing row is gone or refuses, and ``save()`` would then INSERT.

After Martin Kleppmann, "How to do distributed locking" (2016): the resource itself has to refuse late holders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from asgiref.sync import sync_to_async
from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import DatabaseError, NotSupportedError, connections, models, router, transaction

from .core.lease import Lease
from .core.registry import DEFAULT_ALIAS, TAG, locks
from .exceptions import LockError, LockLost
from .names import fixed_name, template_of

M = TypeVar("M", bound=models.Model)
Method = TypeVar("Method", bound=Callable[..., Any])


class StaleLease(LockLost):
    """A fenced write was refused, because its holder is late. Nothing was written.

    ``refused``: how many rows a larger number has written before; 0 if this process knew, before any query, that the
    lease is over.
    """

    def __init__(self, message: str = "", *, refused: int = 0) -> None:
        super().__init__(message)
        self.refused = refused


class AsItIs:
    """The column itself, as the value in an UPDATE that does not change it.

    ``F()`` does not serve: Django 6 then drops the attribute of the instance if the database returns no rows of an
    UPDATE.
    """

    def __init__(self, field: models.Field[Any, Any]) -> None:
        self.field = field

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Sequence[Any]]:
        return connection.ops.quote_name(self.field.column), ()


class FenceField(models.BigIntegerField):  # type: ignore[type-arg]
    """The largest fencing number that has written the row; 0 before the first fenced write.

    Only fenced writes change it. Any other ``save()`` leaves the number in the row unchanged, whatever the instance
    has. An INSERT and ``loaddata`` write the value that they get.

    ``lock``: the name or the template of the lock that guards the rows, as for ``lock()`` and ``@distributed_lock``.
    ``using``: the alias of its backend. With ``lock``, a lease of another lock raises ValueError. Without it, a lease
    of any lock is accepted.
    """

    non_db_attrs = (*models.BigIntegerField.non_db_attrs, "lock", "using")

    _usual: ClassVar[dict[str, Any]] = {"default": 0, "editable": False, "lock": None, "using": DEFAULT_ALIAS}

    def __init__(self, *args: Any, lock: str | None = None, using: str = DEFAULT_ALIAS, **options: Any) -> None:
        super().__init__(*args, **{"default": 0, "editable": False, **options})
        self.lock, self.using = lock, using
        self.template = (template_of(lock) or fixed_name(lock)) if lock else None

    def deconstruct(self) -> tuple[str, str, Sequence[Any], dict[str, Any]]:
        name, path, args, options = super().deconstruct()
        options |= {option: getattr(self, option) for option in self._usual}
        own = {option: value for option, value in options.items() if (option, value) not in self._usual.items()}
        return name, path, args, own

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else AsItIs(self)


def _writes(method: Method) -> Method:
    method.alters_data = True  # type: ignore[attr-defined]  # templates do not call it
    return method


class FencedQuerySet(models.QuerySet[M]):
    """Writes rows under a fencing number after ``fenced(...)``. Without that it writes like any queryset, but cannot
    update the FenceField.

    ``bulk_update()``, ``bulk_create(update_conflicts=True)`` and ``update()`` of the FenceField raise
    NotSupportedError.

    ``fence``: the lease or the number; None: it is not fenced.
    """

    fence: Lease | int | None = None
    _for_write: bool  # Django's attribute: whether self.db is the router's database for writes

    def fenced(self, fence: Lease | int) -> Self:
        """Returns a queryset that refuses to write if a larger number has written one of the rows before.

        ``fence``: a lease, or its number, for example from a message. ``claim()``, ``update()``, ``delete()``,
        ``create()``, ``bulk_create()`` and their async twins are fenced. They write all of their rows or raise
        StaleLease. Other writes raise NotSupportedError.

        Raises ValueError for a lease of a backend that excludes nobody, for a lease of a lock with several slots, for a
        lease of another lock than the FenceField names, and for a number that no grant has.
        """
        _ensure_usable(_required_field(self.model), fence)
        clone = self.all()
        clone.fence = fence
        return clone

    @_writes
    def claim(self, *args: Any, **lookups: Any) -> M:
        """Claim the row that ``get(*args, **lookups)`` finds, then read and return it. After that no smaller number can
        write it.

        For code that reads a row, changes it and writes it back. Raises StaleLease, DoesNotExist,
        MultipleObjectsReturned.
        """
        if self.fence is None:
            raise TypeError("Only a fenced queryset claims: fenced(lease).claim(pk=pk).")
        with self._claimed(models.Q(*args, **lookups)) as mine:
            # The row is locked already, but a plain read may show it as it was when the transaction began.
            of = ("self",) if connections[mine.db].features.has_select_for_update_of else ()
            return mine.select_for_update(of=of).get()

    @_writes
    async def aclaim(self, *args: Any, **lookups: Any) -> M:
        """``claim()`` for tasks."""
        return await sync_to_async(self.claim)(*args, **lookups)

    @_writes
    def update(self, **values: Any) -> int:
        field = _field_of(self.model)
        if field and field.name in values:
            raise NotSupportedError(f"Only fenced writes change {field}: fenced(lease).update(...) does, by itself.")
        if self.fence is None:
            return super().update(**values)
        with self._claimed() as mine:
            return super(FencedQuerySet, mine).update(**values)

    @_writes
    def delete(self) -> tuple[int, dict[str, int]]:
        if self.fence is None:
            return super().delete()
        with self._claimed(by_keys=True) as mine:
            return super(FencedQuerySet, mine).delete()

    delete.queryset_only = True  # type: ignore[attr-defined]  # no manager has it, as in Django

    @_writes
    def create(self, **values: Any) -> M:
        return super().create(**values, **self._number_of_new_rows("create()"))

    @_writes
    def bulk_create(
        self,
        objs: Iterable[M],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[M]:
        if update_conflicts:
            self._refuse("bulk_create(update_conflicts=True)")
        objs = list(objs)
        for name, number in self._number_of_new_rows("bulk_create()").items():
            for each in objs:
                setattr(each, name, number)
        return super().bulk_create(objs, batch_size, ignore_conflicts)

    @_writes
    def bulk_update(self, *args: Any, **options: Any) -> NoReturn:
        """Raises NotSupportedError."""
        self._refuse("bulk_update()")

    @_writes
    def get_or_create(self, *args: Any, **options: Any) -> tuple[M, bool]:
        if self.fence is not None:
            self._refuse("get_or_create() of a fenced queryset")
        return super().get_or_create(*args, **options)

    @_writes
    def update_or_create(self, *args: Any, **options: Any) -> tuple[M, bool]:
        if self.fence is not None:
            self._refuse("update_or_create() of a fenced queryset")
        return super().update_or_create(*args, **options)

    def _clone(self) -> Self:
        clone: Self = super()._clone()  # type: ignore[misc]
        clone.fence = self.fence
        return clone

    def _refuse(self, what: str) -> NoReturn:
        raise NotSupportedError(
            f"{what} is not supported for {self.model._meta.label}, whose rows are fenced. Use save(), update(),"
            " create() or claim()."
        )

    def _number_of_new_rows(self, method: str) -> dict[str, int]:
        if self.fence is None:
            return {}
        field = _required_field(self.model)
        if field.model is not self.model._meta.concrete_model:  # the row of the parent may exist and be updated
            self._refuse(f"{method} of a fenced queryset of a child model")
        return {field.name: _number(self.fence)}

    @contextmanager
    def _claimed(self, condition: models.Q | None = None, *, by_keys: bool = False) -> Iterator[Self]:
        """Yields the rows that match the condition, claimed until the end of the body, which is one transaction.

        The queryset filters by their number, for a body that writes the rows by one statement which compares it. With
        ``by_keys`` it filters by their keys, too.
        """
        assert self.fence is not None
        field, number = _required_field(self.model), _number(self.fence)
        self._for_write = True
        mine = self.filter(condition or models.Q())
        mine.fence = None
        if _is_filtered_by(mine.query, field):
            raise NotSupportedError(f"A fenced queryset compares {field} by itself: leave it out of filters.")
        rows: models.QuerySet[Any] = mine
        is_of_one_table = _is_of_one_table(mine.query, field.model)
        if not is_of_one_table:
            # A statement that waited for a row compares the row's new values, but the old values of a joined table.
            key = field.model._meta.pk.name
            keys = set(mine.values_list(key, flat=True))
            mine = mine.filter(**{f"{key}__in": keys})
            rows = field.model._base_manager.using(mine.db).filter(pk__in=keys)
        with transaction.atomic(using=mine.db):
            _claim(rows, field, number)
            mine = mine.filter(**{field.name: number})
            if by_keys and is_of_one_table:
                keys = set(mine.order_by().select_for_update().values_list("pk", flat=True))
                mine = mine.filter(pk__in=keys)
            yield mine


class FencedModel(models.Model):
    """A model whose rows refuse late holders, by ``save(fence=lease)`` and ``objects.fenced(lease)``."""

    fence = FenceField()

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    class Meta:
        abstract = True

    @_writes
    def save(self, *args: Any, fence: Lease | int | None = None, **options: Any) -> None:
        """``fence``: a lease or its number; the write is refused if a larger number has written the row before.

        A row that does not exist is inserted, with the number. Raises StaleLease, and the errors of ``fenced()``.
        """
        if fence is None:
            super().save(*args, **options)
            return
        if args:
            raise TypeError("save(fence=...) takes its other arguments by keyword.")
        field = _required_field(type(self))
        _ensure_usable(field, fence)
        number = _number(fence)
        using = options["using"] = options.get("using") or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            key = _key_of(self, field.model)
            rows = field.model._base_manager.using(using).filter(pk=key)
            if key is None or not _claim(rows, field, number):
                if options.get("update_fields") or options.get("force_update") or self.get_deferred_fields():
                    raise getattr(self, "NotUpdated", DatabaseError)("There is no row to update.")
                options["force_insert"] = (field.model,)  # an UPDATE would overwrite a row that was inserted meanwhile
            setattr(self, field.attname, number)
            super().save(**options)

    @_writes
    async def asave(self, *args: Any, fence: Lease | int | None = None, **options: Any) -> None:
        """``save()`` for tasks."""
        await sync_to_async(self.save)(*args, fence=fence, **options)


@register(TAG)
def check_fenced_models(*, app_configs: Iterable[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """Checks that each row of a model with a FenceField has exactly one number, and that all managers keep it."""
    found: list[CheckMessage] = []
    for config in apps.get_app_configs() if app_configs is None else app_configs:
        for model in config.get_models():
            found += _findings(model)
    return found


def _findings(model: type[models.Model]) -> Iterator[CheckMessage]:
    fields = _fields_of(model)
    if len(fields) > 1 or any(field.null for field in fields):
        yield Error(
            f"{' and '.join(map(str, fields))} {'are of one model' if len(fields) > 1 else 'may be null'}, where each"
            " row needs one number to compare with.",
            hint="Give the model, with its parents, one FenceField without null=True.",
            obj=model,
            id="distlock.E006",
        )
    for manager in model._meta.managers if fields else ():
        if not isinstance(manager.get_queryset(), FencedQuerySet):
            yield Warning(
                f"{manager} makes no FencedQuerySet, so that its update(), bulk_update() and upserts can lower the"
                f" number in {fields[0]}.",
                hint="Make it by FencedQuerySet.as_manager(), or derive it from Manager.from_queryset(FencedQuerySet).",
                obj=model,
                id="distlock.W009",
            )


def _fields_of(model: type[models.Model]) -> list[FenceField]:
    return [field for field in model._meta.concrete_fields if isinstance(field, FenceField)]


def _field_of(model: type[models.Model]) -> FenceField | None:
    return next(iter(_fields_of(model)), None)


def _required_field(model: type[models.Model]) -> FenceField:
    if field := _field_of(model):
        return field
    raise TypeError(f"{model._meta.label} has no FenceField, and so refuses nobody.")


def _ensure_usable(field: FenceField, fence: Lease | int) -> None:
    """Refuse a fence that cannot show which holder is later. Raises TypeError, ValueError."""
    if isinstance(fence, Lease):
        if not locks[fence.using].supports_exclusion:
            raise ValueError(f"{fence!r} excludes nobody, so that its number does not tell who is late.")
        if (slots := fence.holder.slots) > 1:
            raise ValueError(f"{fence!r} is one of {slots} at once: a larger number does not tell that it is late.")
        if field.template and (fence.template, fence.using) != (field.template, field.using):
            raise ValueError(f"{field} is guarded by the lock {field.template!r} ({field.using}), not by {fence!r}.")
    elif type(fence) is not int:
        raise TypeError(f"fence is {fence!r}; it is a lease, or the number of one.")
    elif not 0 < fence <= models.BigIntegerField.MAX_BIGINT:
        raise ValueError(f"fence is {fence}, which is the number of no lease.")


def _number(fence: Lease | int) -> int:
    """Returns the fencing number. Raises StaleLease for a lease that this process knows to be over."""
    if isinstance(fence, int):
        return fence
    try:
        fence.ensure_held()
    except LockError as error:
        raise StaleLease(f"Nothing was written. {error}") from error
    return fence.fence


def _claim(rows: models.QuerySet[Any], field: FenceField, number: int) -> int:
    """Write the number into the rows, in the transaction of the caller. Returns how many rows were written.

    Raises StaleLease if a row has a larger number.
    """
    name = field.name
    claimed = models.QuerySet.update(rows.filter(**{f"{name}__lte": number}), **{name: number})
    late = rows.filter(**{f"{name}__gt": number}).order_by().select_for_update()
    if refused := len(late.values_list("pk", flat=True)):
        raise StaleLease(
            f"Nothing was written: {refused} row{'s' if refused > 1 else ''} of {rows.model._meta.label} had been"
            f" written under a larger number than {number}. Somebody else has held the lock since.",
            refused=refused,
        )
    return claimed


def _key_of(instance: models.Model, model: type[models.Model]) -> Any:
    """Returns the primary key of its row in the table of ``model``, its own or a parent; None before it has one."""
    key = getattr(instance, model._meta.pk.attname)
    link = instance._meta.get_ancestor_link(model)
    if key is None and link:  # a new child of an existing row
        key = getattr(instance, link.attname)
    parts = key if isinstance(key, tuple) else (key,)
    return None if any(part is None or hasattr(part, "resolve_expression") for part in parts) else key


def _is_of_one_table(query: Any, model: type[models.Model]) -> bool:
    """Returns whether the query reads only the table of the model, and each row once."""
    is_plain = not (query.distinct or query.extra_tables) and query.group_by is None
    return is_plain and query.model._meta.concrete_model is model and query.count_active_tables() <= 1


def _is_filtered_by(query: Any, field: FenceField) -> bool:
    parts = chain.from_iterable(leaf.flatten() for leaf in query.where.leaves() if hasattr(leaf, "flatten"))
    return any(getattr(part, "target", None) is field for part in parts)
