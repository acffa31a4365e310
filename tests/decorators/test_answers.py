"""What a request is answered when its lock is busy or the store is down: views of every kind, and the middleware."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from datetime import timedelta

import ninja
import pytest
from django.contrib.auth.models import Group
from django.db import connection, connections
from django.http import HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_distlock import InvalidLockName, LockBackendError, LockNotAcquired, distributed_lock, lock, locks, respond
from django_distlock.middleware import LockMiddleware
from tests.support.tools import must_not_run as nothing
from tests.support.tools import on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.urls("tests.decorators.test_answers")]

locked = distributed_lock("name")
JSON = {"accept": "application/json"}
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


BUSY = "This is already being processed. Try again in a moment."


def busy_answer(response):
    return {"detail": BUSY, "code": "busy", "retry_after": int(response["Retry-After"])}


def held_names(*_):
    return [info.name for info in locks["default"].held()]


@locked
def plain(request):
    return HttpResponse(" ".join(held_names()))


@locked
async def async_plain(request):
    return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


@method_decorator(locked, name="dispatch")
class DispatchView(View):
    def get(self, request):
        return HttpResponse(" ".join(held_names()))


@method_decorator(locked, name="dispatch")
class AsyncDispatchView(View):
    async def get(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class AsyncOwnDispatchView(View):
    @locked
    def dispatch(self, request):
        return super().dispatch(request)

    async def get(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class AsyncHandlerView(View):
    @locked
    async def get(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class AsyncMethodDecoratorView(View):
    @method_decorator(locked)
    async def get(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class PlainView(View):
    def get(self, request):
        return HttpResponse(" ".join(held_names()))


class AsyncView(View):
    async def get(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class CallableView:
    def __call__(self, request):
        return HttpResponse(" ".join(held_names()))


class AsyncCallableView:
    async def __call__(self, request):
        return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


class HelpsItselfView(View):
    """A handler that another handler calls is a helper then."""

    def get(self, request):
        return self.post(request)

    @locked
    def post(self, request):
        nothing()


class RestView(APIView):
    @locked
    def get(self, request):
        return Response(held_names())


@method_decorator(locked, name="dispatch")
class RestDispatchView(APIView):
    def get(self, request):
        return Response(held_names())


@api_view(["GET"])
@locked
def rest_function(request):
    return Response(held_names())


class Orders:
    @locked
    def rest_helped(self, request):
        nothing()


@api_view(["GET"])
def rest_helped(request):
    """It calls a method with its own name."""
    return Orders().rest_helped(request)


class RestSet(ViewSet):
    @locked
    def list(self, request):
        return Response(held_names())

    @action(detail=True, methods=["get"])
    @distributed_lock("thing:{pk}")
    def act(self, request, pk):
        return Response(held_names())

    @action(detail=False, methods=["get"])
    def helped(self, request):
        return self.list(request)

    @action(detail=False, methods=["get"])
    @distributed_lock("name", on_busy=respond(status=423))
    def responding(self, request):
        nothing()


router = SimpleRouter()
router.register("rest-set", RestSet, basename="set")
api = ninja.NinjaAPI(urls_namespace="answers")


class Parcel(ninja.Schema):
    weight: int


@api.get("/operation/{pk}", response=list[str])
@distributed_lock("thing:{pk}")
def operation(request, pk: int, weight: int = 0):
    return held_names()


@api.post("/parcel", response=list[str])
@distributed_lock("thing:{parcel.weight}")
def parcel(request, parcel: Parcel):
    return held_names()


@api.get("/async-operation")
@distributed_lock("thing:1")
async def async_operation(request):
    return [info.name async for info in locks["default"].aheld()]


@api.get("/helped")
def helped_operation(request):
    return operation(request, 1)


def view_with_lock(request):
    with lock("name", wait=0):
        return HttpResponse(" ".join(held_names()))


async def async_view_with_lock(request):
    async with lock("name", wait=0):
        return HttpResponse("done")


class RestViewWithLock(APIView):
    def get(self, request):
        return view_with_lock(request)


PAGE = "distlock/busy.html"
responding = functools.partial(distributed_lock, "name")

urlpatterns = [
    path("plain", plain),
    path("dispatch", DispatchView.as_view()),
    path("as-view", locked(PlainView.as_view())),
    path("object", locked(CallableView())),
    path("async", async_plain),
    path("async-dispatch", AsyncDispatchView.as_view()),
    path("async-own-dispatch", AsyncOwnDispatchView.as_view()),
    path("async-handler", AsyncHandlerView.as_view()),
    path("async-method-decorator", AsyncMethodDecoratorView.as_view()),
    path("async-as-view", locked(AsyncView.as_view())),
    path("async-object", locked(AsyncCallableView())),
    path("helps-itself", HelpsItselfView.as_view()),
    path("rest", RestView.as_view()),
    path("rest-function", rest_function),
    path("rest-helped", rest_helped),
    path("rest-dispatch", RestDispatchView.as_view()),
    path("rest-outside", locked(api_view(["GET"])(nothing))),
    path("ninja/", api.urls),
    path("with-lock", view_with_lock),
    path("async-with-lock", async_view_with_lock),
    path("rest-with-lock", RestViewWithLock.as_view()),
    path("423", responding(on_busy=respond(status=423))(nothing)),
    path("template", responding(on_busy=respond(template_name=PAGE))(nothing)),
    path("async-template", responding(on_busy=respond(template_name=PAGE))(AsyncCallableView())),
    path("raise", responding(on_busy="raise")(nothing)),
    path("skip", responding(on_busy=lambda busy, request: HttpResponse("skipped"))(nothing)),
    *router.urls,
]
DJANGO = ["plain", "dispatch", "as-view", "object"]
ASYNC = [
    "async", "async-dispatch", "async-own-dispatch", "async-handler", "async-method-decorator", "async-as-view",
    "async-object",
]  # fmt: skip
REST = ["rest", "rest-function", "rest-set/", "rest-set/7/act/"]
NINJA = ["ninja/operation/7", "ninja/async-operation"]


def get(url, **headers):
    return Client().get(f"/{url}", headers=headers)


def aget(url, **headers):
    async def ask():
        return await AsyncClient().get(f"/{url}", headers=headers)

    return asyncio.run(ask())


@pytest.fixture
def down(backend, monkeypatch):
    """The store refuses."""

    def refuse(*args, **kwargs):
        raise LockBackendError("The store is down.")

    async def arefuse(*args, **kwargs):
        refuse()

    monkeypatch.setattr(backend, "acquire", refuse)
    monkeypatch.setattr(backend, "aacquire", arefuse)


@pytest.fixture
def busy(backend):
    """Another thread has the locks of all views."""
    leave, there = threading.Event(), threading.Event()

    def hold():
        with lock("name"), lock("thing:1"), lock("thing:7"):
            there.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert there.wait(10)
    yield
    leave.set()
    thread.join()


everywhere = pytest.mark.parametrize(
    ("ask", "url"), [(ask, url) for ask in (get, aget) for url in (*DJANGO, *ASYNC, *REST, *NINJA)]
)


@everywhere
class TestEveryView:
    def test_runs_under_its_lock(self, ask, url):
        name = b"thing" if url.endswith(("7", "act/", "operation")) else b"name"
        response = ask(url)
        assert response.status_code == 200
        assert name in response.content
        assert held_names() == []

    @on_each_store
    @pytest.mark.usefixtures("down")
    def test_answers_503_when_the_store_is_down(self, ask, url, caplog):
        response = ask(url)
        assert response.status_code == 503
        assert "Retry-After" not in response
        assert b"The store is down" not in response.content
        if not url.startswith("rest"):
            assert "answered 503: The store is down." in caplog.text


@pytest.mark.usefixtures("busy")
class TestBusy:
    @pytest.mark.parametrize("ask", [get, aget])
    @pytest.mark.parametrize("url", [*DJANGO, *ASYNC])
    def test_views_of_django_answer_409(self, ask, url):
        response = ask(url)
        assert response.status_code == 409
        assert response["Content-Type"] == "text/plain; charset=utf-8"
        assert 1 <= int(response["Retry-After"]) <= 3

    @pytest.mark.parametrize("ask", [get, aget])
    @pytest.mark.parametrize("url", ["rest", "rest-function", "rest-set/"])
    def test_rest_framework_answers_by_its_own_exceptions(self, ask, url):
        response = ask(url)
        assert response.status_code == 409
        assert response.data == response.json() == busy_answer(response)
        assert 1 <= int(response["Retry-After"]) <= 3

    @pytest.mark.parametrize("ask", [get, aget])
    @pytest.mark.parametrize("url", ["rest-dispatch", "rest-outside"])
    def test_around_rest_framework_the_answer_is_json_too(self, ask, url):
        response = ask(url)
        assert response.status_code == 409
        assert response.json() == busy_answer(response)

    @pytest.mark.parametrize("url", ["helps-itself", "rest-helped", "rest-set/helped/"])
    def test_a_method_that_another_one_calls_raises(self, url):
        with pytest.raises(LockNotAcquired):
            get(url)

    def test_head_is_answered_as_get(self):
        assert Client().head("/rest").status_code == 409
        assert Client().options("/rest-function").status_code == 200
        assert Client().head("/dispatch").status_code == 409

    def test_a_status_of_your_own(self):
        assert get("423").status_code == 423
        assert get("rest-set/responding/").status_code == 423

    @pytest.mark.parametrize(("ask", "url"), [(get, "template"), (aget, "async-template")])
    def test_a_template_of_your_own(self, ask, url, settings):
        settings.TEMPLATES = [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "loaders": [
                        (
                            "django.template.loaders.locmem.Loader",
                            {PAGE: "{{ status }}: {{ detail }} {{ code }} {{ retry_after }} {{ request.path }}"},
                        )
                    ],
                    "context_processors": ["django.template.context_processors.request"],
                },
            }
        ]
        response = ask(url, **BROWSER)
        assert response.status_code == 409
        assert response["Content-Type"] == "text/html; charset=utf-8"
        assert response.content.decode() == f"409: {BUSY} busy {response['Retry-After']} /{url}"
        response = ask(url, **JSON)
        assert response.json() == busy_answer(response)

    @pytest.mark.parametrize(
        ("accept", "kind"),
        [
            ("application/json", "application/json"),
            ("application/json, text/plain, */*", "application/json"),
            ("text/html, application/json;q=0.9", "text/html; charset=utf-8"),
            ("*/*", "text/plain; charset=utf-8"),
            (BROWSER["accept"], "text/html; charset=utf-8"),
            ("image/*", "text/plain; charset=utf-8"),
            ("text/plain, application/json;q=0.5", "text/plain; charset=utf-8"),
        ],
    )
    def test_json_for_who_prefers_it(self, accept, kind):
        response = get("plain", accept=accept)
        assert response["Content-Type"] == kind
        assert response["Vary"] == "Accept"

    @on_each_store
    def test_on_busy_counts_before_the_answer(self):
        with pytest.raises(LockNotAcquired):
            get("raise")
        assert get("skip").content == b"skipped"

    def test_a_browser_shows_a_page(self):
        page = get("plain", **BROWSER).content.decode()
        assert page.startswith("<!doctype html>")
        assert f"<p>{BUSY}</p>" in page
        assert "name" not in page.replace('name="viewport"', "")

    def test_those_who_were_refused_together_come_back_one_after_another(self):
        """When a holder is done its lease does not tell, which is renewed."""
        told = {get("plain")["Retry-After"] for _ in range(100)}
        assert told == {"1", "2", "3"}

    @pytest.mark.parametrize(("left", "told"), [(0.2, "1"), (1.0, "1"), (1.01, "2"), (29.97, "30")])
    def test_a_lock_that_rests_is_free_at_a_known_time(self, left, told):
        problem = LockNotAcquired("busy", retry_after=left, resting=True)
        assert respond()(problem, RequestFactory().get("/"))["Retry-After"] == told

    def test_text_seconds_and_status_of_your_own(self):
        def detail(busy, request):
            return f"<{request.method}> {busy.retry_after:.0f}"

        form = respond(
            detail=detail, retry_after=lambda busy, request: timedelta(minutes=1), status=lambda busy, request: 429
        )
        busy = LockNotAcquired("busy", retry_after=7)
        response = form(busy, RequestFactory().get("/", headers=JSON))
        assert (response.status_code, response["Retry-After"]) == (429, "60")
        assert json.loads(response.content) == {"detail": "<GET> 7", "code": "busy", "retry_after": 60}
        assert b"<p>&lt;GET&gt; 7</p>" in form(busy, RequestFactory().get("/", headers=BROWSER)).content
        assert respond(retry_after=0)(busy, RequestFactory().get("/"))["Retry-After"] == "0"
        assert respond(retry_after=lambda *_: None)(busy, RequestFactory().get("/"))["Retry-After"] in {"1", "2", "3"}

    @pytest.mark.parametrize("seconds", [-1, "5", float("inf"), float("nan"), timedelta(-1)])
    def test_seconds_that_cannot_be(self, seconds):
        with pytest.raises(ValueError, match="retry_after is .*a number of seconds from 0 on, or a timedelta"):
            respond(retry_after=seconds)
        with pytest.raises(ValueError, match="retry_after is "):
            respond(retry_after=lambda *_: seconds)(LockNotAcquired("busy"), RequestFactory().get("/"))

    def test_handlers_of_rest_framework_may_ask_for_codes(self):
        with pytest.raises(APIException) as caught:
            respond()(LockNotAcquired("busy"), Request(RequestFactory().get("/")))
        assert set(caught.value.get_codes().values()) == {"busy"}
        assert caught.value.get_full_details()["detail"] == {"message": BUSY, "code": "busy"}

    @pytest.mark.parametrize("on_busy", [respond(), respond], ids=["called", "as it is"])
    def test_respond_needs_a_request(self, on_busy):
        with pytest.raises(TypeError, match="answers requests, and this call has none"):
            distributed_lock("name", on_busy=on_busy)(nothing)()

    @pytest.mark.parametrize("status", [200, "409", None, 600])
    def test_respond_refuses_other_statuses(self, status):
        with pytest.raises(ValueError, match=r"status is .*from 400 to 599"):
            respond(status=status)

    @pytest.mark.django_db(transaction=True)
    def test_rest_framework_rolls_back(self, monkeypatch):
        """Its exception handler does, for what was written before the lock was asked for."""
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        monkeypatch.setattr(RestView, "initial", lambda *args, **kwargs: Group.objects.create(name="before"))
        assert get("rest").status_code == 409
        assert not Group.objects.exists()
        connection.close()


@pytest.mark.usefixtures("busy")
class TestBusyNinja:
    @pytest.mark.parametrize("ask", [get, aget])
    @pytest.mark.parametrize("url", NINJA)
    def test_operations_answer_409_in_json(self, ask, url):
        response = ask(url)
        assert response.status_code == 409
        assert response.json() == busy_answer(response)

    def test_one_that_another_calls_raises(self):
        with pytest.raises(LockNotAcquired):
            get("ninja/helped")


def test_annotations_that_are_strings_are_read_by_ninja():
    assert get("ninja/operation/7?weight=heavy").status_code == 422
    response = Client().post("/ninja/parcel", {"weight": 3}, content_type="application/json")
    assert response.json() == ["thing:3"]


def test_store_down_is_raised_where_raising_was_asked_for(down):
    with pytest.raises(LockBackendError):
        get("raise")
    assert get("423").status_code == 503
    assert get("skip").status_code == 503
    with pytest.raises(LockBackendError):
        distributed_lock("name", on_busy="skip")(nothing)()


@pytest.fixture
def middleware(settings):
    settings.MIDDLEWARE = ["django_distlock.middleware.LockMiddleware"]


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize("ask", [get, aget])
class TestMiddleware:
    @pytest.mark.parametrize("url", ["with-lock", "async-with-lock", "helps-itself"])
    def test_answers_409_to_busy_locks(self, ask, url, busy):
        response = ask(url)
        assert response.status_code == 409
        assert 1 <= int(response["Retry-After"]) <= 3
        assert ask(url, **JSON).json()["retry_after"] >= 1

    @pytest.mark.parametrize("url", ["rest-with-lock", "rest-set/helped/"])
    def test_in_json_to_apis(self, ask, url, busy):
        response = ask(url)
        assert response.status_code == 409
        assert response.json() == busy_answer(response)

    def test_answers_503_to_a_dead_store(self, ask, down):
        assert ask("with-lock").status_code == 503
        assert ask("async-with-lock").status_code == 503

    def test_leaves_everything_else_alone(self, ask):
        assert ask("with-lock").status_code == 200
        with pytest.raises(ZeroDivisionError):
            ask("error")


def error(request):
    raise ZeroDivisionError


urlpatterns += [path("error", error)]


NO_NAMES = ["x" * 10_001, ":" * 2_500_000, "\ud800", 10**5000, "django_distlock.done:1"]


@distributed_lock("{value}")
def named(request, value):
    return HttpResponse("named")


@distributed_lock("{value}")
async def anamed(request, value):
    return HttpResponse("named")


@distributed_lock("{value}", on_busy="raise")
def named_or_raised(request, value):
    return HttpResponse("named")


@distributed_lock("{request}")
def wrongly_named(request, value):
    return HttpResponse("named")


class TestValuesThatNameNoLock:
    """Clients send them; a template that nothing could fill is the project's own mistake."""

    @pytest.mark.parametrize("value", NO_NAMES, ids=range(len(NO_NAMES)))
    def test_are_bad_requests(self, value, caplog):
        request = RequestFactory().get("/", headers=JSON)
        for response in (named(request, value), asyncio.run(anamed(request, value))):
            assert response.status_code == 400
            assert json.loads(response.content) == {"detail": "Bad request.", "code": "invalid"}
        assert named(RequestFactory().get("/"), value).content == b"Bad request.\n"
        assert "GET tests.decorators.test_answers.named is answered 400: " in caplog.text
        with pytest.raises(InvalidLockName):
            named_or_raised(request, value)

    def test_the_middleware_says_so_too(self):
        def view(request):
            raise AssertionError

        with pytest.raises(InvalidLockName) as caught:
            lock("{}", "x" * 10_001)
        response = LockMiddleware(view).process_exception(RequestFactory().get("/"), caught.value)
        assert response.status_code == 400

    def test_are_refused_before_work_is_done_for_them(self):
        with pytest.raises(InvalidLockName, match="too long: 2,500,000 characters"):  # not those of the escapes
            lock("{}", ":" * 2_500_000)

    def test_a_template_that_nothing_could_fill_raises(self):
        with pytest.raises(InvalidLockName, match="asks for|address in memory|was given"):
            wrongly_named(object(), 1)
