"""Responses that are not finished when the view returns hold its lock until they are rendered, read or closed."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import pickle
import time
from contextvars import copy_context

import pytest
from asgiref.sync import async_to_sync
from django.core.cache import cache
from django.core.handlers.asgi import ASGIHandler
from django.db import transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import clear_url_caches, path
from django.utils.functional import SimpleLazyObject
from django.views.decorators.cache import cache_page
from rest_framework.decorators import api_view
from rest_framework.response import Response

from django_distlock import LockNotAcquired, LockNotHeld, State, current_lease, distributed_lock, lock, locks
from django_distlock.signals import lock_acquired, lock_released
from tests.support.tools import eventually, on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("backend", "keep_connections"),
    pytest.mark.urls("tests.decorators.test_http_responses"),
]


def request():
    return RequestFactory().get("/")


@pytest.fixture(autouse=True)
def templates(settings):
    settings.TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]


def is_held():
    return bool(list(locks["default"].held()))


def chunks():
    yield b"held" if is_held() else b"free"
    yield b"held" if is_held() else b"free"


async def achunks():
    for chunk in chunks():
        yield chunk


def streaming(request=None):
    return StreamingHttpResponse(chunks())


def astreaming(request=None):
    return StreamingHttpResponse(achunks())


def file(request=None):
    return FileResponse(io.BytesIO(b"content"))


def template(request=None, text="{% for word in words %}{{ word }}{% endfor %}"):
    page = engines["django"].from_string(text)
    return TemplateResponse(request, page, {"words": (chunk.decode() for chunk in chunks())})


def asynchronous(view):
    async def asynchronous_view(request):
        return view(request)

    return asynchronous_view


UNFINISHED = [streaming, astreaming, file, template]


def replace(get_response):
    """A middleware that sends another response in the place of the view's, and keeps that."""

    def middleware(request):
        another = HttpResponse("another")
        another.replaced = get_response(request)
        return another

    return middleware


def fail_to_render(request):
    response = template(request)
    response.add_post_render_callback(lambda _: 1 / 0)
    return response


locked = distributed_lock("name")
urlpatterns = [
    *[path(view.__name__, locked(view)) for view in (*UNFINISHED, fail_to_render)],
    *[path(f"async-{view.__name__}", locked(asynchronous(view))) for view in UNFINISHED],
]


def call(view):
    return locked(view)(request())


def acall(view):
    return asyncio.run(locked(asynchronous(view))(request()))


@pytest.mark.parametrize("call", [call, acall])
@pytest.mark.parametrize("view", UNFINISHED)
class TestUnfinishedResponses:
    @on_each_store
    def test_hold_the_lock_until_they_are_closed(self, call, view):
        response = call(view)
        assert is_held()
        response.close()
        assert not is_held()
        response.close()

    def test_release_once(self, call, view):
        seen = []

        def note(signal, **_):
            seen.append(signal)

        lock_acquired.connect(note)
        lock_released.connect(note)
        try:
            call(view).close()
        finally:
            lock_acquired.disconnect(note)
            lock_released.disconnect(note)
        assert seen == [lock_acquired, lock_released]

    def test_that_nobody_closes_free_it_when_they_are_collected(self, call, view):
        response = call(view)
        assert is_held()
        del response
        gc.collect()
        eventually(lambda: not is_held())

    def test_of_helpers_too(self, call, view):
        assert view is not None
        response = distributed_lock("name")(lambda: view())()
        assert is_held()
        response.close()
        assert not is_held()

    def test_until_return(self, call, view):
        response = distributed_lock("name", hold_until="return")(view)(request())
        assert not is_held()
        response.close()


@pytest.mark.parametrize("view", [streaming, astreaming, template])
def test_one_that_nobody_has_any_more_is_collected_at_once(view):
    """The collector may never run in a process that does nothing."""
    gc.collect()
    gc.disable()
    try:
        call(view)
        eventually(lambda: not is_held())
    finally:
        gc.enable()


