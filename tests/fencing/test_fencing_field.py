"""The field by itself: its migrations, and what the system checks say of models that have it."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.db import connections, models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.questioner import NonInteractiveMigrationQuestioner
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.template import Context, Engine
from django.test.utils import isolate_apps

from django_distlock import InvalidLockName
from django_distlock.core.registry import TAG
from django_distlock.fencing import FencedModel, FencedQuerySet, FenceField, check_fenced_models
from tests.support.databases import ALIAS


def loaded(code):
    """What a migration makes of it."""
    text, imports = code
    namespace = {}
    exec("\n".join(imports), namespace)
    return eval(text, namespace)


class TestMigrations:
    @pytest.mark.parametrize(
        ("options", "written"),
        [
            ({}, "django_distlock.fencing.FenceField()"),
            ({"lock": "order:{pk}"}, "django_distlock.fencing.FenceField(lock='order:{pk}')"),
            (
                {"lock": "nightly", "using": "other"},
                "django_distlock.fencing.FenceField(lock='nightly', using='other')",
            ),
            ({"editable": True}, "django_distlock.fencing.FenceField(editable=True)"),
            ({"default": 3}, "django_distlock.fencing.FenceField(default=3)"),
        ],
    )
    def test_it_is_written_and_read(self, options, written):
        code = MigrationWriter.serialize(FenceField(**options))
        assert code[0] == written
        again = loaded(code)
        assert again.deconstruct()[1:] == FenceField(**options).deconstruct()[1:]
        assert {"default": again.default, "editable": again.editable, "lock": again.lock, "using": again.using} == {
            "default": 0, "editable": False, "lock": None, "using": "default", **options
        }  # fmt: skip

    def test_nothing_changes_twice(self):
        def state(**options):
            fields = [("id", models.BigAutoField(primary_key=True)), ("fence", FenceField(**options))]
            project = ProjectState()
            project.add_model(ModelState("shop", "Order", fields))
            return project

        def changes(one, other):
            found = MigrationAutodetector(one, other, NonInteractiveMigrationQuestioner())._detect_changes()
            return [operation for migration in found.get("shop", ()) for operation in migration.operations]

        assert changes(state(lock="order:{}"), state(lock="order:{}")) == []
        [altered] = changes(state(), state(lock="order:{}"))
        assert altered.describe() == "Alter field fence on order"

    def test_a_table_that_is_there_gets_it_with_0_and_another_lock_costs_nothing(self, database):
        with isolate_apps():

            class Before(models.Model):
                class Meta:
                    app_label = "fenced"
                    db_table = "before"

            class After(FencedModel):
                class Meta:
                    app_label = "fenced"
                    db_table = "before"

        with connections[ALIAS].schema_editor() as schema:
            schema.create_model(Before)
        try:
            Before.objects.create()
            field = After._meta.get_field("fence")
            with connections[ALIAS].schema_editor() as schema:
                schema.add_field(Before, field)
            assert After.objects.get().fence == 0
            other = FenceField(lock="order:{}")
            other.set_attributes_from_name("fence")
            with connections[ALIAS].schema_editor(collect_sql=True) as schema:
                schema.alter_field(After, field, other)
            assert schema.collected_sql == []
        finally:
            with connections[ALIAS].schema_editor() as schema:
                schema.delete_model(Before)

    @pytest.mark.parametrize("lock", ["order:{}{}", "order:{!r}", "django_distlock.mine", "x" * 10_001])
    def test_what_can_name_no_lock_is_refused_where_it_is_written(self, lock):
        with pytest.raises(InvalidLockName):
            FenceField(lock=lock)


class TestChecks:
    def found(self, model):
        """The ids, the subjects and the texts."""
        messages = check_fenced_models(app_configs=[model._meta.apps.get_app_config("fenced")])
        return [(message.id, message.obj, message.msg) for message in messages]

    @pytest.fixture(autouse=True)
    def app(self, settings):
        settings.INSTALLED_APPS = list(dict.fromkeys([*settings.INSTALLED_APPS, "tests.support.fenced"]))
        with isolate_apps("tests.support.fenced"):
            yield

    def test_silent_when_all_is_well(self):
        class OrderQuerySet(FencedQuerySet):
            pass

        class OrderManager(models.Manager.from_queryset(FencedQuerySet)):
            pass

        class Order(FencedModel):
            objects = OrderQuerySet.as_manager()
            derived = OrderManager()

            class Meta:
                app_label = "fenced"

        class Child(Order):
            class Meta:
                app_label = "fenced"

        class Other(models.Model):
            class Meta:
                app_label = "fenced"

        assert self.found(Order) == []

    def test_managers_that_are_not_fenced(self):
        class Order(FencedModel):
            unfenced = models.Manager()

            class Meta:
                app_label = "fenced"

        class Document(models.Model):
            number = FenceField()

            class Meta:
                app_label = "fenced"

        class Child(Document):
            class Meta:
                app_label = "fenced"

        found = self.found(Order)
        assert [(code, subject) for code, subject, _ in found] == [
            ("distlock.W009", Order), ("distlock.W009", Document), ("distlock.W009", Child),
        ]  # fmt: skip
        assert [text.partition(" ")[0] for _, _, text in found] == [
            "fenced.Order.unfenced", "fenced.Document.objects", "fenced.Child.objects",
        ]  # fmt: skip

    def test_one_number_for_each_row(self):
        class Order(FencedModel):
            class Meta:
                app_label = "fenced"

        class Child(Order):
            another = FenceField()

            class Meta:
                app_label = "fenced"

        class Document(models.Model):
            number = FenceField(null=True)
            objects = FencedQuerySet.as_manager()

            class Meta:
                app_label = "fenced"

        assert [(code, subject) for code, subject, _ in self.found(Order)] == [
            ("distlock.E006", Child), ("distlock.E006", Document),
        ]  # fmt: skip

    def test_they_are_made_with_those_of_the_package(self):
        assert apps.is_installed("tests.support.fenced")
        assert [message for message in run_checks(tags=[TAG]) if message.obj] == []


def test_templates_and_managers_do_not_call_what_writes():
    for name in ("update", "delete", "create", "bulk_create", "bulk_update", "claim", "aclaim", "get_or_create"):
        assert getattr(FencedQuerySet, name).alters_data
        text = Engine().from_string("{{ rows.%s }}" % name).render(Context({"rows": FencedQuerySet}))  # noqa: UP031
        assert text == ""
    assert not hasattr(FencedQuerySet.as_manager(), "delete")
    assert FencedModel.save.alters_data
    assert FencedModel.asave.alters_data
