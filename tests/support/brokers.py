"""Brokers that a test restarts. What was published before is there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from redis import Redis

from example_project.valkey import Valkey
from tests.support.rabbitmq import RabbitMQ


class Broker(NamedTuple):
    """``known``: how many messages of a queue it knows, with the unacknowledged ones. ``queue_types``: of RabbitMQ."""

    url: str
    stop: Callable[[], object]
    start: Callable[[], object]
    known: Callable[[str], int] | None = None
    queue_types: tuple[str | None, ...] = (None,)


@contextmanager
def _redis(folder: Path) -> Iterator[Broker]:
    """It writes each command, and is killed.

    kombu takes a message from its queue before it notes it as unacknowledged: one that it has in between is lost then.
    """

    def known(queue: str) -> int:
        with Redis(unix_socket_path=str(server.socket)) as client:
            return cast(int, client.llen(queue)) + cast(int, client.hlen("unacked"))

    server = Valkey("--appendonly", "yes", "--appendfsync", "always", folder=folder).start()
    try:
        yield Broker(f"redis+socket://{server.socket}?virtual_host=0", server.stop, server.start, known)
    finally:
        server.stop()


@contextmanager
def _rabbitmq(server: RabbitMQ) -> Iterator[Broker]:
    """Its node ends in order. It takes seconds of a processor to start, so it is that of the test process."""
    try:
        yield Broker(server.url, server.stop, server.start, queue_types=("classic", "quorum"))
    finally:
        if server.process.poll() is not None:
            server.start()


def broker_that_restarts(kind: str, request: pytest.FixtureRequest, folder: Path) -> AbstractContextManager[Broker]:
    """``kind``: "redis" or "rabbitmq"."""
    return _redis(folder) if kind == "redis" else _rabbitmq(request.getfixturevalue("rabbitmq"))
