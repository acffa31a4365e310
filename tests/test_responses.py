"""Responses that are not finished when the view returns hold its lock until they are closed."""

from __future__ import annotations

import asyncio
import gc
import io
import pickle
import time

import pytest
from django.db import transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path

from django_distlock import LockReentry, State, distributed_lock, lock, locks
from django_distlock.signals import lock_acquired, lock_released

from .tools import eventually

pytestmark = [pytest.mark.usefixtures("backend", "keep_connections"), pytest.mark.urls("tests.test_responses")]


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
    """A middleware that sends another response in the place of the view's."""

    def middleware(request):
        get_response(request)
        return HttpResponse("another")

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
    def test_hold_the_lock_until_they_are_closed(self, call, view):
        response = call(view)
        assert is_held()
        if view is template:
            assert response.render().content == b"heldheld"
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


def test_others_free_it_when_the_view_returns():
    page = engines["django"].from_string("text")
    for response in (HttpResponse("text"), TemplateResponse(request, page).render(), "text", None):
        assert locked(lambda response=response: response)() is response
        assert not is_held()


def test_the_lock_is_renewed_meanwhile():
    response = distributed_lock("name", ttl=0.6)(streaming)(request())
    time.sleep(1.5)
    assert is_held()
    response.close()
    assert not is_held()


def test_max_hold_bounds_it():
    response = distributed_lock("name", ttl=0.3, max_hold=0.5)(streaming)(request())
    eventually(lambda: not is_held())
    response.close()  # tells nobody, because nobody could do anything


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


def test_a_cached_copy_holds_nothing():
    response = call(template)
    response.render()
    copy = pickle.loads(pickle.dumps(response))
    response.close()
    assert not is_held()
    assert copy.content == b"heldheld"
    copy.close()


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
        with lock("name"):
            yield b""

    response = locked(lambda: StreamingHttpResponse(rows()))()
    with pytest.raises(LockReentry):
        list(response)
    assert is_held()
    response.close()
    assert not is_held()


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


class TestRequests:
    @pytest.mark.parametrize("prefix", ["", "async-"])
    @pytest.mark.parametrize("view", ["streaming", "file", "template"])
    def test_through_the_handlers_of_django(self, prefix, view):
        response = Client().get(f"/{prefix}{view}")
        assert response.getvalue() in (b"heldheld", b"content")
        assert not is_held()

    @pytest.mark.parametrize("prefix", ["", "async-"])
    def test_through_the_async_handler(self, prefix):
        async def read():
            response = await AsyncClient().get(f"/{prefix}astreaming")
            return b"".join([chunk async for chunk in response])

        assert asyncio.run(read()) == b"heldheld"
        eventually(lambda: not is_held())

    def test_a_response_that_another_one_replaces(self, settings):
        settings.MIDDLEWARE = ["tests.test_responses.replace"]
        for view in ("streaming", "template"):
            assert Client().get(f"/{view}").content == b"another"
            eventually(lambda: not is_held())

    def test_a_template_that_fails(self):
        with pytest.raises(ZeroDivisionError) as kept:
            Client().get("/fail_to_render")
        assert kept.value.__traceback__  # with the frames that have the response
        eventually(lambda: not is_held())

    def test_a_template_whose_failure_is_answered(self):
        assert Client(raise_request_exception=False).get("/fail_to_render").status_code == 500
        assert not is_held()
