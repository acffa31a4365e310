"""The fields with which log records describe requests and leases, for programs."""

from __future__ import annotations

from typing import Any, Protocol

from ..types import LockRequest
from ..utils.events import about_event


class AboutLease(Protocol):
    """The fields of a lease."""

    name: str
    using: str
    fence: int

    @property
    def template(self) -> str: ...
    @property
    def _held_for(self) -> float: ...


def about_lease(event: str, lease: AboutLease, **about: object) -> dict[str, Any]:
    """``about_event()`` of one lease."""
    which = {"alias": lease.using, "name": lease.name, "template": lease.template, "fence": lease.fence}
    return about_event(event, **which, held=lease._held_for, **about)


def about_request(event: str, alias: str, request: LockRequest, **about: object) -> dict[str, Any]:
    """``about_event()`` of one request."""
    name, template = request.name, request.template or request.name
    return about_event(event, alias=alias, name=name, template=template, **about)
