"""The promises of an ``ExchangeBackend``, as tests. Inherit them beside ``LockBackendContract``."""

from __future__ import annotations

from typing import Any

from ..types import Grant, LockInfo
from .tools import eventually, in_threads, lock_request, locked_names


class ExchangeContract:
    """One lease replaces another. There are no async twins, so the plain methods are called."""

    def test_the_new_lease_is_in_the_place_of_the_old_one(self, backend: Any) -> None:
        old, new = lock_request(ttl=60.0), lock_request(ttl=20.0, label="the new one")
        first = backend.acquire(old, queue=False)
        second = backend.exchange(old, new)
        assert isinstance(second, Grant)
        assert (second.fence > first.fence, second.slot) == (True, 1)
        [[lease]] = backend.look(["name"])
        assert (lease.token, lease.fence, lease.holder.label) == (new.token, second.fence, "the new one")
        assert 10 < lease.remaining <= 20
        assert isinstance(backend.acquire(lock_request(), queue=False), LockInfo)

    def test_the_old_token_holds_nothing_any_more(self, backend: Any) -> None:
        old, new = lock_request(), lock_request()
        backend.acquire(old, queue=False)
        backend.exchange(old, new)
        assert backend.renew([(old, 60.0), (new, 60.0)]) == [False, True]
        assert backend.release(old) is False
        assert backend.look(["name"])[0][0].token == new.token
        assert backend.release(new) is True
        assert locked_names(backend) == []

    def test_an_exchange_repeated_with_its_tokens_is_granted_again_with_its_number(self, backend: Any) -> None:
        """As after a lost answer."""
        old, new = lock_request(), lock_request()
        backend.acquire(old, queue=False)
        first = backend.exchange(old, new)
        assert backend.exchange(old, new).fence == first.fence

    def test_a_late_repeat_changes_nothing(self, backend: Any) -> None:
        old, new, third = lock_request(), lock_request(), lock_request()
        backend.acquire(old, queue=False)
        backend.exchange(old, new)
        backend.exchange(new, third)
        late = backend.exchange(old, new)
        assert isinstance(late, LockInfo)
        assert late.token == third.token
        assert backend.look(["name"])[0][0].token == third.token

    def test_a_free_lock_is_granted(self, backend: Any) -> None:
        old, new = lock_request(ttl=0.05), lock_request()
        backend.acquire(old, queue=False)
        eventually(lambda: backend.look(["name"]) == [[]])
        assert isinstance(backend.exchange(old, new), Grant)
        assert isinstance(backend.exchange(lock_request("other"), lock_request("other")), Grant)
        assert locked_names(backend) == ["name", "other"]

    def test_a_lease_of_somebody_else_is_in_the_way(self, backend: Any) -> None:
        holder, new = lock_request(), lock_request()
        backend.acquire(holder, queue=False)
        busy = backend.exchange(lock_request(), new)
        assert isinstance(busy, LockInfo)
        assert (busy.token, busy.fence) == (holder.token, backend.look(["name"])[0][0].fence)
        assert backend.release(new) is False
        assert backend.look(["name"])[0][0].token == holder.token

    def test_what_was_released_already_and_rests_is_not_exchanged(self, backend: Any) -> None:
        old, new = lock_request(ttl=60), lock_request()
        backend.acquire(old, queue=False)
        backend.release(old, 50)
        busy = backend.exchange(old, new)
        assert isinstance(busy, LockInfo)
        assert busy.resting

    def test_one_that_waits_does_not_come_in_between(self, backend: Any) -> None:
        if not backend.supports_queue:
            return
        old, waiter, new = lock_request(ttl=60), lock_request(ttl=60), lock_request(ttl=60)
        backend.acquire(old, queue=False)
        backend.acquire(waiter, queue=True)
        assert isinstance(backend.exchange(old, new), Grant)
        assert backend.acquire(waiter, queue=True).token == new.token
        backend.release(new)
        assert isinstance(backend.acquire(waiter, queue=True), Grant)

    def test_a_lease_is_exchanged_in_its_slot(self, backend: Any) -> None:
        if not backend.supports_slots:
            return
        first, old, new = (lock_request(slots=2) for _ in range(3))
        backend.acquire(first, queue=False)
        backend.acquire(old, queue=False)
        assert backend.exchange(old, new).slot == new.slot == 2
        assert backend.exchange(old, new).slot == 2
        assert [lease.token for lease in backend.look(["name"])[0]] == [first.token, new.token]
        assert backend.renew([(new, 60.0)]) == [True]
        assert backend.exchange(first, one := lock_request(slots=2)).slot == 1
        assert [lease.token for lease in backend.look(["name"])[0]] == [one.token, new.token]

    def test_of_many_who_exchange_one_lease_one_is_granted_it(self, backend: Any) -> None:
        old, granted = lock_request(ttl=60), []
        backend.acquire(old, queue=False)

        def exchange(number: int) -> None:
            new = lock_request(ttl=60)
            if isinstance(backend.exchange(old, new), Grant):
                granted.append(new.token)

        in_threads(4, exchange)
        assert granted == [backend.look(["name"])[0][0].token]