class TestRendered:
    """They hold the lock while they are rendered, not while the client reads."""

    @pytest.mark.parametrize("call", [call, acall])
    def test_they_free_it(self, call):
        response = call(template)
        assert response.render() is response
        assert not is_held()
        assert response.content == b"heldheld"
        assert response.render() is response
        response.close()

    def test_also_when_rendering_raises(self):
        response = call(lambda request: template(request, "{{ word.missing|add:1|date:2 }}{% include none %}"))
        with pytest.raises(Exception) as kept:  # noqa: PT011 - whatever Django says
            response.render()
        assert kept.value.__traceback__  # with the frames that have the response
        assert not is_held()

    def test_callbacks_after_rendering_are_part_of_it(self):
        seen = []
        response = call(template)
        response.add_post_render_callback(lambda _: seen.append(is_held()))
        response.render()
        assert seen == [True]
        assert not is_held()

    def test_another_one_that_a_callback_returns(self):
        other = HttpResponse("other")
        response = call(template)
        response.add_post_render_callback(lambda _: other)
        assert response.render() is other
        assert not is_held()

    def test_that_get_their_content_otherwise_free_it_when_they_are_closed(self):
        response = call(template)
        response.content = "text"
        assert is_held()
        response.close()
        assert not is_held()

    def test_that_is_dropped_by_who_called_the_view(self):
        assert call(template).render().content == b"heldheld"
        assert not is_held()

    def test_their_class_is_what_it_was(self):
        response = call(template)
        assert isinstance(response, TemplateResponse)
        assert type(response).__name__ == "TemplateResponse"
        assert type(response.render()) is TemplateResponse
        response = call(streaming)
        assert isinstance(response, StreamingHttpResponse)
        response.close()
        assert type(response) is StreamingHttpResponse

    def test_once_more_in_another_lock(self):
        """The one of its own view is closed there."""

        def closing(request):
            response = locked(streaming)(request)
            response.close()
            return response

        response = distributed_lock("outer")(closing)(request())
        assert {info.name for info in locks["default"].held()} == {"outer"}
        response.close()
        assert not is_held()

    def test_of_two_locks_both_are_freed(self):
        response = distributed_lock("outer")(locked(template))(request())
        assert {info.name for info in locks["default"].held()} == {"name", "outer"}
        assert response.render().content == b"heldheld"
        assert not is_held()

    def test_that_render_asynchronously(self):
        class Response(TemplateResponse):
            async def render(self):
                seen.append(is_held())
                return super().render()

        async def main():
            return await (await locked(asynchronous(view))(request())).render()

        def view(request):
            page = engines["django"].from_string("text")
            return Response(request, page)

        seen = []
        assert asyncio.run(main()).content == b"text"
        assert seen == [True]
        eventually(lambda: not is_held())

    def test_those_of_rest_framework(self):
        @api_view(["GET"])
        @distributed_lock("name")
        def view(request):
            return Response({"held": is_held()})

        response = view(request())
        assert is_held()
        assert response.render().content == b'{"held":true}'
        assert not is_held()


def test_others_free_it_when_the_view_returns():
    page = engines["django"].from_string("text")
    for response in (HttpResponse("text"), TemplateResponse(request, page).render(), "text", None):
        assert locked(lambda response=response: response)() is response
        assert not is_held()


@pytest.mark.seconds(4)
@on_each_store
def test_the_lock_is_renewed_meanwhile():
    response = distributed_lock("name", ttl=3)(streaming)(request())
    time.sleep(4)
    assert is_held()
    response.close()
    assert not is_held()


@pytest.mark.seconds(3)
def test_max_hold_bounds_it():
    response = distributed_lock("name", ttl=2, max_hold=3)(streaming)(request())
    eventually(lambda: not is_held())
    response.close()  # tells nobody, because nobody could do anything


@on_each_store
def test_closed_in_an_event_loop_it_blocks_nobody():
    async def close():
        response = await locked(asynchronous(streaming))(request())
        response.close()

    asyncio.run(close())
    eventually(lambda: not is_held())


def test_an_error_of_the_store_at_the_end_is_logged(valkey_locks, store, caplog):
    response = locked(streaming)(request())
    store.flushall()
    response.close()
    assert "was lost" in caplog.text


