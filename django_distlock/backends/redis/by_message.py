"""How a waiter takes its lease by the message that hands it over, before the store has confirmed it."""

from __future__ import annotations

from typing import Any

from ...grants import HandedGrant
from ...types import LockRequest
from ...utils.clock import clock
from ..common.timing import Timing
from .operations import Operations


def take(request: LockRequest, client: Any, operations: Operations, timing: Timing) -> HandedGrant | None:
    """Return the grant that a message has told of; None if the waiter is to look instead.

    The request has asked for its place and has not looked since, and the number of the lease is above its place. So the
    lock was handed over after that question, and the store keeps it for the ``grant_ttl`` from then at least. The
    command that confirms it is sent here. Nobody waits for its reply, because the renewer asks once more.
    """
    assert request.handed
    (slot, fence), request.handed, asked_at = request.handed, None, request.placed_at
    if clock() - asked_at >= timing.message_trusted or fence <= int(request.place):
        return None
    request.slot, request.is_unconfirmed = slot, True
    if client.post(*operations.renew([(request, request.ttl)])):
        return HandedGrant(fence, asked_at, slot, timing.grant_ttl)
    request.is_unconfirmed = False
    return None
