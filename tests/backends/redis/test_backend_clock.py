"""The store's clock jumps by an hour (libfaketime on a real server): what is kept, and what is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from django_distlock import LockLost, State, lock, locks
from example_project.valkey import Valkey
from tests.support.clocks import faked_clock
from tests.support.stores import REDIS
from tests.support.tools import PATIENCE, eventually

HOUR = 3600


@pytest.fixture
def jump(settings, monkeypatch, tmp_path):
    """The lock server's clock follows ours, and jumps by so many seconds when told."""
    offset = tmp_path / "offset"

    def set_offset(seconds: int) -> None:
        offset.write_text(f"{seconds:+d}")

    set_offset(0)
    with monkeypatch.context() as environment:
        for name, value in faked_clock(offset).items():
            environment.setenv(name, value)
        server = Valkey().start()
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": server.url}}
    with redis.Redis.from_url(server.url) as client:

        def jump(seconds: int) -> None:
            before = client.time()[0]
            set_offset(seconds)
            eventually(lambda: abs(client.time()[0] - before) > HOUR / 2)

        yield jump
    locks.close()
    server.stop()


def test_forward_ends_every_lease_and_the_holder_is_told(jump: Callable[[int], None]):
    with pytest.raises(LockLost), lock("name", ttl=1.5) as lease:
        jump(HOUR)
        with lock("name", wait=PATIENCE) as successor:
            assert successor.fence > lease.fence
        eventually(lambda: lease.state is State.LOST)


def test_backward_keeps_the_lock_and_the_numbers_grow(jump: Callable[[int], None]):
    with lock("name", ttl=6) as first:
        jump(-HOUR)
        assert lock("name").acquire(blocking=False) is False
        eventually(lambda: first.remaining > 5)
        first.ensure_held()
    with lock("name") as second:
        assert second.fence == first.fence + 1


def test_a_waiter_gets_in_after_either_jump(jump: Callable[[int], None]):
    for seconds in (HOUR, -HOUR):
        holder = lock("name", ttl=60, renew=False)
        holder.acquire()
        waiting = lock("name", wait=PATIENCE)
        jump(seconds)
        if seconds < 0:
            holder.release()
        assert waiting.acquire()
        waiting.release()
        if seconds > 0:
            with pytest.raises(LockLost):
                holder.release()