class TestCached:
    """Copies hold nothing, and are as good as those of a view without a lock."""

    def check(self, copy):
        assert copy.content == b"heldheld"
        assert copy.render() is copy
        copy.close()

    def test_after_rendering(self):
        response = call(template).render()
        self.check(pickle.loads(pickle.dumps(response)))

    def test_by_a_callback_of_rendering(self):
        copies = []
        response = call(template)
        response.add_post_render_callback(lambda _: copies.append(pickle.loads(pickle.dumps(response))))
        response.render()
        self.check(copies[0])

    def test_with_content_of_another_kind(self):
        response = call(template)
        response.content = "heldheld"
        self.check(pickle.loads(pickle.dumps(response)))
        assert is_held()
        response.close()
        assert not is_held()

    def test_by_the_decorator_of_django(self, settings):
        settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
        view = cache_page(60)(locked(template))
        assert view(request()).render().content == b"heldheld"
        self.check(view(request()))
        cache.clear()


@pytest.mark.django_db(transaction=True)
def test_transaction_and_response_both_hold_it():
    with transaction.atomic():
        response = call(streaming)
    assert is_held()
    response.close()
    assert not is_held()

    with transaction.atomic():
        call(streaming).close()
        assert is_held()
    assert not is_held()


def test_a_lock_in_the_stream_itself():
    def rows():
        with lock("other"):
            yield b"held" if is_held() else b"free"
            yield b"last"

    response = StreamingHttpResponse(rows())
    content = iter(response)
    assert next(content) == b"held"
    response.close()
    assert not is_held()


def test_the_stream_cannot_enter_the_lock_that_is_held_for_it():
    def rows():
        with lock("name", wait=0):
            yield b""

    response = locked(lambda: StreamingHttpResponse(rows()))()
    with pytest.raises(LockNotAcquired):
        list(response)
    assert not is_held()
    response.close()


def test_a_lease_that_was_released_by_hand():
    leases = []

    def note(lease, **_):
        leases.append(lease)

    lock_acquired.connect(note)
    try:
        response = call(streaming)
    finally:
        lock_acquired.disconnect(note)
    leases[0].release()
    with lock("name"):
        response.close()
        assert is_held()
    assert leases[0].state is State.RELEASED


async def failing_parts():
    yield b"part"
    raise ZeroDivisionError


def failing_plain_parts():
    yield b"part"
    raise ZeroDivisionError


@pytest.mark.filterwarnings(
    "ignore:StreamingHttpResponse must consume synchronous iterators",
    "ignore:Unclosed file <tempfile.SpooledTemporaryFile:ResourceWarning",
)
class TestStreamsThatBreakOff:
    """The lock is free although nobody closes the response and everybody has it, and without the collector's help."""

    @pytest.fixture(autouse=True)
    def uncollected(self):
        gc.collect()
        gc.disable()
        yield
        gc.enable()
        gc.collect()  # what Django leaves open then

    @pytest.mark.parametrize("parts", [failing_parts, failing_plain_parts])
    def test_their_content_raises(self, parts):
        kept = []

        def view(request):
            kept.append(StreamingHttpResponse(parts()))
            return kept[0]

        with pytest.raises(ZeroDivisionError):
            asyncio.run(serve(view))
        assert kept[0]
        eventually(lambda: not is_held())

    @pytest.mark.parametrize(
        ("view", "count"), [*itertools.product([streaming, astreaming], [2, 3, 4]), (file, 2), (file, 3)]
    )
    def test_they_cannot_be_sent(self, view, count):
        """``count``: the message that fails, counted from the head, which is the first; the last one is the end."""
        kept = []

        def kept_view(request):
            kept.append(view(request))
            return kept[0]

        with pytest.raises(OSError, match="gone"):
            asyncio.run(serve(kept_view, failing=count))
        eventually(lambda: not is_held())

    def test_the_content_ends_before_the_lock_is_free(self):
        seen = []

        async def parts():
            try:
                yield b"part"
                yield b"part"
            finally:
                seen.append(is_held())

        with pytest.raises(OSError, match="gone"):
            asyncio.run(serve(lambda request: StreamingHttpResponse(parts()), failing=2))
        assert seen == [True]
        eventually(lambda: not is_held())


