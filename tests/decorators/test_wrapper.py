"""Everything that can be decorated: generators, objects, methods, partials, commands; and what of it survives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import io
import typing

import pytest
from django.core.management import BaseCommand, call_command
from django.db import transaction
from django.views.decorators.csrf import csrf_exempt

from django_distlock import LockNotAcquired, LockReentry, distributed_lock, lock, locks, skip
from tests.support.tools import eventually, held_names, in_a_thread, on_stores

on_each_store = on_stores("redis", "locmem")

pytestmark = pytest.mark.usefixtures("backend")


@distributed_lock("order:{order_id}")
def rows(order_id, count=2):
    """Yields rows."""
    for _ in range(count):
        received = yield held_names()
        if received:
            yield received
    return "returned"


@distributed_lock("order:{order_id}")
async def arows(order_id, count=2):
    for _ in range(count):
        received = yield held_names()
        if received:
            yield received


class TestGenerators:
    def test_hold_the_lock_while_they_are_iterated(self):
        items = rows(1)
        assert held_names() == []
        assert list(items) == [["order:1"], ["order:1"]]
        assert held_names() == []

    def test_stay_generators(self):
        assert inspect.isgeneratorfunction(rows)
        assert str(inspect.signature(rows)) == "(order_id, count=2)"
        assert rows.__doc__ == "Yields rows."

    def test_take_what_is_sent_and_return_what_they_return(self):
        items = rows(1, 1)
        next(items)
        assert items.send("sent") == "sent"
        with pytest.raises(StopIteration) as end:
            next(items)
        assert end.value.value == "returned"

    def test_take_what_is_thrown(self):
        items = rows(1)
        next(items)
        with pytest.raises(ZeroDivisionError):
            items.throw(ZeroDivisionError)
        assert held_names() == []

    def test_closed_they_free_it(self):
        items = rows(1)
        next(items)
        items.close()
        assert held_names() == []

    def test_dropped_they_free_it(self):
        items = rows(1)
        next(items)
        del items
        gc.collect()
        assert held_names() == []

    @on_each_store
    def test_ended_by_another_thread(self):
        items = rows(1)
        next(items)
        in_a_thread(items.close)
        assert held_names() == []

    def test_two_at_once(self):
        items = rows(1)
        next(items)
        with pytest.raises(LockReentry):
            next(rows(1))
        with pytest.raises(LockNotAcquired):
            in_a_thread(lambda: next(rows(1)))
        assert sorted(next(rows(2))) == ["order:1", "order:2"]
        items.close()

    @pytest.mark.django_db(transaction=True)
    def test_in_a_transaction(self):
        with transaction.atomic():
            list(rows(1))
            assert held_names() == ["order:1"]
            list(rows(1))
        assert held_names() == []

    @pytest.mark.usefixtures("busy")
    def test_busy(self):
        def work():
            yield "never"

        with pytest.raises(LockNotAcquired):
            list(distributed_lock("name")(work)())
        assert list(distributed_lock("name", on_busy="skip")(work)()) == []
        assert list(distributed_lock("name", on_busy=skip(["another"]))(work)()) == ["another"]

    def test_context_managers_are_made_of_them(self):
        @contextlib.contextmanager
        @distributed_lock("name")
        def guard():
            yield held_names()

        with guard() as names:
            assert names == held_names() == ["name"]
        assert held_names() == []


class TestAsyncGenerators:
    def test_hold_the_lock_while_they_are_iterated(self):
        async def collect():
            return [item async for item in arows(1)]

        assert asyncio.run(collect()) == [["order:1"], ["order:1"]]
        assert held_names() == []

    def test_stay_async_generators(self):
        assert inspect.isasyncgenfunction(arows)
        assert str(inspect.signature(arows)) == "(order_id, count=2)"

    def test_take_what_is_sent_and_thrown(self):
        async def work():
            items = arows(1)
            await anext(items)
            assert await items.asend("sent") == "sent"
            with pytest.raises(ZeroDivisionError):
                await items.athrow(ZeroDivisionError)
            return held_names()

        assert asyncio.run(work()) == []

    def test_what_they_catch_does_not_end_them(self):
        @distributed_lock("name")
        async def stubborn():
            while True:
                try:
                    yield held_names()
                except ZeroDivisionError:
                    yield "caught"

        async def work():
            items = stubborn()
            await anext(items)
            assert await items.athrow(ZeroDivisionError) == "caught"
            assert await anext(items) == ["name"]
            await items.aclose()
            return held_names()

        assert asyncio.run(work()) == []

    def test_closed_they_close_what_they_iterate(self):
        closed = []

        @distributed_lock("name")
        async def closing():
            try:
                yield 1
            finally:
                closed.extend(held_names())

        async def work():
            async with contextlib.aclosing(closing()) as items:
                await anext(items)

        asyncio.run(work())
        assert closed == ["name"]
        assert held_names() == []

    @on_each_store
    def test_dropped_they_free_it(self):
        """Event loops close what nobody iterates any more."""

        async def work():
            async for _ in arows(1):
                break
            gc.collect()
            while held_names():
                await asyncio.sleep(0.005)

        asyncio.run(asyncio.wait_for(work(), 10))

    @on_each_store
    def test_left_over_they_free_it_when_the_loop_ends(self):
        kept = []

        async def work():
            kept.append(arows(1))
            await anext(kept[0])

        asyncio.run(work())
        assert held_names() == []

    @on_each_store
    def test_cancelled(self):
        @distributed_lock("name")
        async def endless():
            yield 1
            await asyncio.sleep(60)

        async def work():
            async for _ in endless():
                pass

        async def main():
            task = asyncio.create_task(work())
            while not held_names():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        eventually(lambda: held_names() == [])

    @pytest.mark.usefixtures("busy")
    def test_busy(self):
        async def work():
            yield "never"

        async def another(problem):
            for item in ("a", "b"):
                yield item

        async def collect(on_busy):
            return [item async for item in distributed_lock("name", on_busy=on_busy)(work)()]

        with pytest.raises(LockNotAcquired):
            asyncio.run(collect(None))
        assert asyncio.run(collect("skip")) == []
        assert asyncio.run(collect(skip(["another"]))) == ["another"]
        assert asyncio.run(collect(another)) == ["a", "b"]


class Plain:
    def __call__(self, order_id):
        return held_names()


class Coroutine:
    async def __call__(self, order_id):
        return held_names()


class Generator:
    def __call__(self, order_id):
        yield held_names()


class AsyncGenerator:
    async def __call__(self, order_id):
        yield held_names()


class TestObjectsAndPartials:
    @pytest.mark.parametrize("wrap", [lambda value: value, lambda value: functools.partial(value.__call__)])
    def test_are_what_their_call_is(self, wrap):
        async def collect(items):
            return [item async for item in items]

        decorate = distributed_lock("order:{order_id}")
        assert decorate(wrap(Plain()))(order_id=1) == ["order:1"]
        assert asyncio.run(decorate(wrap(Coroutine()))(1)) == ["order:1"]
        assert list(decorate(wrap(Generator()))(1)) == [["order:1"]]
        assert asyncio.run(collect(decorate(wrap(AsyncGenerator()))(1))) == [["order:1"]]

    def test_arguments_of_a_partial_fill_the_name(self):
        def work(order_id, note):
            return held_names()

        assert distributed_lock("{order_id}:{note}")(functools.partial(work, 3))("x") == ["3:x"]

    def test_bound_methods(self):
        class Account:
            pk = 3

            def pay(self, amount):
                return held_names()

        assert distributed_lock("{amount}")(Account().pay)(5) == ["5"]

    @pytest.mark.parametrize("kind", [staticmethod, classmethod])
    def test_static_and_class_methods_above_and_below(self, kind):
        class Account:
            @distributed_lock("above:{amount}")
            @kind
            def above(*args, amount):
                return held_names()

            @kind
            @distributed_lock("below:{amount}")
            def below(*args, amount):
                return held_names()

        for owner in (Account, Account()):
            assert owner.above(amount=5) == ["above:5"]
            assert owner.below(amount=5) == ["below:5"]


class Import(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("source")

    @distributed_lock("import:{source}")
    def handle(self, *args, **options):
        return " ".join(held_names())


class TestCommands:
    def test_run_under_their_lock(self):
        out = io.StringIO()
        call_command(Import(), "shop", stdout=out)
        assert out.getvalue() == "import:shop\n"
        assert held_names() == []

    def test_raise_when_it_is_busy(self):
        with lock("import:shop"), pytest.raises(LockNotAcquired):
            in_a_thread(lambda: call_command(Import(), "shop"))


Number = int


class TestDisguise:
    def test_annotations_that_are_strings_can_be_evaluated(self):
        """In the globals of the function's module, as Django Ninja does it."""

        @distributed_lock("name")
        def work(number: Number, other: Late = None) -> list[Number]:
            return []

        assert work.__annotations__ == {"number": "Number", "other": "Late", "return": "list[Number]"}
        assert eval(work.__annotations__["return"], work.__globals__) == list[int]
        assert typing.get_type_hints(work)["number"] is int
        assert str(inspect.signature(work)) == "(number: 'Number', other: 'Late' = None) -> 'list[Number]'"

    @pytest.mark.parametrize("kind", [rows, arows, Import.handle])
    def test_everything_else_stays_too(self, kind):
        inner = kind.__wrapped__
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__", "__globals__"):
            assert getattr(kind, attribute) == getattr(inner, attribute)

    def test_attributes(self):
        work = csrf_exempt(lambda request: None)
        work.mine = 3
        decorated = distributed_lock("name")(work)
        assert decorated.csrf_exempt
        assert decorated.mine == 3

    def test_decorating_again_changes_nothing_of_the_function(self):
        def work():
            return held_names()

        once, again = distributed_lock("one")(work), distributed_lock("two")(work)
        assert (once(), again()) == (["one"], ["two"])
        assert not vars(work)


class Late:
    pass


def test_no_lock_is_left(backend):
    assert list(locks["default"].held()) == []
