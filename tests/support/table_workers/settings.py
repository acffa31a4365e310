"""Django's settings in them. What differs comes as JSON in TABLE_WORKERS."""

import json
import os

PLAN = json.loads(os.environ["TABLE_WORKERS"])

SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = ["django_distlock", "django_tasks_db"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": PLAN["database"], "OPTIONS": {"timeout": 60}}}
DISTRIBUTED_LOCKS = {
    "default": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "LOCATION": PLAN["locks"],
        "TTL": 2,
    }
}
TASKS = {"default": {"BACKEND": "django_tasks_db.backend.DatabaseBackend"}}
