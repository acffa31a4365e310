"""What tests of the admin share: settings that it needs, people, and locks as other machines hold them."""

from __future__ import annotations

import time
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.template.backends.django import DjangoTemplates
from django.test import Client
from django.utils.html import strip_tags

from django_distlock.backends.base import BaseLockBackend
from django_distlock.monitoring.admin_pages import ABOUT_BACKEND
from django_distlock.monitoring.inventory import Key, LeaseKey
from django_distlock.types import Holder, LockRequest

LIST = "/admin/distlock/heldlock/"
PROCESSORS = [
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]


def use_admin(settings: Any, *, apps: tuple[str, ...] = (), processors: tuple[str, ...] = ()) -> None:
    settings.MIDDLEWARE = MIDDLEWARE
    if apps:
        settings.INSTALLED_APPS = [*apps, *settings.INSTALLED_APPS]
    settings.TEMPLATES = [
        {
            "BACKEND": f"{__name__}.{kept_templates.__name__}",
            "NAME": "django",
            "APP_DIRS": True,
            "OPTIONS": {"context_processors": [*PROCESSORS, *processors]},
        }
    ]


_kept: dict[str, DjangoTemplates] = {}


def kept_templates(parameters: dict[str, Any]) -> DjangoTemplates:
    """Django's, with what it has parsed for other tests: to parse them for each takes as long as to render them."""
    key = repr((parameters, settings.INSTALLED_APPS, settings.DEBUG))
    return _kept.get(key) or _kept.setdefault(key, DjangoTemplates(parameters))


def hold(
    backend: BaseLockBackend, name: str, *, ttl: float = 60.0, label: str = "shop.tasks.report", host: str = "web-1",
    pid: int = 4711, ago: float = 12.0, prefix: str = "", slots: int = 1,
) -> LockRequest:  # fmt: skip
    """A lock taken by somebody else, that long ago."""
    holder = Holder(host, pid, "MainThread", label, round(time.time() - ago, 3), slots=slots)
    taken = LockRequest(name, ttl, holder, prefix=prefix, slots=slots)
    assert not hasattr(backend.acquire(taken, queue=False), "remaining"), f"{name} is held already"
    return taken


def login(*permissions: str) -> Client:
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    browser = Client()
    browser.force_login(user)
    return browser


def said(page) -> list[str]:
    """Without the notes, and the lines of backends."""
    return [_text(one) for one in page.context["messages"] if not _is_note(one) and not _is_line(one)]


def notes(page) -> list[str]:
    """What a list says of itself."""
    return [_text(one) for one in page.context["messages"] if _is_note(one)]


def lines(page) -> list[str]:
    """What a list says of each backend, without marks."""
    return [strip_tags(one.message) for one in page.context["messages"] if _is_line(one)]


def _text(message) -> str:
    return f"{message.level_tag}: {message}"


def _is_note(message) -> bool:
    return message.extra_tags == ABOUT_BACKEND and message.level_tag != "error"


def _is_line(message) -> bool:
    return "distlock-alias" in message.tags


def names_in(page) -> list[str]:
    return [row.name for row in page.context["cl"].result_list]


def key_of(backend, name: str, slot: int = 1) -> str:
    [info] = [info for info in backend.look([name])[0] if info.slot == slot]
    return str(LeaseKey(Key(backend.alias, name), info.digest))


def release(browser, ids, **fields):
    """What the button of the confirmation page sends."""
    form = {"action": "delete_selected", "post": "yes", "_selected_action": ids, **fields}
    return browser.post(LIST, form, follow=True)
