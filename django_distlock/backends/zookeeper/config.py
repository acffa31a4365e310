"""Reads and checks the ensemble of an entry of ``DISTRIBUTED_LOCKS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from django.core.checks import CheckMessage, Warning
from kazoo.hosts import collect_hosts  # type: ignore[import-untyped]
from kazoo.protocol.paths import normpath  # type: ignore[import-untyped]
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE  # type: ignore[import-untyped]

from ...exceptions import InvalidLockBackend
from ...utils.text import quoted
from ..base import BaseLockBackend
from .names import encode

DEFAULT_PORT = 2181
EXAMPLE = '"zk1:2181,zk2:2181,zk3:2181", behind which a path may stand that all locks lie below: "/shop"'

TLS_OPTIONS: Mapping[str, Any] = {  # kazoo's defaults, except that host names are checked
    "use_ssl": False,
    "ca": None,
    "certfile": None,
    "keyfile": None,
    "keyfile_password": None,
    "verify_certs": True,
    "check_hostname": True,
}
OPTIONS: Mapping[str, Any] = {
    "timeout": None,
    "request_timeout": 5.0,
    "auth": None,
    "acl": None,
    **TLS_OPTIONS,
}
FLAGS = ("use_ssl", "verify_certs", "check_hostname")
FILES = ("ca", "certfile", "keyfile")


@dataclass(frozen=True, slots=True)
class Config:
    """``hosts``: names and ports. ``root``: the path of all nodes, or "". ``auth``: "user:password"."""

    hosts: Sequence[tuple[str, int]]
    root: str
    timeout: float
    request_timeout: float
    auth: str | None = field(repr=False)
    acl: Sequence[Any]
    tls: Mapping[str, Any] = field(repr=False)

    @property
    def addresses(self) -> str:
        """In kazoo's form, without our root, because the nodes about the ensemble are above it."""
        return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.addresses}{self.root}"


def read_config(backend: BaseLockBackend) -> Config:
    """Raises InvalidLockBackend."""
    hosts, root = _read_location(backend)
    auth = _read_auth(backend)
    timeout = _read_seconds(backend, "timeout")
    return Config(
        hosts,
        root,
        backend.terms.ttl if timeout is None else timeout,
        _read_seconds(backend, "request_timeout") or 0.0,
        auth,
        _read_acl(backend, auth),
        _read_tls(backend),
    )


def _option(backend: BaseLockBackend, name: str) -> str:
    return f"{backend.setting('OPTIONS')}[{name!r}]"


def _read_location(backend: BaseLockBackend) -> tuple[list[tuple[str, int]], str]:
    location = backend.settings.get("LOCATION", f"127.0.0.1:{DEFAULT_PORT}")
    try:
        if not isinstance(location, str) or "//" in location or location != "".join(location.split()):
            raise ValueError
        hosts, chroot = collect_hosts(location)
        root = normpath(chroot or "").rstrip("/")
        if any(encode(part) != part for part in root.split("/")) or root.startswith("/zookeeper"):
            raise ValueError
    except ValueError:
        raise InvalidLockBackend(
            f"{backend.setting('LOCATION')} is {quoted(location)}. It has the servers of an ensemble: {EXAMPLE}."
        ) from None
    return hosts, root


def _read_seconds(backend: BaseLockBackend, name: str) -> float | None:
    seconds = backend.option[name]
    if seconds is None and OPTIONS[name] is None:
        return None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < inf:
        raise InvalidLockBackend(f"{_option(backend, name)} is {seconds!r}; it is a number of seconds above 0.")
    return float(seconds)


def _read_auth(backend: BaseLockBackend) -> str | None:
    auth = backend.option["auth"]
    if auth is None:
        return None
    if not isinstance(auth, str) or not auth.partition(":")[0] or not auth.partition(":")[2]:
        raise InvalidLockBackend(f"{_option(backend, 'auth')} is no text of the form 'user:password'.")
    return auth


def _read_acl(backend: BaseLockBackend, auth: str | None) -> Sequence[Any]:
    acl = backend.option["acl"]
    if acl is None:
        found: Sequence[Any] = CREATOR_ALL_ACL if auth else OPEN_ACL_UNSAFE
        return found
    if not isinstance(acl, list | tuple) or not acl or not all(isinstance(one, ACL) for one in acl):
        raise InvalidLockBackend(
            f"{_option(backend, 'acl')} is {quoted(acl)}; it is a list of what kazoo.security.make_digest_acl() and"
            " the like return."
        )
    return list(acl)


def _read_tls(backend: BaseLockBackend) -> dict[str, Any]:
    given = {name: backend.option[name] for name in TLS_OPTIONS}
    for name in FLAGS:
        if not isinstance(given[name], bool):
            raise InvalidLockBackend(f"{_option(backend, name)} is {given[name]!r:.60}; choose True or False.")
    for name in FILES:
        if given[name] is not None and not (isinstance(given[name], str | Path) and Path(given[name]).is_file()):
            raise InvalidLockBackend(f"{_option(backend, name)} is {given[name]!r:.200}, where there is no file.")
        given[name] = given[name] and str(given[name])
    if not given["use_ssl"]:
        if useless := [name for name in (*FILES, "keyfile_password") if given[name] is not None]:
            raise InvalidLockBackend(f"{_option(backend, useless[0])} is given, but 'use_ssl' is False.")
        return {"use_ssl": False}
    if not given["verify_certs"]:
        given["check_hostname"] = False  # there is no certificate to check
    return given


def settings_checks(backend: BaseLockBackend, config: Config) -> list[CheckMessage]:
    """Django's system checks of this entry; no I/O."""
    where = f"DISTRIBUTED_LOCKS[{backend.alias!r}]"
    found: list[CheckMessage] = []
    if backend.terms.ttl > config.timeout:
        found.append(
            Warning(
                f"{where}: the TTL of {backend.terms.ttl:g} s is longer than the session, whose timeout is"
                f" {config.timeout:g} s. Leases have the shorter one.",
                hint="Raise OPTIONS['timeout'], or lower TTL.",
                id="distlock.W040",
            )
        )
    if len(config.hosts) % 2 == 0:
        found.append(
            Warning(
                f"{where}: LOCATION has {len(config.hosts)} servers. An ensemble of an even number survives no more"
                " losses than one with a server less.",
                hint="Name all servers of the ensemble, and have three or five of them.",
                id="distlock.W041",
            )
        )
    return found
