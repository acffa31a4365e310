"""The promises that a backend keeps, and the others, for ``manage.py locks check``."""

from __future__ import annotations

from ..backends.base import BaseLockBackend
from ..backends.optional import ExchangeBackend, RunsBackend
from ..types import CheckResult, Level

CAPABILITIES = {
    "supports_exclusion": "exclusion",
    "supports_processes": "exclusion of other processes",
    "supports_hosts": "exclusion of other hosts",
    "supports_queue": "order of arrival",
    "supports_wakeup": "wake-up of waiters",
    "supports_slots": "slots",
    "supports_max_waiters": "max_waiters",
    "supports_failover": "locks survive the loss of a server",
    "supports_transfer": "detach() and adopt()",
    "supports_runs": "runs of beat",
    "supports_exchange": "unique tasks",
}
BASES = {"supports_runs": RunsBackend, "supports_exchange": ExchangeBackend}  # base classes in place of a flag


def capabilities_of(backend: BaseLockBackend) -> dict[str, bool]:
    """Returns the flags of the backend: those of its class, and those that its base classes mean."""
    by_base = {flag: isinstance(backend, base) for flag, base in BASES.items()}
    return {flag: by_base[flag] if flag in by_base else bool(getattr(backend, flag)) for flag in CAPABILITIES}


def capabilities_result(backend: BaseLockBackend) -> CheckResult:
    """Returns the capabilities as the result of a check, without asking the store."""
    kept = capabilities_of(backend)
    words = {True: "", False: ""}
    for value in words:
        words[value] = ", ".join(CAPABILITIES[flag] for flag, flag_value in kept.items() if flag_value is value)
    message = f"{words[True] or 'nothing'}; not: {words[False]}." if words[False] else f"{words[True]}."
    return CheckResult(Level.INFO, "keeps", message, data=kept)
