"""``@distributed_lock``: on functions and on views, sync and async, and what it refuses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading

import pytest
from asgiref.sync import markcoroutinefunction
from django.http import HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_distlock import InvalidLockName, LockNotAcquired, LockTimeout, distributed_lock, lock, locks, skip
from tests.support.tools import ending_within, held_names, in_a_thread, must_not_run, on_stores
from tests.support.views import logged

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


@distributed_lock("order:{order_id}")
def ship(order_id, *, note="none"):
    return order_id, note, held_names()


@distributed_lock
def whole():
    return held_names()


class TestNames:
    def test_from_arguments_by_position_by_keyword_and_by_default(self):
        @distributed_lock("{kind}:{order_id}")
        def work(order_id, kind="order"):
            return held_names()

        assert work(1) == work(order_id=1) == work(order_id=1, kind="order") == ["order:1"]
        assert work(1, "a:b") == ["a%3Ab:1"]

    def test_the_decorators_lock_is_the_one_that_lock_names(self):
        with lock("order:{}", "a:b"), pytest.raises(LockNotAcquired):
            in_a_thread(lambda: ship("a:b"))

    def test_from_attributes_and_items(self):
        @distributed_lock("{request.user.pk}:{options[page]}")
        def work(request, options):
            return held_names()

        request = RequestFactory().get("/")
        request.user = type("User", (), {"pk": 7})()
        assert work(request, {"page": 3}) == ["7:3"]

    def test_from_keywords_of_an_open_signature(self):
        @distributed_lock("order:{order_id}")
        def work(request, **kwargs):
            return held_names()

        assert work(None, order_id=5) == ["order:5"]
        with pytest.raises(
            InvalidLockName, match="'order_id', which cannot be read: this call has only other, request"
        ):
            work(None, other=5)

    def test_a_keyword_is_no_parameter_that_is_given_by_position_only(self):
        @distributed_lock("order:{pk}")
        def change(pk, /, **changes):
            return held_names()

        @distributed_lock("order:{changes}")
        def record(pk, /, *items, **changes):
            return held_names()

        assert change(1) == change(1, pk=2) == change(1, pk=3, changes=4) == ["order:1"]
        assert record(1, changes=2) == ["order:2"]

    def test_from_a_callable(self):
        @distributed_lock(name=lambda first, *rest, **named: f"sum:{first + sum(rest)}")
        def work(*numbers, **named):
            return held_names()

        assert work(1, 2, 3) == ["sum:6"]

    def test_from_the_function_itself(self):
        assert whole() == ["tests.decorators.test_decorators.whole"]

    def test_a_constant(self):
        @distributed_lock("nightly")
        def work(anything=None):
            return held_names()

        assert work(object()) == ["nightly"]

    def test_methods(self):
        class Account:
            pk = 3

            @distributed_lock("account:{self.pk}:{amount}")
            def pay(self, amount):
                return held_names()

            @staticmethod
            @distributed_lock("static:{amount}")
            def static(amount):
                return held_names()

            @classmethod
            @distributed_lock("class:{cls.pk}")
            def of_class(cls):
                return held_names()

        assert Account().pay(5) == ["account:3:5"]
        assert Account.static(5) == ["static:5"]
        assert Account.of_class() == ["class:3"]


class TestCalls:
    @on_each_store
    def test_the_result_comes_back_and_the_lock_is_freed(self):
        assert ship(1, note="fragile") == (1, "fragile", ["order:1"])
        assert held_names() == []

    def test_wrong_arguments_are_a_type_error_as_ever(self):
        with pytest.raises(TypeError):
            ship()
        with pytest.raises(TypeError):
            ship(1, nothing=2)
        assert held_names() == []

    @pytest.mark.parametrize("options", [{"on_busy": "skip"}, {"wait": 60}])
    @pytest.mark.parametrize(
        ("args", "kwargs"), [((1, 2, 3), {}), ((1,), {"nothing": 2}), ((1,), {"pk": 1}), ((1,), {}), ((), {"note": 1})]
    )
    def test_wrong_arguments_are_one_also_where_the_lock_is_busy(self, options, args, kwargs):
        @distributed_lock("order:{pk}", **options)
        def pay(pk, note):
            raise AssertionError

        with lock("order:{}", 1), pytest.raises(TypeError):
            pay(*args, **kwargs)

    def test_an_exception_comes_out_and_the_lock_is_freed(self):
        @distributed_lock("name")
        def work():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            work()
        assert held_names() == []

    @on_each_store
    def test_async_functions(self):
        @distributed_lock("order:{order_id}")
        async def work(order_id):
            return await asyncio.to_thread(held_names)

        assert asyncio.run(work(4)) == ["order:4"]
        assert held_names() == []

    def test_the_function_stays_what_it_was(self):
        @distributed_lock("name")
        @csrf_exempt
        async def work(order_id: int, *, note: str = "x") -> str:
            """Says what it does."""

        assert inspect.iscoroutinefunction(work)
        assert str(inspect.signature(work)) == "(order_id: 'int', *, note: 'str' = 'x') -> 'str'"
        assert (work.__name__, work.__doc__, work.csrf_exempt) == ("work", "Says what it does.", True)

    def test_the_label_says_what_runs(self):
        @distributed_lock("name")
        def work():
            return [info.holder.label for info in locks["default"].held()]

        assert work()[0].endswith("test_the_label_says_what_runs.<locals>.work")
        assert distributed_lock("name", label="mine")(work.__wrapped__)() == ["mine"]

    def test_options_reach_the_lock(self):
        @distributed_lock("name", ttl=30, min_hold=20)
        def work():
            return next(iter(locks["default"].held())).remaining

        assert 20 < work() <= 30
        assert lock("name").locked()

    def test_a_long_template_still_tells_its_values_apart(self):
        @distributed_lock("n" * 250 + ":{order_id}")
        def work(order_id):
            return held_names()

        named = work(1)
        assert named != work(2)
        with lock("n" * 250 + ":{}", 1):
            assert held_names() == named

    def test_a_sync_function_that_only_begins_its_work_is_refused(self):
        """The lock would be free before the work is done."""
        ran = []

        async def work():
            ran.append("unguarded")

        with pytest.raises(TypeError, match="would run without the lock.*or mark this one"):
            distributed_lock("name")(lambda: work())()
        assert ran == []
        assert held_names() == []

    def test_one_that_is_marked_is_awaited_under_its_lock(self):
        async def work():
            return held_names()

        begin = distributed_lock("name")(markcoroutinefunction(lambda: work()))
        assert asyncio.run(begin()) == ["name"]

    def test_a_task_still_checks_its_arguments(self):
        from celery import Celery

        @Celery("tests", set_as_current=False).task(shared=False)
        @distributed_lock("order:{order_id}")
        def work(order_id):
            return held_names()

        assert work(1) == ["order:1"]
        with pytest.raises(TypeError):
            work.apply_async((1, 2, 3))

    def test_a_partial(self):
        @distributed_lock("order:{order_id}")
        def work(order_id, note):
            return note

        assert functools.partial(work, 1)("x") == "x"
        bound = functools.partial(work.__wrapped__, 1)
        assert distributed_lock("n:{note}")(bound)("x") == "x"

    def test_partials_and_class_views_have_names_of_their_own(self):
        def one(page):
            return held_names()

        def other(page):
            return held_names()

        assert distributed_lock(functools.partial(one, 1))() != distributed_lock(functools.partial(other, 1))()
        request = RequestFactory().get("/")
        views = [distributed_lock(view.as_view()) for view in (PlainView, OtherView)]
        assert views[0](request).content != views[1](request).content


@pytest.mark.usefixtures("busy")
class TestBusy:
    @pytest.mark.parametrize("on_busy", [None, "raise"])
    def test_a_plain_function_raises_at_once(self, on_busy):
        work = distributed_lock("name", on_busy=on_busy)(must_not_run)
        with ending_within(1), pytest.raises(LockNotAcquired, match="held by somebody else"):
            work()

    def test_waits_when_told(self):
        with pytest.raises(LockTimeout):
            distributed_lock("name", wait=0.1)(must_not_run)()

    @on_each_store
    def test_waits_until_it_is_free(self, busy):
        threading.Timer(0.2, busy.set).start()

        @distributed_lock("name", wait=20)
        def work():
            return "done"

        assert work() == "done"

    def test_skip_whatever_the_arguments_are_called(self):
        assert distributed_lock("name", on_busy="skip")(must_not_run)(busy=1, self=2) is None

    def test_skip(self):
        assert distributed_lock("name", on_busy="skip")(must_not_run)() is None
        assert distributed_lock("name", on_busy=skip("nothing done"))(must_not_run)() == "nothing done"
        assert distributed_lock("name", on_busy=skip)(must_not_run)() is None

    def test_a_callable_answers(self):
        @distributed_lock("name", on_busy=lambda busy, order_id, note: (busy.holder.label, order_id, note))
        def work(order_id, note):
            must_not_run()

        assert work(1, note="x") == ("somebody else", 1, "x")

    def test_async_functions_do_the_same(self):
        async def work():
            must_not_run()

        async def answer(busy):
            return "answered"

        with pytest.raises(LockNotAcquired):
            asyncio.run(distributed_lock("name")(work)())
        assert asyncio.run(distributed_lock("name", on_busy="skip")(work)()) is None
        assert asyncio.run(distributed_lock("name", on_busy=lambda busy: "sync")(work)()) == "sync"
        assert asyncio.run(distributed_lock("name", on_busy=answer)(work)()) == "answered"

    def test_a_busy_lock_inside_the_function_is_not_its_own(self):
        """on_busy answers for this lock, not for whatever the body meets."""

        @distributed_lock("free", on_busy="skip")
        def work():
            with lock("name", wait=0):
                must_not_run()

        with pytest.raises(LockNotAcquired):
            work()


@distributed_lock("order:{order_id}")
def order_view(request, order_id):
    return HttpResponse(" ".join(held_names()) + " " + next(iter(locks["default"].held())).holder.label)


@distributed_lock("order:{order_id}")
async def async_order_view(request, order_id):
    return HttpResponse(" ".join([info.name async for info in locks["default"].aheld()]))


@distributed_lock("order:1")
def helper(request):
    must_not_run()


def view_with_helper(request, call=helper):
    try:
        call(request)
    except LockNotAcquired:
        return HttpResponse("the helper raised")


@method_decorator(distributed_lock("order:{order_id}"), name="dispatch")
class OrderView(View):
    def get(self, request, order_id):
        return HttpResponse(" ".join(held_names()))


class HandlerView(View):
    @method_decorator(distributed_lock("order:{order_id}"))
    def get(self, request, order_id):
        return HttpResponse(" ".join(held_names()))


class MethodView(View):
    @distributed_lock("order:{order_id}")
    def get(self, request, order_id):
        return HttpResponse(" ".join(held_names()))


class PlainView(View):
    def get(self, request):
        return HttpResponse(" ".join(held_names()))


class OtherView(PlainView):
    pass


@distributed_lock("order:1")
def delete(request):
    must_not_run()


class ViewWithHelper(View):
    """Calls a helper that has the name of a handler."""

    def get(self, request):
        return view_with_helper(request, delete)


urlpatterns = [
    path("function/<int:order_id>/", order_view),
    path("wrapped/<int:order_id>/", logged(csrf_exempt(order_view))),
    path("async/<int:order_id>/", async_order_view),
    path("class/<int:order_id>/", OrderView.as_view()),
    path("handler/<int:order_id>/", HandlerView.as_view()),
    path("method/<int:order_id>/", MethodView.as_view()),
    path("helper/", view_with_helper),
    path("class-helper/", ViewWithHelper.as_view()),
    path("as-view/", distributed_lock("order:1")(OtherView.as_view())),
    path("partial/", functools.partial(order_view, order_id=1)),
]


@pytest.mark.urls("tests.decorators.test_decorators")
class TestViews:
    KINDS = ("function", "wrapped", "class", "handler", "method")

    @pytest.mark.parametrize("kind", KINDS)
    def test_run_under_their_lock(self, kind):
        response = Client().get(f"/{kind}/2/")
        assert response.status_code == 200
        assert response.content.split()[0] == b"order:2"
        assert held_names() == []

    def test_are_labelled_by_method_and_route(self):
        assert Client().get("/function/2/").content == b"order:2 GET function/<int:order_id>/"

    @pytest.mark.usefixtures("busy")
    @pytest.mark.parametrize("kind", KINDS)
    def test_answer_409_with_retry_after_when_busy(self, kind):
        response = Client().get(f"/{kind}/1/")
        assert response.status_code == 409
        assert 1 <= int(response["Retry-After"]) <= 3
        assert response["Content-Type"] == "text/plain; charset=utf-8"
        assert response.content == b"This is already being processed. Try again in a moment.\n"

    @pytest.mark.usefixtures("busy")
    def test_answer_in_json_to_who_prefers_it(self):
        response = Client().get("/function/1/", headers={"accept": "application/json"})
        assert response.status_code == 409
        assert response.json() == {
            "detail": "This is already being processed. Try again in a moment.",
            "code": "busy",
            "retry_after": int(response["Retry-After"]),
        }

    @on_each_store
    def test_async_views_run_under_their_lock(self):
        response = asyncio.run(AsyncClient().get("/async/2/"))
        assert response.content == b"order:2"

    @pytest.mark.usefixtures("busy")
    def test_async_views_answer_409(self):
        response = asyncio.run(AsyncClient().get("/async/1/"))
        assert response.status_code == 409

    @pytest.mark.usefixtures("busy")
    def test_a_helper_that_takes_a_request_raises(self):
        assert Client().get("/helper/").content == b"the helper raised"
        assert Client().get("/class-helper/").content == b"the helper raised"

    @pytest.mark.usefixtures("busy")
    @pytest.mark.parametrize("url", ["/as-view/", "/partial/"])
    def test_views_that_the_urlconf_wraps_answer_409(self, url):
        assert Client().get(url).status_code == 409

    @pytest.mark.usefixtures("busy")
    def test_on_busy_raise_counts_for_views_too(self):
        view = distributed_lock("order:1", on_busy="raise")(must_not_run)
        with pytest.raises(LockNotAcquired):
            view(RequestFactory().get("/"))

    @pytest.mark.usefixtures("busy")
    def test_a_view_called_by_a_unit_test_answers_409(self):
        assert order_view(RequestFactory().get("/"), order_id=1).status_code == 409


class TestRefusals:
    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("order:{order_id}", "asks for 'order_id', but tests.decorators.test_decorators.TestRefusals"),
            ("order:{}", "fills a field by position; name an argument of"),
            ("{pk}{kind}", "has adjacent fields"),
            ("{pk!r}", "formats the field 'pk'"),
            ("", "is empty"),
        ],
    )
    def test_a_template_that_no_call_could_fill_is_refused_where_it_is_written(self, template, message):
        def work(pk, kind):
            must_not_run()

        with pytest.raises(InvalidLockName) as caught:
            distributed_lock(template)(work)
        assert message in str(caught.value)

    def test_a_model_instance_as_a_value(self):
        from django.contrib.auth.models import User

        @distributed_lock("user:{user}")
        def work(user):
            must_not_run()

        with pytest.raises(InvalidLockName, match=r"Use its primary key: \{user.pk\}"):
            work(User(pk=1))

    def test_wrong_options(self):
        with pytest.raises(ValueError, match="on_busy is 'wait'; choose 'raise', 'skip', .* respond"):
            distributed_lock("name", on_busy="wait")
        with pytest.raises(ValueError, match="ttl is 0"):
            distributed_lock("name", ttl=0)
        with pytest.raises(TypeError, match="ttl or wait"):
            distributed_lock("name", timeout=5)
        with pytest.raises(TypeError, match="was given two names, 'one' and 'two'"):
            distributed_lock("one", name="two")
        with pytest.raises(TypeError, match="is given as name="):
            distributed_lock(lambda pk: f"order:{pk}")

    def test_what_cannot_be_decorated(self):
        with pytest.raises(TypeError, match="on the class TestRefusals.*method_decorator"):
            distributed_lock("name")(TestRefusals)
        with pytest.raises(TypeError, match="which is no function. Put it below what makes it a property"):
            distributed_lock("name")(property(must_not_run))

    def test_hold_until(self):
        with pytest.raises(ValueError, match="hold_until is 'end'; choose 'response' or 'return'"):
            distributed_lock("name", hold_until="end")
        with pytest.raises(TypeError, match="is given as name="):
            distributed_lock(must_not_run, hold_until="return")


def test_a_function_that_was_to_make_names_is_told_from_one_that_is_guarded(caplog):
    @distributed_lock
    def make_key(order_id):
        return f"order:{order_id}"

    make_key(1)
    assert not caplog.records
    for _ in range(2):
        make_key(must_not_run)
    [record] = caplog.records
    assert "write @distributed_lock(name=make_key)" in record.message
