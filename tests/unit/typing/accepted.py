"""What type checkers know of decorated functions. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any, assert_type

from django.http import HttpRequest, HttpResponse

from django_distlock import Lease, Leases, distributed_lock, leader, lock, lock_all, respond, skip


@distributed_lock
def bare(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", ttl=5, wait=None, in_atomic="refuse", hold_until="return")
def named(pk: int, *, note: str = "") -> str:
    return note


@distributed_lock(["account:{source}", "account:{target}"], on_busy="retry")
def several(source: int, target: int) -> str:
    return ""


@distributed_lock(name=lambda pk: f"order:{pk}")
def by_callable(pk: int) -> list[int]:
    return [pk]


@distributed_lock("order:{pk}")
async def coroutine(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy="skip")
def skipping(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy="skip")
async def skipping_coroutine(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy=skip(""))
def skipping_with_a_value(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_unavailable="run")
def running(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy="retry", on_unavailable="retry", retry_for=timedelta(hours=1))
def retrying(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_unavailable="skip")
def skipping_outages(pk: int) -> str:
    return ""


@distributed_lock("order:{pk}", on_busy="skip", on_unavailable="skip")
async def skipping_all(pk: int) -> str:
    return ""


@distributed_lock(name=lambda pk: f"order:{pk}", on_busy=skip(""), on_unavailable="skip")
def skipping_by_callable(pk: int) -> str:
    return ""


@distributed_lock("order:{order_id}", on_busy=respond(status=423), on_unavailable=respond)
def view_in_outages(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse()


@distributed_lock("rows")
def generator() -> Iterator[int]:
    yield 1


@distributed_lock("rows")
async def async_generator() -> AsyncIterator[int]:
    yield 1


@distributed_lock("order:{order_id}", on_busy=respond(status=423, template_name="busy.html"))
def view(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse()


class Account:
    pk = 1

    @distributed_lock("account:{self.pk}")
    def pay(self, amount: int) -> bool:
        return True

    @staticmethod
    @distributed_lock("static")
    def static(amount: int) -> bool:
        return True

    @classmethod
    @distributed_lock("class")
    def of_class(cls, amount: int) -> bool:
        return True


async def main() -> None:
    assert_type(bare(1), str)
    assert_type(named(1, note="x"), str)
    assert_type(by_callable(1), list[int])
    assert_type(await coroutine(1), str)
    assert_type(skipping(1), str | None)
    assert_type(await skipping_coroutine(1), str | None)
    assert_type(skipping_with_a_value(1), str)
    assert_type(running(1), str)
    assert_type(retrying(1), str)
    assert_type(skipping_outages(1), str | None)
    assert_type(await skipping_all(1), str | None)
    assert_type(skipping_by_callable(1), str | None)
    assert_type(view_in_outages(HttpRequest(), 1), HttpResponse)
    assert_type(several(1, 2), str)
    assert_type(next(generator()), int)
    assert_type([item async for item in async_generator()], list[int])
    assert_type(view(HttpRequest(), 1), HttpResponse)
    assert_type(Account().pay(5), bool)
    assert_type(Account.static(5), bool)
    assert_type(Account.of_class(5), bool)
    with lock("order:{}", 1, ttl=5) as lease:
        assert_type(lease, Lease)
    async with lock("order:{}", 1, in_atomic="ignore", on_unavailable="run") as lease:
        assert_type(lease.fence, int)
    with lock_all(lock("order:{}", 1), lock("order:{}", 2), wait=5) as leases:
        assert_type(leases, Leases)
        assert_type(leases[0], Lease)
    async with lock_all(lock("order"), wait=None) as leases:
        assert_type(leases.remaining, float)
    with leader("order:{}", 1, ttl=5, on_lost="log") as lease:
        assert_type(lease.wait_lost(5), bool)
    async with leader("order", label="indexing") as lease:
        assert_type(await lease.await_lost(), bool)


takes_a_function: Callable[[int], str] = bare
takes_a_coroutine: Callable[[int], Coroutine[Any, Any, str]] = coroutine
