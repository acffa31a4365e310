"""Brokers that a test restarts. What was published before is there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from example_project.valkey import Valkey
from tests.support import rabbitmq
from tests.support.requirements import missing


class Broker(NamedTuple):
    """``queue_type``: of RabbitMQ."""

    url: str
    stop: Callable[[], object]
    start: Callable[[], object]
    queue_type: str | None = None


@contextmanager
def redis_broker(folder: Path) -> Iterator[Broker]:
    """It writes each command, and is killed."""
    server = Valkey("--appendonly", "yes", "--appendfsync", "always", folder=folder).start()
    try:
        yield Broker(f"redis+socket://{server.socket}?virtual_host=0", server.stop, server.start)
    finally:
        server.stop()


@contextmanager
def rabbitmq_broker(queue_type: str) -> Iterator[Broker]:
    """Its node ends in order."""
    if (programs := rabbitmq.programs()) is None:
        missing("rabbitmq", "no rabbitmq-server and epmd found; install the package rabbitmq-server")
    with rabbitmq.RabbitMQ(*programs) as server:
        yield Broker(server.url, server.stop, server.start, queue_type)
