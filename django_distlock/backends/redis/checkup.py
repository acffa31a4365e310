"""What ``check()`` asks a server, and what Django's system checks ask the settings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from django.core.checks import CheckMessage

from ...options import Terms
from ...types import Finding, Level
from . import health
from .commands import Command, pack
from .location import Location

INFO, TIME = pack("INFO"), pack("TIME")


class Checkup:
    def __init__(self, location: Location, prefix: str, terms: Terms, options: str) -> None:
        """``options``: how messages name the options of the backend."""
        self._location, self._prefix, self._terms, self._options = location, prefix, terms, options

    def questions(self, parts: Sequence[Any]) -> list[Command]:
        return [Command(question, at=part) for part in parts for question in (INFO, TIME)]

    def findings(self, parts: Sequence[Any], replies: Sequence[Any], asked_at: float) -> list[Finding]:
        info, server_time = replies
        found = health.findings(info, server_time, asked_at, self._terms, self._location)
        if isinstance(info, bytes) and health.read_info(info).get("cluster_enabled") == "1":
            hint = f"Set {self._options}['cluster'] to True."
            found.append(Finding(Level.ERROR, "cluster", "This server is a node of a Cluster.", hint))
        return found

    def of_settings(self, socket_timeout: float, where: str) -> list[CheckMessage]:
        return health.check_settings(self._location, self._terms, socket_timeout, where)

    @property
    def keyspace(self) -> Hashable:
        return (*self._location.server, self._prefix)
