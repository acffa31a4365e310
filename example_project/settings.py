"""Settings of the shop.

They read the environment: SHOP_LOCKS and SHOP_BROKER (URLs), SHOP_DATABASE (a file), SHOP_TICK (seconds, for the
demonstration), and SHOP_BACKEND (redis or database), the backend that keeps the locks.
"""

import os
from pathlib import Path

from celery.schedules import crontab

_backends = {
    "redis": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "LOCATION": os.environ.get("SHOP_LOCKS", "redis://127.0.0.1:6379/0"),
    },
    "database": {"BACKEND": "django_distlock.backends.database.DatabaseBackend"},
}
DISTRIBUTED_LOCKS = {"default": _backends[os.environ.get("SHOP_BACKEND") or "redis"]}

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", Path(__file__).parent / "shop.sqlite3"),
        "OPTIONS": {
            "timeout": 20,  # seconds to wait while another process writes
            # Without this, a transaction that reads first and writes later would fail at once, without that wait.
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;",
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/1")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BEAT_SCHEDULER = "distlock"  # start as many beats as you like
CELERY_BEAT_SCHEDULE = {
    "reconcile": {"task": "example_project.shop.tasks.reconcile", "schedule": crontab(hour=3, minute=0)},
}
if tick := os.environ.get("SHOP_TICK"):  # a task to watch in the demonstration
    CELERY_BEAT_SCHEDULE["tick"] = {"task": "example_project.shop.tasks.tick", "schedule": float(tick)}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_distlock",
    "example_project.shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True

SECRET_KEY = "not a secret: this shop is for trying things on one's own machine"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler", "level": "ERROR"}},
    "root": {"handlers": ["console"]},
}
