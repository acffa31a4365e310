"""ATOMIC_REQUESTS: where the decorator stands on the view of a URL, the transaction is inside the lock."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest
from django.contrib.auth.models import Group
from django.core.signals import request_finished
from django.db import InterfaceError, connection, connections, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_distlock import LockBackendError, LockLost, current_lease, distributed_lock, lock, locks
from django_distlock.core.forced import force_release
from django_distlock.testing import lose, store_down
from tests.support.tools import eventually, in_a_thread, on_stores
from tests.support.views import logged

on_each_store = on_stores("redis", "locmem")

pytestmark = [
    pytest.mark.usefixtures("backend", "atomic_requests"),
    pytest.mark.urls("tests.decorators.test_http_atomic_requests"),
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
]

seen = {}


@pytest.fixture
def atomic_requests(monkeypatch):
    seen.clear()
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


@pytest.fixture
def atomic_others(atomic_requests, monkeypatch):
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)
    monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)


def held_names():
    return [info.name for info in locks["default"].held()]


def note(request=None, **_):
    """What is open while the view runs, and whether the lock is held when the transaction has ended."""
    seen["open"] = [each.alias for each in connections.all() if each.in_atomic_block]
    seen["depth"] = len(connection.atomic_blocks)
    seen["held"] = held_names()
    transaction.on_commit(lambda: seen.update(at_commit=held_names()))
    if request is not None and "fail" in request.GET:
        Group.objects.create(name="rolled back")
        raise ZeroDivisionError
    return HttpResponse("done")


noting = distributed_lock("name")(note)


@method_decorator(distributed_lock("name"), name="dispatch")
class DispatchView(View):
    def get(self, request):
        return note(request)


class OwnDispatchView(View):
    @distributed_lock("name")
    def dispatch(self, request):
        return super().dispatch(request)

    def get(self, request):
        return note(request)


class PlainView(View):
    def get(self, request):
        return note(request)


class HandlerView(View):
    @method_decorator(distributed_lock("name"))
    def get(self, request):
        return note(request)


@method_decorator(distributed_lock("outer"), name="dispatch")
class LockedTwiceView(HandlerView):
    pass


@method_decorator(distributed_lock("name"), name="dispatch")
class AsyncView(View):
    async def get(self, request):
        return note()


@distributed_lock("name")
async def async_view(request):
    return note()


def with_helper(request):
    return distributed_lock("name")(note)(request)


def unmarked(request):
    return noting(request)


@distributed_lock("name")
def losing(request):
    Group.objects.create(name="lost")
    lose(current_lease())
    return HttpResponse("done")


@distributed_lock("name", on_lost="log")
def losing_quietly(request):
    return losing.__wrapped__(request)


@distributed_lock("name", on_unavailable="run")
def running(request):
    seen["open"] = [each.alias for each in connections.all() if each.in_atomic_block]
    Group.objects.create(name="written without the lock")
    return HttpResponse("done")


urlpatterns = [
    path("function/", noting),
    path("wrapped/", logged(csrf_exempt(noting))),
    path("dispatch/", DispatchView.as_view()),
    path("own-dispatch/", OwnDispatchView.as_view()),
    path("as-view/", distributed_lock("name")(PlainView.as_view())),
    path("twice/", distributed_lock("outer")(distributed_lock("name")(note))),
    path("handler/", HandlerView.as_view()),
    path("locked-twice/", LockedTwiceView.as_view()),
    path("partial/", functools.partial(noting)),
    path("helper/", with_helper),
    path("unmarked/", unmarked),
    path("non-atomic-above/", transaction.non_atomic_requests(distributed_lock("name")(note))),
    path("non-atomic-below/", distributed_lock("name")(transaction.non_atomic_requests(functools.partial(note)))),
    path("ignore/", distributed_lock("name", in_atomic="ignore")(note)),
    path("refuse/", distributed_lock("name", in_atomic="refuse")(note)),
    path("losing/", losing),
    path("losing-quietly/", losing_quietly),
    path("running/", running),
    path("async/", async_view),
    path("async-class/", AsyncView.as_view()),
]


@pytest.mark.parametrize("url", ["function", "wrapped", "dispatch", "own-dispatch", "as-view", "refuse"])
class TestViewsOfUrls:
    @on_each_store
    def test_open_one_transaction_inside_the_lock(self, url):
        assert Client().get(f"/{url}/").status_code == 200
        assert seen == {"open": ["default"], "depth": 1, "held": ["name"], "at_commit": []}
        assert held_names() == []

    def test_roll_back_before_they_free_it(self, url):
        with pytest.raises(ZeroDivisionError):
            Client().get(f"/{url}/?fail")
        assert seen["open"] == ["default"]
        assert not Group.objects.exists()
        assert held_names() == []

    @pytest.mark.usefixtures("atomic_others")
    def test_in_each_database_that_wants_it(self, url):
        assert Client().get(f"/{url}/").status_code == 200
        assert seen["open"] == ["other"]


@pytest.mark.parametrize("url", ["handler", "helper", "unmarked", "partial", "ignore"])
def test_elsewhere_django_opens_the_transaction(url):
    assert Client().get(f"/{url}/").status_code == 200
    assert seen == {"open": ["default"], "depth": 1, "held": ["name"], "at_commit": []}
    assert held_names() == []


def test_a_view_that_runs_without_its_lock_commits():
    with store_down():
        assert Client().get("/running/").status_code == 200
    assert seen["open"] == ["default"]
    assert Group.objects.get().name == "written without the lock"


def test_of_two_decorators_on_one_view_one_opens_the_transaction():
    assert Client().get("/twice/").status_code == 200
    assert seen["depth"] == 1
    assert sorted(seen["held"]) == ["name", "outer"]
    assert seen["at_commit"] == []
    assert held_names() == []


def test_dispatch_and_handler_both_locked():
    assert Client().get("/locked-twice/").status_code == 200
    assert seen["depth"] == 1
    assert sorted(seen["held"]) == ["name", "outer"]
    assert seen["at_commit"] == []
    assert held_names() == []


@pytest.mark.parametrize("url", ["non-atomic-above", "non-atomic-below"])
def test_views_that_switched_it_off_stay_so(url):
    assert Client().get(f"/{url}/").status_code == 200
    assert seen == {"open": [], "depth": 0, "held": ["name"], "at_commit": ["name"]}


def test_called_by_hand_a_view_opens_no_transaction():
    """As without the decorator: ATOMIC_REQUESTS is about requests that Django routes."""
    assert noting(RequestFactory().get("/")).status_code == 200
    assert seen["open"] == []


def test_busy_it_opens_no_transaction(monkeypatch):
    def refuse():
        pytest.fail("a transaction was begun")

    monkeypatch.setattr(connection, "_start_transaction_under_autocommit", refuse)
    with lock("name"):
        assert in_a_thread(lambda: Client().get("/function/").status_code) == 409


def test_lost_before_commit_it_rolls_back():
    with pytest.raises(LockLost):
        Client().get("/losing/")
    assert not Group.objects.exists()


def test_unless_told_otherwise():
    assert Client().get("/losing-quietly/").status_code == 200
    assert Group.objects.exists()


@distributed_lock("name", on_busy="skip")
def task():
    """What a worker does at once when a hook has sent it."""
    seen["task"] = "done"


def view_with_hooks(*hooks, robust=False, response=HttpResponse):
    @distributed_lock("name")
    def view(request):
        for using, hook in hooks:
            transaction.on_commit(hook, using=using, robust=robust)
        return response()

    return view


def note_held(place):
    return lambda: seen.update({place: held_names()})


def fail():
    raise ZeroDivisionError


class TestHooks:
    """Of on_commit(), on the view of a URL: they run when its lock is free."""

    def test_they_may_send_a_task_with_the_same_lock(self):
        routed(view_with_hooks(("default", lambda: in_a_thread(task))))
        assert seen == {"task": "done"}

    def test_they_may_take_the_lock_themselves(self):
        routed(view_with_hooks(("default", task)))
        assert seen == {"task": "done"}

    def test_they_run_in_the_order_in_which_they_were_registered(self):
        order = []

        def view(request):
            with transaction.atomic():
                transaction.on_commit(lambda: order.append(1))
            with pytest.raises(ZeroDivisionError), transaction.atomic():
                transaction.on_commit(lambda: order.append("rolled back"))
                fail()
            with lock("other"):
                transaction.on_commit(lambda: order.append(2))
            transaction.on_commit(lambda: order.append(3) or transaction.on_commit(lambda: order.append(4)))
            return HttpResponse()

        routed(distributed_lock("name")(view))
        assert order == [1, 2, 3, 4]
        assert held_names() == []

    @pytest.mark.parametrize("end", [fail, lambda: transaction.set_rollback(True)], ids=["raises", "set_rollback"])
    def test_not_after_a_rollback(self, end):
        @distributed_lock("name")
        def view(request):
            transaction.on_commit(lambda: pytest.fail("run after a rollback"))
            end()
            return HttpResponse()

        with contextlib.suppress(ZeroDivisionError):
            routed(view)
        assert held_names() == []

    def test_not_after_a_commit_that_fails(self, monkeypatch):
        """Nor at the next one, where Django leaves them to the connection."""

        def refuse():
            raise InterfaceError("closed")

        @distributed_lock("name")
        def view(request):
            transaction.on_commit(lambda: pytest.fail("run after a commit that failed"))
            with lock("other"):
                pass
            monkeypatch.setattr(connection, "_commit", refuse)
            return HttpResponse()

        with pytest.raises(InterfaceError):
            routed(view)
        request_finished.send(sender=None)
        assert held_names() == []
        monkeypatch.undo()
        with transaction.atomic():
            pass

    def test_of_several_databases(self, monkeypatch):
        monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)
        routed(view_with_hooks(("default", note_held("default")), ("other", note_held("other"))))
        assert seen == {"default": [], "other": []}

    @pytest.mark.parametrize("failing", ["default", "other"])
    def test_one_that_raises_keeps_none_of_another_database_from_running(self, monkeypatch, failing):
        """All of them are committed by then."""
        monkeypatch.setitem(connections.settings["other"], "ATOMIC_REQUESTS", True)
        other = {"default": "other", "other": "default"}[failing]
        with pytest.raises(ZeroDivisionError):
            routed(view_with_hooks((failing, fail), (failing, note_held("same")), (other, note_held("other"))))
        assert seen == {"other": []}
        assert held_names() == []

    def test_a_robust_one_that_raises_is_logged_and_the_others_run(self, caplog):
        routed(view_with_hooks(("default", fail), ("default", note_held("next")), robust=True))
        assert seen == {"next": []}
        assert "in on_commit()" in caplog.text

    def test_while_the_response_holds_the_lock(self):
        hook = ("default", note_held("hook"))
        response = routed(view_with_hooks(hook, response=lambda: StreamingHttpResponse(iter([b"text"]))))
        assert seen == {"hook": ["name"]}
        assert response.getvalue() == b"text"
        assert held_names() == []

    def test_before_a_lost_lock_is_told(self, monkeypatch):
        """Lost after the last look at it, at COMMIT."""

        commit = connection._commit

        def lose_and_commit():
            [info] = locks["default"].held()
            assert force_release(info, by="the test")
            commit()

        @distributed_lock("name")
        def view(request):
            transaction.on_commit(note_held("hook"))
            Group.objects.create(name="committed")
            monkeypatch.setattr(connection, "_commit", lose_and_commit)
            return HttpResponse()

        with pytest.raises(LockLost):
            routed(view)
        assert seen == {"hook": []}
        assert Group.objects.exists()

    def test_before_it_is_told_that_the_release_failed(self, valkey_locks, store):
        @distributed_lock("name")
        def view(request):
            transaction.on_commit(lambda: seen.update(hook="has run"))
            store.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
            return HttpResponse()

        try:
            with pytest.raises(LockBackendError):
                routed(view)
        finally:
            store.execute_command("ACL", "SETUSER", "default", "+@all")
        assert seen == {"hook": "has run"}
        eventually(lambda: held_names() == [])

    def test_of_a_transaction_that_the_view_opens_itself_they_run_while_it_is_held(self):
        """Django runs them when that transaction ends, and the view goes on."""

        @distributed_lock("name")
        def view(request):
            with transaction.atomic(using="other"):
                transaction.on_commit(note_held("hook"), using="other")
            return HttpResponse()

        routed(view)
        assert seen == {"hook": ["name"]}


@pytest.mark.django_db(databases=["default", "other"])
def test_hooks_are_captured_in_a_testcase(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True) as hooks:
        routed(view_with_hooks(("default", note_held("hook"))))
        assert seen == {}
    assert len(hooks) == 1
    assert seen == {"hook": []}


def routed(view):
    """The answer of the view to a request that Django routes."""
    urlpatterns.append(path("routed/", view))
    try:
        return Client().get("/routed/")
    finally:
        urlpatterns.pop()


@pytest.mark.parametrize("url", ["async", "async-class"])
def test_async_views_are_refused_as_ever(url):
    with pytest.raises(RuntimeError, match="cannot use ATOMIC_REQUESTS with async views"):
        asyncio.run(AsyncClient().get(f"/{url}/"))
    assert seen == {}
