"""Checks that the app is installed; the other modules of this folder import its models."""

from __future__ import annotations

from django.apps import apps

from ...exceptions import InvalidLockBackend


def check_app() -> None:
    if not apps.is_installed("django_distlock"):
        raise InvalidLockBackend(
            "DISTRIBUTED_LOCKS names the database backend, which keeps locks in a table of the app 'django_distlock':"
            " add it to INSTALLED_APPS and run manage.py migrate."
        )
