"""``on_unavailable`` of the decorator: what a call does whose store cannot be asked."""

from __future__ import annotations

import asyncio
import logging

import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory

from django_distlock import LockBackendError, State, current_lease, distributed_lock, lock, locks, respond, skip
from django_distlock.signals import lock_busy, lock_lost
from django_distlock.testing import held_elsewhere, held_here, override_locks, store_down
from tests.support.tools import must_not_run

pytestmark = pytest.mark.usefixtures("locmem_locks")

request = RequestFactory().get("/")


def state(*_):
    return current_lease().state


async def astate(*_):
    return current_lease().state


def states():
    yield current_lease().state


async def astates():
    yield current_lease().state


async def collected(items):
    return [item async for item in items]


def outcomes(on_unavailable, **options):
    """Of each kind of callable while the store is down."""
    locked = distributed_lock("name", on_unavailable=on_unavailable, **options)
    with store_down():
        return [
            locked(state)(), asyncio.run(locked(astate)()), list(locked(states)()),
            asyncio.run(collected(locked(astates)())),
        ]  # fmt: skip


class TestEachChoice:
    def test_run(self):
        unavailable = State.UNAVAILABLE
        assert outcomes("run") == [unavailable, unavailable, [unavailable], [unavailable]]
        assert held_here() == []

    @pytest.mark.parametrize("choice", ["skip", skip, skip(None)])
    def test_skip(self, choice):
        assert outcomes(choice) == [None, None, [], []]

    def test_skip_with_a_value(self, caplog):
        assert distributed_lock("free", on_unavailable=skip(7))(lambda: "ran")() == "ran"
        with store_down():
            assert distributed_lock("name", on_unavailable=skip(7))(must_not_run)() == 7
        [line] = [record for record in caplog.records if "is skipped" in record.getMessage()]
        assert line.levelno == logging.WARNING
        assert "does not answer" in line.getMessage()

    def test_something_to_call_gets_the_error_and_the_arguments(self):
        @distributed_lock(
            "order:{order_id}", on_unavailable=lambda error, order_id, note: (type(error), order_id, note)
        )
        def work(order_id, note):
            must_not_run()

        with store_down():
            assert work(7, note="x") == (LockBackendError, 7, "x")

    def test_what_is_called_may_be_async(self):
        async def answer(error):
            return "answered"

        with store_down():
            assert asyncio.run(distributed_lock("name", on_unavailable=answer)(astate)()) == "answered"

    @pytest.mark.parametrize("choice", [None, "raise", "retry"])
    def test_otherwise_it_raises(self, choice):
        with store_down(), pytest.raises(LockBackendError):
            distributed_lock("name", on_unavailable=choice)(must_not_run)()

    def test_busy_is_another_thing(self):
        with held_elsewhere("name"):
            assert distributed_lock("name", on_busy=skip("busy"), on_unavailable="run")(must_not_run)() == "busy"
        with store_down():
            assert distributed_lock("name", on_busy="skip", on_unavailable=skip("down"))(must_not_run)() == "down"

    def test_errors_of_the_body_are_its_own(self):
        @distributed_lock("name", on_unavailable="skip")
        def work():
            with store_down():
                return lock("other").acquire()

        with pytest.raises(LockBackendError):
            work()

    @pytest.mark.parametrize("choice", ["run", "skip", lambda error: must_not_run()])
    def test_what_somebody_has_to_correct_is_raised(self, choice, monkeypatch):
        def refuse(*_, **__):
            error = LockBackendError("The password is wrong.")
            error.is_final = True
            raise error

        monkeypatch.setattr(locks["default"], "acquire", refuse)
        with pytest.raises(LockBackendError, match="password"):
            distributed_lock("name", on_unavailable=choice)(must_not_run)()

    def test_others_are_refused(self):
        with pytest.raises(ValueError, match="on_unavailable is 'wait'; choose 'raise', 'run', 'skip', 'retry', skip"):
            distributed_lock("name", on_unavailable="wait")
        with pytest.raises(ValueError, match="'skip', 'retry' and something to call are for .* of @distributed_lock"):
            lock("name", on_unavailable="skip")
        with pytest.raises(ValueError, match="choose 'raise' .* or 'run'"):
            lock("name", on_unavailable=must_not_run)

    def test_signals_tell_of_no_lock(self):
        told = []
        for signal in (lock_busy, lock_lost):
            signal.connect(lambda **about: told.append(about), weak=False, dispatch_uid="told")
        outcomes("run", on_lost=must_not_run)
        for signal in (lock_busy, lock_lost):
            signal.disconnect(dispatch_uid="told")
        assert told == []


class TestViews:
    def answer(self, view, **headers):
        with store_down():
            return view(RequestFactory().get("/", headers=headers))

    def test_run_answers(self):
        view = distributed_lock("name", on_unavailable="run")(lambda request: HttpResponse(state()))
        assert self.answer(view).content == b"unavailable"

    @pytest.mark.usefixtures("keep_connections")
    def test_a_response_that_is_made_later_runs_without_the_lock_too(self):
        view = distributed_lock("name", on_unavailable="run")(lambda request: StreamingHttpResponse(["a", "b"]))
        response = self.answer(view)
        assert response.getvalue() == b"ab"
        response.close()
        assert not lock("name").locked()

    def test_respond_answers_503_in_its_own_form(self, caplog):
        view = distributed_lock("name", on_unavailable=respond(template_name="page.html"))(must_not_run)
        for each in (view, distributed_lock("name", on_unavailable=respond)(must_not_run)):
            response = self.answer(each, accept="application/json")
            assert response.status_code == 503
            assert b"unavailable" in response.content
        assert "is answered 503" in caplog.text

    def test_respond_of_an_async_view(self):
        @distributed_lock("name", on_unavailable=respond)
        async def view(request):
            must_not_run()

        with store_down():
            assert asyncio.run(view(AsyncRequestFactory().get("/"))).status_code == 503

    def test_raise_raises_and_without_it_the_answer_is_503(self):
        with pytest.raises(LockBackendError):
            self.answer(distributed_lock("name", on_unavailable="raise")(must_not_run))
        assert self.answer(distributed_lock("name")(must_not_run)).status_code == 503

    def test_on_busy_of_a_view_that_says_what_to_do(self):
        view = distributed_lock("name", on_busy="raise", on_unavailable=respond)(must_not_run)
        assert self.answer(view).status_code == 503


class TestTheDefaultOfAnAlias:
    def test_run_is_that_of_locks_and_calls(self):
        with override_locks(ON_UNAVAILABLE="run"), store_down():
            with lock("name") as lease:
                assert lease.state is State.UNAVAILABLE
            assert distributed_lock("name")(state)() is State.UNAVAILABLE
            assert distributed_lock("name")(lambda request: HttpResponse())(request).status_code == 200

    @pytest.mark.parametrize("choice", ["raise", "skip", respond])
    def test_what_is_said_counts_more(self, choice):
        with override_locks(ON_UNAVAILABLE="run"), store_down():
            with pytest.raises(LockBackendError):
                lock("name", on_unavailable="raise").acquire()
            if choice == "raise":
                with pytest.raises(LockBackendError):
                    distributed_lock("name", on_unavailable=choice)(must_not_run)(request)
            else:
                answer = distributed_lock("name", on_unavailable=choice)(must_not_run)(request)
                assert getattr(answer, "status_code", None) in (None, 503)
