"""Releases by callers that do not hold the lock."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from ..journal import Event
from ..signals import asend_signal, lock_forced, send_signal
from ..types import Holder, LockInfo, LockRequest, place_of
from ..utils.events import about_event
from ..utils.text import printable
from .registry import locks

logger = logging.getLogger("django_distlock")


def force_release(info: LockInfo, *, by: str) -> bool:
    """Free the lock if the lease in ``info`` still holds it. False if it was freed or changed hands meanwhile.

    ``by``: who does it, for the log and the signal ``lock_forced``. Raises LockBackendError.
    """
    backend, info = locks[info.using], _with_template(info)
    if freed := backend.release(_request_of(info), force=True):
        _tell(info, by)
        send_signal(lock_forced, type(backend), **_about(info, by))
    return freed


async def aforce_release(info: LockInfo, *, by: str) -> bool:
    """``force_release()`` for tasks."""
    backend, info = locks[info.using], _with_template(info)
    if freed := await backend.arelease(_request_of(info), force=True):
        _tell(info, by)
        await asend_signal(lock_forced, type(backend), **_about(info, by))
    return freed


def _request_of(info: LockInfo) -> LockRequest:
    return LockRequest(info.name, 0.0, info.holder or Holder.here(), token=info.token, prefix=info.prefix)


def _with_template(info: LockInfo) -> LockInfo:
    return info._replace(template=locks.service(info.using).renewer.template_of(info.token))


def _about(info: LockInfo, by: str) -> dict[str, Any]:
    return {"name": info.name, "template": info.template or info.name, "using": info.using, "info": info, "by": by}


def _tell(info: LockInfo, by: str) -> None:
    if journal := locks.service(info.using).journal:
        journal.note(Event.FREED, _request_of(info), -inf, info.fence, by)
    logger.warning(
        "Lock %r%s (%s) was freed by %s. It was held by %s, fencing number %d.",
        info.name, info.slot_text, place_of(info.using, info.prefix), printable(by),
        info.holder or "a waiter that had not taken it yet", info.fence,
        extra=about_event(
            "forced", alias=info.using, name=info.name, template=info.template or info.name, fence=info.fence
        ),
    )  # fmt: skip
