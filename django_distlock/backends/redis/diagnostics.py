"""Problems of a server, found from its INFO and TIME; and problems of settings, found without asking the server."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Warning
from redis.connection import parse_url
from redis.exceptions import RedisError

from ...options import Terms
from ...types import CheckResult, Level
from .config import SCHEMES, Location, server_of
from .errors import CLUSTER_BACKEND
from .scripts import Command, pack

OLDEST = (6, 2)
CLOCKS_APART = 1.0  # seconds
LITTLE_MEMORY = 0.8  # of maxmemory; above this, a warning is due


def read_info(reply: bytes) -> dict[str, str]:
    """The lines of INFO."""
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {key: value for key, colon, value in pairs if colon}


def server_results(info: Any, server_time: Any, asked_at: float, terms: Terms, location: Location) -> list[CheckResult]:
    """Results from the replies to INFO and TIME, which may be errors. ``asked_at``: Unix time in the middle between
    sending and receiving."""
    found = [] if isinstance(server_time, RedisError) else [_clock(server_time, asked_at)]
    if isinstance(info, RedisError):
        message = f"The server does not tell of itself: {info}"
        hint = "Allow the user +info to see version, eviction, persistence, memory and replicas here."
        found.append(CheckResult(Level.WARNING, "permissions", message, hint))
    else:
        lines = read_info(info)
        checks = (_version, _eviction, _memory, _persistence, _replicas)
        found += [finding for check in checks if (finding := check(lines))]
        found += _restart(lines, terms)
    return [*found, _cache(location)]


def _clock(reply: Sequence[bytes], asked_at: float) -> CheckResult:
    ahead = int(reply[0]) + int(reply[1]) / 1_000_000 - asked_at
    message = f"The server's clock is {abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} this machine's."
    if abs(ahead) < CLOCKS_APART:
        return CheckResult(Level.OK, "clock", message)
    hint = "Locks do not depend on it, but times shown do, and fencing numbers after a failover. Let NTP set both."
    return CheckResult(Level.WARNING, "clock", message, hint)


def _version(info: Mapping[str, str]) -> CheckResult:
    kind, version = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    compatible = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if compatible < OLDEST:
        return CheckResult(
            Level.ERROR, "version", f"{kind} {version}", "Redis 6.2 is the oldest that has what locks need."
        )
    return CheckResult(Level.OK, "version", f"{kind} {version}")


def _eviction(info: Mapping[str, str]) -> CheckResult | None:
    if not (policy := info.get("maxmemory_policy")):
        return None
    if policy == "noeviction":
        return CheckResult(Level.OK, "eviction", f"maxmemory-policy is {policy}.")
    which = "any key" if policy.startswith("allkeys-") else "keys with a TTL, and every lock has one"
    message = f"maxmemory-policy is {policy}: short of memory the server drops {which}, held locks among them."
    return CheckResult(
        Level.ERROR, "eviction", message, "Set maxmemory-policy noeviction, or give locks another server."
    )


def _memory(info: Mapping[str, str]) -> CheckResult | None:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        return CheckResult(Level.OK, "memory", f"{used / 2**20:.1f} MiB used, no maxmemory.")
    message = f"{used / 2**20:.1f} of {most / 2**20:.1f} MiB used."
    if used < LITTLE_MEMORY * most:
        return CheckResult(Level.OK, "memory", message)
    return CheckResult(
        Level.WARNING, "memory", message, "Without memory no lock is granted: raise maxmemory or free some."
    )


def _persistence(info: Mapping[str, str]) -> CheckResult:
    if info.get("aof_enabled") == "1":
        return CheckResult(Level.OK, "persistence", "The server keeps an append-only file.")
    message = "No append-only file: a restart of the server forgets locks, and their holders learn it when they renew."
    return CheckResult(Level.INFO, "persistence", message, "Set appendonly yes if a restart must not free locks.")


def _restart(info: Mapping[str, str], terms: Terms) -> Iterator[CheckResult]:
    uptime, name, longest = int(info.get("uptime_in_seconds", 0)), "TTL", terms.ttl
    if terms.min_hold > longest:
        name, longest = "MIN_HOLD", terms.min_hold
    if uptime < longest and info.get("aof_enabled") != "1":
        message = (
            f"The server started {uptime} s ago, less than the {name} of {longest:g} s, and may have forgotten locks"
        )
        hint = f"Holders from before may still believe in theirs, until the {name} has passed."
        yield CheckResult(Level.WARNING, "uptime", f"{message} that were held then.", hint)


def _replicas(info: Mapping[str, str]) -> CheckResult:
    if info.get("role") in ("slave", "replica"):
        return CheckResult(
            Level.ERROR, "replicas", "This server is a read-only replica.", "Name the primary in LOCATION."
        )
    count = int(info.get("connected_slaves", 0))
    if not count:
        return CheckResult(Level.OK, "replicas", "None.")
    message = f"{count}. They learn of a lock a moment later: a failover may forget the newest ones."
    hint = "Let what the lock guards compare fencing numbers."
    if "min_slaves_good_slaves" not in info:  # INFO has it if min-replicas-to-write is set
        hint += " Set min-replicas-to-write 1, so that a primary which was cut off grants no more."
    return CheckResult(Level.INFO, "replicas", message, hint)


def _cache(location: Location) -> CheckResult:
    if not (aliases := caches_in_database_of(location)):
        return CheckResult(Level.OK, "cache", "No cache of this project is in the same database.")
    return CheckResult(Level.WARNING, "cache", _shared(aliases), "Give locks a database or a server of their own.")


def _shared(aliases: Sequence[str]) -> str:
    return f"CACHES[{aliases[0]!r}] is in the same database: cache.clear() would free all locks."


def waiting_result(*, is_told: bool) -> CheckResult:
    """``is_told``: whether scripts may hand a lock to the waiters of this process."""
    if is_told:
        return CheckResult(Level.OK, "waiting", "Waiters are woken by messages.")
    message = "Scripts are not told who receives a message, so nobody is handed a lock: waiters look every 0.1 to 1 s."
    hint = "Behind a proxy that is so; an address that leads to the server itself lets waiters be woken."
    return CheckResult(Level.INFO, "waiting", message, hint)


# Without asking the server


def check_settings(location: Location, terms: Terms, socket_timeout: float, where: str) -> list[CheckMessage]:
    """``where``: how messages name the entry."""
    found = cache_warnings(location, where) + timeout_warnings(terms, "socket_timeout", socket_timeout, where)
    return found + encryption_warnings(location, where)


def encryption_warnings(location: Location, where: str) -> list[CheckMessage]:
    if not location.is_half_plain:
        return []
    message = f"{where}: the master is reached by TLS, but the sentinels are asked in plain text, with their password."
    hint = "Say 'ssl': True in OPTIONS['sentinel_kwargs'], with 'ssl_ca_certs' as for the master."
    return [Warning(message, hint=hint, id="distlock.W012")]


def timeout_warnings(terms: Terms, option: str, seconds: float, where: str) -> list[CheckMessage]:
    """``seconds``: the time for a reply, by the option."""
    if terms.ttl > 2 * seconds:
        return []
    message = (
        f"{where}: the TTL of {terms.ttl:g} s is not longer than two waits for a reply of {seconds:g} s"
        " each, so a lock may run out before it is known to be granted or renewed."
    )
    return [Warning(message, hint=f"Raise TTL, or lower OPTIONS[{option!r}].", id="distlock.W011")]


def cache_warnings(location: Location, where: str) -> list[CheckMessage]:
    if not (aliases := caches_in_database_of(location)):
        return []
    hint = "Let one of them use another database, for example redis://127.0.0.1:6379/1."
    return [Warning(f"{where}: {_shared(aliases)}", hint=hint, id="distlock.W010")]


def caches_in_database_of(location: Location) -> list[str]:
    """Aliases of CACHES that ``clear()`` together with the locks."""
    mine = location.server
    return [alias for alias, entry in settings.CACHES.items() if mine in _servers(entry)]


def _servers(entry: Mapping[str, Any]) -> Iterator[tuple[object, ...]]:
    sentinels = (entry.get("OPTIONS") or {}).get("SENTINELS")
    for arguments in _urls(entry):
        if sentinels:
            known = frozenset(server_of({"host": host, "port": port})[:2] for host, port in sentinels)
            yield arguments.get("host"), known, int(arguments.get("db") or 0)
        else:
            yield server_of(arguments)


def _urls(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    places = entry.get("LOCATION") or ()
    for place in places.split(",") if isinstance(places, str) else places:
        if isinstance(place, str) and place.strip().startswith(SCHEMES):
            try:
                arguments = parse_url(place.strip())  # type: ignore[no-untyped-call]
            except ValueError:
                continue  # the cache itself reports what is wrong
            options = entry.get("OPTIONS") or {}
            yield {**arguments, **({"db": options["db"]} if "db" in options else {})}


INFO, TIME = pack("INFO"), pack("TIME")


class Diagnostics:
    def __init__(self, location: Location, prefix: str, terms: Terms, options: str) -> None:
        """``options``: how messages name the options of the backend."""
        self._location, self._prefix, self._terms, self._options = location, prefix, terms, options

    def questions(self, nodes: Sequence[Any]) -> list[Command]:
        return [Command(question, node=node) for node in nodes for question in (INFO, TIME)]

    def results(self, nodes: Sequence[Any], replies: Sequence[Any], asked_at: float) -> list[CheckResult]:
        info, server_time = replies
        found = server_results(info, server_time, asked_at, self._terms, self._location)
        if isinstance(info, bytes) and read_info(info).get("cluster_enabled") == "1":
            hint = f"Name {CLUSTER_BACKEND!r} in BACKEND."
            found.append(CheckResult(Level.ERROR, "cluster", "This server is a node of a Cluster.", hint))
        return found

    def setting_warnings(self, socket_timeout: float, where: str) -> list[CheckMessage]:
        return check_settings(self._location, self._terms, socket_timeout, where)

    @property
    def keyspace(self) -> Hashable:
        return (*self._location.server, self._prefix)
