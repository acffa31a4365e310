"""Django's system checks of the settings. They ask no server; ``manage.py locks check`` does."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from itertools import permutations
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.template import TemplateDoesNotExist, TemplateSyntaxError
from django.template.loader import get_template
from django.urls import get_resolver

from .backends.base import BaseLockBackend
from .celery.config import BEAT_SETTING, REMEMBER_SETTING, BeatSettings, remember_tasks_for
from .core.registry import DEFAULT_ALIAS, SETTING, TAG, aliases_to_check, locks
from .core.succession import REMEDY, refusal_of
from .decorators import answers
from .options import NEEDLESS
from .unique import options as unique

RUSHED = 1.0  # seconds; with a shorter TTL, a process loses its locks by an ordinary pause


@register(TAG)
def check_setting(**_: Any) -> list[CheckMessage]:
    """Returns what is wrong on any machine. For backends that cannot be made, ``registry`` has a check of its own."""
    found: list[CheckMessage] = []
    backends = list(_backends())
    for backend in backends:
        found += [*_terms(backend), *backend.check_settings()]
    return [
        *found,
        *_same_locks(backends),
        *_beat(),
        *_tasks(),
        *_unique_tasks(backends),
        *_task_backends(),
        *_templates(),
        *uwsgi_without_threads(),
    ]


@register(TAG, deploy=True)
def check_deployment(**_: Any) -> list[CheckMessage]:
    """Returns what is right only on a developer's machine."""
    return [
        Error(
            f"{SETTING}[{backend.alias!r}]: {type(backend).__name__} "
            + ("excludes nobody." if not backend.supports_exclusion else "does not exclude other processes."),
            hint="Use a backend that all processes share, such as django_distlock.backends.redis.RedisBackend.",
            id="distlock.E002",
        )
        for backend in _backends()
        if not (backend.supports_processes and backend.supports_exclusion)
    ]


def threads_are_off() -> bool:
    """Returns whether uWSGI runs this process without Python threads. Under gevent, greenlets replace them."""
    if not (uwsgi := sys.modules.get("uwsgi")):
        return False
    options = {_text(key): _text(value).lower() for key, value in uwsgi.opt.items()}
    if "threads" in options or "gevent" in options:
        return False
    return options.get("enable-threads", "false") in ("false", "0", "no", "off")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _backends() -> Iterator[BaseLockBackend]:
    for alias in aliases_to_check():
        try:
            yield locks[alias]
        except ImproperlyConfigured:
            continue  # check_entries() reports it


def _beat() -> Iterator[CheckMessage]:
    if hasattr(settings, BEAT_SETTING):
        try:
            BeatSettings.read().backend()
        except ImproperlyConfigured as error:
            yield Error(str(error), id="distlock.E003")


def _tasks() -> Iterator[CheckMessage]:
    if hasattr(settings, REMEMBER_SETTING):
        try:
            remember_tasks_for()
        except ImproperlyConfigured as error:
            yield Error(str(error), id="distlock.E004")


def _unique_tasks(backends: list[BaseLockBackend]) -> Iterator[CheckMessage]:
    """Only tasks that this process knows: modules of tasks may be loaded later."""
    for backend in backends:
        if backend.alias in unique.unique_aliases and (refusal := refusal_of(backend)):
            yield Error(refusal, hint=REMEDY, id="distlock.E007")


def _task_backends() -> Iterator[CheckMessage]:
    """The backends of django.tasks that queue unique tasks. Before Django 6 there are none."""
    for alias in sorted(unique.task_backends):
        from django.tasks import task_backends

        from .django_tasks import queues

        if alias in task_backends.settings and (refusal := queues.refusal_of(task_backends[alias])):
            yield Error(refusal, hint=queues.REMEDY, id="distlock.E008")


