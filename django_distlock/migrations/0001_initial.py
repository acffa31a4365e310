from django.db import migrations, models

import django_distlock.models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False, verbose_name="id")),
                ("name", models.TextField(verbose_name="name")),
                ("using", models.TextField(verbose_name="backend")),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("held", "held"),
                            ("handed over", "being handed over"),
                            ("resting", "released, resting"),
                        ],
                        verbose_name="state",
                    ),
                ),
                ("label", models.TextField(blank=True, verbose_name="label")),
                ("holder", models.TextField(blank=True, verbose_name="holder")),
                ("granted_at", models.DateTimeField(null=True, verbose_name="granted at")),
                ("remaining", models.FloatField(null=True, verbose_name="seconds left")),
                ("fence", models.BigIntegerField(verbose_name="fencing number")),
                ("waiting", models.PositiveIntegerField(null=True, verbose_name="waiting")),
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "ordering": ("name", "using"),
                "managed": False,
                "default_permissions": ("view", "release"),
                "base_manager_name": "nothing",
            },
        ),
        migrations.CreateModel(
            name="BeatRun",
            fields=[
                ("id", models.TextField(primary_key=True, serialize=False, verbose_name="id")),
                ("entry", models.TextField(verbose_name="entry")),
                ("using", models.TextField(verbose_name="backend")),
                ("last_run_at", models.DateTimeField(null=True, verbose_name="last run")),
                ("host", models.TextField(blank=True, verbose_name="sent by host")),
                ("next_run_at", models.DateTimeField(null=True, verbose_name="next expected")),
            ],
            options={
                "verbose_name": "beat run",
                "verbose_name_plural": "beat runs",
                "ordering": ("entry", "using"),
                "managed": False,
                "default_permissions": ("view", "operate"),
                "base_manager_name": "nothing",
            },
        ),
        migrations.CreateModel(
            name="DatabaseLock",
            fields=[
                ("name", django_distlock.models.KeyField(max_length=1000, primary_key=True, serialize=False)),
                ("format", models.SmallIntegerField()),
                ("version", models.BigIntegerField()),
                ("token", models.CharField(max_length=26)),
                ("state", models.CharField(max_length=1)),
                ("fence", models.BigIntegerField()),
                ("expires", models.BigIntegerField()),
                ("holder", models.TextField()),
                ("others", models.TextField()),
                ("waiters", models.TextField()),
                ("retired", models.TextField()),
                ("careful_until", models.BigIntegerField()),
            ],
            options={
                "verbose_name": "row of the database backend",
                "verbose_name_plural": "rows of the database backend",
                "db_table": "distlock_lock",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="DatabaseRun",
            fields=[
                ("name", django_distlock.models.KeyField(max_length=1000, primary_key=True, serialize=False)),
                ("ran_at", models.BigIntegerField()),
                ("token", models.CharField(max_length=26)),
                ("stamp", models.TextField()),
                ("settled_at", models.BigIntegerField()),
                ("expires", models.BigIntegerField()),
            ],
            options={
                "verbose_name": "run in the database backend",
                "verbose_name_plural": "runs in the database backend",
                "db_table": "distlock_run",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="DatabaseEntry",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("journal", django_distlock.models.KeyField(max_length=1000)),
                ("entry", models.TextField()),
            ],
            options={
                "verbose_name": "entry of a journal of the database backend",
                "verbose_name_plural": "entries of journals of the database backend",
                "db_table": "distlock_journal",
                "default_permissions": (),
            },
        ),
    ]
