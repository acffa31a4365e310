"""Settings of a project that is migrated, with its locks in its database, which ``MIGRATED`` has in JSON."""

import json
import os

from django_distlock.backends.common.timing import Timing
from tests.support.mysql_driver import is_driver_there

is_driver_there()

SECRET_KEY = "for tests only"
USE_TZ = True
DATABASES = {"default": json.loads(os.environ["MIGRATED"])}
DISTRIBUTED_LOCKS = {
    "default": {
        "BACKEND": "django_distlock.backends.database.DatabaseBackend",
        "OPTIONS": {"timeout": 30.0},  # a busy machine takes longer than a second to connect
    }
}
Timing.shortest_call = 30.0  # also for who does not wait
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.sessions", "django_distlock"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
