"""The package's own commands, with arguments as it has them."""

from __future__ import annotations

from typing import Any

from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.keys import Keys
from django_distlock.backends.redis.operations import ACQUIRE, CLAIM_RUN, RELEASE, RENEW, RENEW_SLOT, Operations
from django_distlock.backends.redlock import messages
from django_distlock.exceptions import LockBackendError
from django_distlock.types import Holder, LockRequest

SCRIPTS = ACQUIRE, RELEASE, RENEW, RENEW_SLOT, CLAIM_RUN
QUORUM = messages.ACQUIRE, messages.RELEASE, messages.RENEW

HOLDER = Holder("häuser", 7, "thread", "pays", 1_700_000_000.0)
INBOX = "Slock|in:process"


def operations(keys: Keys) -> Operations:
    def explain(error: Exception) -> LockBackendError:
        return LockBackendError(str(error))

    return Operations("default", keys, "here", "KEY_PREFIX", Timing(), explain)


def request(name: str, letter: str, **more: Any) -> LockRequest:
    return LockRequest(name, 60.0, HOLDER, token=letter * 26, **more)
