"""Settings of the test project. Locks are in local memory unless a fixture says otherwise."""

from importlib.util import find_spec

SECRET_KEY = "for tests only"
USE_TZ = True
ROOT_URLCONF = "tests.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_distlock",
    *(["django_celery_beat"] if find_spec("django_celery_beat") else []),
    *(["django_tasks_db"] if find_spec("django.tasks") and find_spec("django_tasks_db") else []),
]
DATABASES = {
    alias: {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "TEST": {"MIGRATE": False}}  # tables at once
    for alias in ("default", "other")
}
DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}}
STATIC_URL = "/static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
