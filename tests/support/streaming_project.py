"""A project whose responses take their time, for real servers. Its locks are at $LOCKS; it goes on when $GO exists."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import django
from django.conf import settings

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="for tests only",
    DISTRIBUTED_LOCKS={
        "default": {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": os.environ["LOCKS"]}
    },
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
)
django.setup()

from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.urls import path

from django_distlock import distributed_lock

GO = Path(os.environ["GO"])
PATIENCE = 30.0
LENGTH = 8_000_000

locked = distributed_lock("name")


def dots():
    until = time.monotonic() + PATIENCE
    while not GO.exists() and time.monotonic() < until:
        yield b"."
        time.sleep(0.02)
    yield b"end"


async def adots():
    until = time.monotonic() + PATIENCE
    while not os.path.exists(GO) and time.monotonic() < until:  # noqa: ASYNC240, PTH110 - a look takes no time
        yield b"."
        await asyncio.sleep(0.02)
    yield b"end"


def failing_dots():
    yield b"."
    raise ZeroDivisionError


async def failing_adots():
    yield b"."
    raise ZeroDivisionError


@locked
def failing_stream(request):
    return StreamingHttpResponse(failing_dots())


@locked
def failing_astream(request):
    return StreamingHttpResponse(failing_adots())


@locked
def stream(request):
    return StreamingHttpResponse(dots())


@locked
def astream(request):
    return StreamingHttpResponse(adots())


@locked
async def async_view_astream(request):
    return StreamingHttpResponse(adots())


@locked
def file(request):
    return FileResponse(Path(os.environ["FILE"]).open("rb"))


@locked
def template(request):
    page = engines["django"].from_string("{% for dot in dots %}{{ dot }}{% endfor %}")
    return TemplateResponse(request, page, {"dots": (dot.decode() for dot in dots())})


@locked
def long_template(request):
    page = engines["django"].from_string("{% for dot in dots %}{{ dot }}{% endfor %}{{ long }}")
    return TemplateResponse(request, page, {"dots": (dot.decode() for dot in dots()), "long": "x" * LENGTH})


@locked
def failing_template(request):
    page = engines["django"].from_string("{{ dots.next }}")

    class Dots:
        @property
        def next(self):
            list(dots())
            raise ZeroDivisionError

    return TemplateResponse(request, page, {"dots": Dots()})


@locked
def slow(request):
    list(dots())
    return StreamingHttpResponse(dots())


@locked
async def async_slow(request):
    async for _ in adots():
        pass
    return HttpResponse("end")


@distributed_lock("name", hold_until="return")
def until_return(request):
    return StreamingHttpResponse(dots())


urlpatterns = [
    path("stream", stream),
    path("astream", astream),
    path("async-view-astream", async_view_astream),
    path("failing-stream", failing_stream),
    path("failing-astream", failing_astream),
    path("file", file),
    path("template", template),
    path("long-template", long_template),
    path("failing-template", failing_template),
    path("slow", slow),
    path("async-slow", async_slow),
    path("until-return", until_return),
]
wsgi = get_wsgi_application()
asgi = get_asgi_application()
