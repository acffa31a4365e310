"""How a waiter takes its lease by the message that hands it over, before the store has confirmed it."""

from __future__ import annotations

from collections.abc import Callable

from ...grants import HandedGrant
from ...types import LockRequest
from ...utils.clock import clock
from .timing import Timing


def take(request: LockRequest, timing: Timing, confirm: Callable[..., bool], *arguments: object) -> HandedGrant | None:
    """Return the grant that a message has told of; None if the waiter is to look instead.

    The request has asked for its place and has not looked since, and the number of the lease is above its place. So the
    lock was handed over after that question, and the store keeps it for the ``grant_ttl`` from then at least.

    ``confirm(request, *arguments)`` sends the command that confirms it; False: it was not sent. Nobody waits for its
    reply, because the renewer asks once more.
    """
    assert request.handed
    (slot, fence), request.handed, asked_at = request.handed, None, request.placed_at
    if clock() - asked_at >= timing.message_trusted or fence <= int(request.place):
        return None
    request.slot, request.is_unconfirmed = slot, True
    if confirm(request, *arguments):
        return HandedGrant(fence, asked_at, slot, timing.grant_ttl)
    request.is_unconfirmed = False
    return None