async def serve(view, *, failing=None, guard=locked):
    """The view at "/", through Django's handler, for a client that is gone at a message."""
    messages = []

    async def receive():
        if not messages:
            messages.append("request")
            return {"type": "http.request", "body": b"", "more_body": False}
        return await asyncio.Future()

    async def send(message):
        messages.append(message)
        if len(messages) - 1 == failing:
            raise OSError("gone")

    routed = path("routed", guard(view))
    urlpatterns.append(routed)
    clear_url_caches()
    try:
        scope = {"type": "http", "method": "GET", "path": "/routed", "query_string": b"", "headers": []}
        await ASGIHandler()(scope, receive, send)
    finally:
        urlpatterns.remove(routed)
        clear_url_caches()
    return messages[1:]


def named():
    for _ in range(2):
        yield current_lease().name.encode()


async def anamed():
    for _ in range(2):
        yield current_lease().name.encode()
        await asyncio.sleep(0)


class TestTheCurrentLease:
    """While the content is made it is that of the view, or of a generator that has a lock of its own."""

    @pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume synchronous iterators")
    @pytest.mark.parametrize("content", [named, anamed, locked(named), locked(anamed)])
    @pytest.mark.parametrize("kind", [lambda view: view, asynchronous], ids=["view", "async view"])
    def test_of_streams(self, kind, content):
        guard = locked if content in (named, anamed) else lambda view: view
        view = guard(kind(lambda request: StreamingHttpResponse(content())))
        messages = asyncio.run(serve(view, guard=lambda view: view))
        assert b"".join(message.get("body", b"") for message in messages) == b"namename"
        eventually(lambda: not is_held())

    def test_of_a_template(self):
        view = locked(lambda request: template(request, text="{{ lease.name }}"))
        response = view(request())
        response.context_data["lease"] = SimpleLazyObject(current_lease)
        assert response.render().content == b"name"
        with pytest.raises(LockNotHeld):
            current_lease()

    def test_of_a_generator_that_ends_in_another_context_than_it_began_in(self):
        items = locked(named)()
        assert copy_context().run(next, items) == b"name"
        copy_context().run(items.close)
        assert not is_held()


class TestRequests:
    @pytest.mark.parametrize("prefix", ["", "async-"])
    @pytest.mark.parametrize("view", ["streaming", "file", "template"])
    def test_through_the_handlers_of_django(self, prefix, view):
        response = Client().get(f"/{prefix}{view}")
        assert response.getvalue() in (b"heldheld", b"content")
        assert not is_held()

    @on_each_store
    @pytest.mark.parametrize("prefix", ["", "async-"])
    def test_through_the_async_handler(self, prefix):
        async def read():
            response = await AsyncClient().get(f"/{prefix}astreaming")
            return b"".join([chunk async for chunk in response])

        assert asyncio.run(read()) == b"heldheld"
        eventually(lambda: not is_held())

    @pytest.mark.parametrize("get", [Client().get, async_to_sync(AsyncClient().get)], ids=["sync", "async"])
    @pytest.mark.parametrize("view", ["streaming", "template", "async-astreaming", "async-template"])
    def test_a_response_that_another_one_replaces(self, get, view, settings):
        settings.MIDDLEWARE = ["tests.decorators.test_http_responses.replace"]
        response = get(f"/{view}")
        assert response.content == b"another"
        eventually(lambda: not is_held())
        assert response.replaced

    def test_a_template_that_fails(self):
        with pytest.raises(ZeroDivisionError) as kept:
            Client().get("/fail_to_render")
        assert kept.value.__traceback__  # with the frames that have the response
        eventually(lambda: not is_held())

    def test_a_template_whose_failure_is_answered(self):
        assert Client(raise_request_exception=False).get("/fail_to_render").status_code == 500
        assert not is_held()
