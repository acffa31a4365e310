"""Checks whether a beat can publish. While it cannot, it leaves the runs to other beats."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.beat import SchedulingError  # type: ignore[import-untyped]
from kombu.exceptions import OperationalError

from ..utils.clock import clock
from ..utils.events import about_event

RETRY = 1.0  # seconds after which a broker that did not answer is asked again
LONGEST = 5.0  # seconds for an answer, unless the options of the transport have another time

logger = logging.getLogger("django_distlock")


class Broker:
    """The broker as one beat knows it. It is asked before the first run is claimed, and after a message failed.

    ``connection``: returns the connection that publishes.
    """

    def __init__(self, connection: Callable[[], Any]) -> None:
        self._connection = connection
        self._is_known_to_answer = False
        self._is_reported = False
        self._ask_at = 0.0  # on clock()

    def answers(self) -> bool:
        """Returns whether runs may be claimed. Unless the broker is known to answer, asks it, at most once in ``RETRY``
        seconds."""
        if self._is_known_to_answer or clock() < self._ask_at:
            return self._is_known_to_answer
        try:
            self._connect()
        except self._errors() as error:
            self._ask_at = clock() + RETRY
            if not self._is_reported:
                logger.warning(
                    "This beat leaves all runs to others until the broker answers it, asked every %g s: %s",
                    RETRY, error,
                    extra=about_event("beat-broker-down"),
                )  # fmt: skip
            self._is_reported = True
            return False
        if self._is_reported:
            logger.warning("The broker answers again.", extra=about_event("beat-broker-up"))
        self._is_known_to_answer, self._is_reported = True, False
        return True

    def failed(self, error: Exception) -> bool:
        """Note that a message could not be sent. Returns whether the broker is the cause, and not the message."""
        cause = error.__context__ if isinstance(error, SchedulingError) else error
        is_due_to_broker = isinstance(cause, self._errors())
        if is_due_to_broker:
            self._is_known_to_answer = False
        return is_due_to_broker

    def _connect(self) -> None:
        """Open a new connection, which shows what the broker does now, and then the connection that publishes.

        For the new one, AMQP has its own time limit. On Redis, without a limit, a server that hangs would block us.
        """
        once = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
        publishing = self._connection()
        options = publishing.transport_options
        if publishing.transport.driver_type == "redis":
            options = {"socket_timeout": LONGEST, "socket_connect_timeout": LONGEST, **options}
        with publishing.clone(transport_options=options) as probe:
            probe.ensure_connection(**once)
        publishing.ensure_connection(**once)

    def _errors(self) -> tuple[type[Exception], ...]:
        connection = self._connection()
        return (OperationalError, OSError, *connection.connection_errors, *connection.channel_errors)
