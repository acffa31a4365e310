from django.db import migrations, models

import django_distlock.models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="DatabaseLock",
            fields=[
                ("name", django_distlock.models.KeyField(max_length=1000, primary_key=True, serialize=False)),
                ("version", models.BigIntegerField()),
                ("token", models.CharField(max_length=26)),
                ("state", models.CharField(max_length=1)),
                ("fence", models.BigIntegerField()),
                ("expires", models.BigIntegerField()),
                ("holder", models.TextField()),
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
    ]
