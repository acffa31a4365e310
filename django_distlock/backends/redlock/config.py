"""From an entry of DISTRIBUTED_LOCKS to the settings of a quorum. All functions raise InvalidLockBackend."""

from __future__ import annotations

from collections.abc import Sequence

from ...exceptions import InvalidLockBackend
from ...options import as_seconds
from ...utils.text import quoted
from ..base import BaseLockBackend
from ..redis.config import Location, read_credentials, read_location


def check_options(backend: BaseLockBackend) -> None:
    where = backend.setting("OPTIONS")
    for option, value in backend.option.items():
        match option:
            case "retry_delay":
                if isinstance(value, tuple | list):
                    value = backend.option[option] = [as_seconds(delay) for delay in value]
                fits = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_seconds, value))
                fits = fits and 0 < value[0] <= value[1]
                needed = "two numbers of seconds, the shortest and the longest delay between two tries"
            case "credential_provider":
                continue  # read_credentials() checks it
            case "max_connections":
                fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
                needed = "a whole number above 0"
            case "node_timeout":
                fits = value is None or (_is_seconds(value) and value > 0)
                needed = "a number of seconds above 0, or None for a twentieth of the TTL"
            case _:
                fits = _is_seconds(value) and value > 0
                needed = "a number of seconds above 0"
        if not fits:
            raise InvalidLockBackend(f"{where}[{option!r}] is {quoted(value)}; it is {needed}.")


def read_locations(backend: BaseLockBackend) -> list[Location]:
    where, given = backend.setting("LOCATION"), backend.settings.get("LOCATION")
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) < 3:
        raise InvalidLockBackend(
            f"{where} is {quoted(given)}. RedlockBackend needs a list of at least 3 servers that know nothing of each"
            " other, better 5: a majority of them holds each lock. For one server use RedisBackend."
        )
    own = {
        "socket_timeout": float(backend.option["node_timeout"] or 1.0),  # for the rest of a reply that has begun
        "socket_connect_timeout": float(backend.option["socket_connect_timeout"]),
        **read_credentials(backend),
    }
    locations = [read_location(url, f"{where}[{index}]", own) for index, url in enumerate(given)]
    by_server: dict[tuple[object, ...], Location] = {}
    for location in locations:
        *server, _ = location.server  # whichever of its databases
        if other := by_server.get(tuple(server)):
            raise InvalidLockBackend(
                f"{where} names one server more than once: {other.text} and {location.text}. A server has one vote."
            )
        by_server[tuple(server)] = location
    return locations


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < float("inf")
