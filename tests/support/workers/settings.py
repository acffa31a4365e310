"""Django's settings in workers. What differs comes as JSON in WORKERS."""

import json
import os

PLAN = json.loads(os.environ["WORKERS"])

SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = ["django_distlock"]
DISTRIBUTED_LOCKS = {
    "default": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "LOCATION": PLAN["locks"],
        "TTL": 120,  # so that a test sees whether a task's own one counts, however busy the machine
    },
    "brief": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "LOCATION": PLAN["locks"],
        "KEY_PREFIX": "brief",
        "TTL": 2,
    },
    "away": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "unix:///nowhere"},
    "late": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": PLAN["late"]},
}
CELERY_BROKER_URL = PLAN["broker"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": PLAN["visibility_timeout"]}
CELERY_RESULT_BACKEND = PLAN["results"]
CELERY_TASK_DEFAULT_QUEUE = PLAN["queue"]
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_CANCEL_LONG_RUNNING_TASKS_ON_CONNECTION_LOSS = True
if PLAN["start_method"]:
    CELERY_WORKER_POOL_START_METHOD = PLAN["start_method"]