def _templates() -> Iterator[CheckMessage]:
    """The templates of ``respond()``: they are rendered only when a lock is busy, which few people try out."""
    if getattr(settings, "ROOT_URLCONF", None):
        _ = get_resolver().url_patterns  # this imports the views
    for name in sorted(answers.named_templates):
        try:
            get_template(name)
        except (TemplateDoesNotExist, TemplateSyntaxError) as error:
            yield Warning(
                f"respond(template_name={name!r}): the template cannot be used. {type(error).__name__}: {error}.",
                hint="Requests whose lock is busy would be answered 500. Make it, or correct the name.",
                id="distlock.W007",
            )


def _terms(backend: BaseLockBackend) -> Iterator[CheckMessage]:
    terms, where = backend.terms, f"{SETTING}[{backend.alias!r}]"
    if terms.renew and terms.max_hold is not None and terms.max_hold <= terms.ttl:
        yield Warning(
            f"{where}: with MAX_HOLD {terms.max_hold:g} and TTL {terms.ttl:g} no lock is ever renewed for longer"
            " than its TTL.",
            hint="Raise MAX_HOLD, or say RENEW False if that is what is meant.",
            id="distlock.W003",
        )
    if terms.renew and terms.ttl < RUSHED:
        yield Warning(
            f"{where}: a TTL of {terms.ttl:g} s is renewed every {terms.ttl / 3:.2g} s, and a process that pauses for"
            " longer than the TTL, as any process does now and then, loses its locks.",
            hint="Raise TTL; renewal lets a long one end soon after its holder died.",
            id="distlock.W004",
        )
    if terms.on_unavailable == "run" and backend.alias == DEFAULT_ALIAS:
        yield Warning(
            f"{where}: ON_UNAVAILABLE is 'run', so while its store is down every lock that names no other alias lets"
            " its holder go on without it, also one that guards data.",
            hint='Give locks that only save work an alias of their own, or say on_unavailable="run" at each.',
            id="distlock.W008",
        )
    if terms.has_needless_ttl:
        yield Warning(
            f"{where}: TTL is {terms.ttl:g}. {NEEDLESS}",
            hint="Is it meant to be seconds? 30 fits most work, however long that takes.",
            id="distlock.W006",
        )


def _same_locks(backends: list[BaseLockBackend]) -> Iterator[CheckMessage]:
    owners: dict[Hashable, str] = {}
    for backend in backends:
        if backend.keyspace is None:
            continue
        first = owners.setdefault(backend.keyspace, backend.alias)
        if first != backend.alias:
            yield Warning(
                f"{SETTING}: {first!r} and {backend.alias!r} keep their locks under the same keys of one server, so a"
                " lock of one alias is busy for the other.",
                hint="Give them different KEY_PREFIXes, or silence this if they are meant to be the same locks.",
                id="distlock.W002",
            )
    for (outer, one), (inner, other) in permutations(owners.items(), 2):
        if (start := _beginning(outer, inner)) is not None:
            yield Warning(
                f"{SETTING}: the KEY_PREFIX of {other!r} begins with that of {one!r} and a colon, so every lock of"
                f" {other!r} is also the lock of {one!r} whose name begins with {start!r}, and is listed and released"
                " as such.",
                hint="Give them KEY_PREFIXes of which none begins with another one and a colon.",
                id="distlock.W002",
            )


def _beginning(outer: Hashable, inner: Hashable) -> str | None:
    """Returns how the names of the inner keyspace begin in the outer one; None if they are not in it."""
    match outer, inner:
        case (*place, str(short)), (*same, str(long)) if place == same and long.startswith(f"{short}:"):
            return f"{long.removeprefix(f'{short}:')}:"
    return None


def uwsgi_without_threads() -> Iterator[CheckMessage]:
    if threads_are_off():
        yield Warning(
            "uWSGI runs without threads, so nothing runs between two requests. A lock that is still held then, for"
            " example by a response that is being sent, is not renewed and may run out.",
            hint="Start uWSGI with --enable-threads.",
            id="distlock.W005",
        )
