"""The app as INSTALLED_APPS names it."""

from django.apps import AppConfig


class DistlockConfig(AppConfig):
    name = "django_distlock"
    label = "distlock"
    verbose_name = "Distributed locks"
