"""Django's settings in the processes of a fleet. What differs comes as JSON in FLEET."""

import json
import os
from importlib.util import find_spec

PLAN = json.loads(os.environ["FLEET"])

SECRET_KEY = "for tests only"
USE_TZ = True
TIME_ZONE = "UTC"
INSTALLED_APPS = ["django_distlock", *(["django_celery_beat"] if find_spec("django_celery_beat") else [])]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": PLAN["database"],
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;",
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DISTRIBUTED_LOCKS = {
    "default": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "LOCATION": PLAN["locks"],
        "OPTIONS": {"socket_timeout": 0.5, "socket_connect_timeout": 0.5},
    },
}
DISTRIBUTED_LOCKS_BEAT = PLAN["beat"]
CELERY_BROKER_URL = os.environ.get("FLEET_BROKER") or PLAN["broker"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_RESULT_EXPIRES = None
CELERY_WORKER_HIJACK_ROOT_LOGGER = True
