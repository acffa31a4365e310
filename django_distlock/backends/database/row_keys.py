"""The keys of rows: a prefix and the name of a lock, or of an entry of beat."""

from __future__ import annotations

import logging

from ...exceptions import InvalidLockName
from ...models import LONGEST_KEY
from ...utils.events import about_event
from .sql import unreadable_row

logger = logging.getLogger("django_distlock")


def row_key(prefix: str, name: str) -> bytes:
    """Raises InvalidLockName if the key is too long for the table."""
    key = f"{prefix}:{name}".encode()
    if len(key) > LONGEST_KEY:
        raise InvalidLockName(f"The name {name!r:.80} takes {len(key)} bytes; the table has room for {LONGEST_KEY}")
    return key


def name_in(key: bytes, prefix: str) -> str:
    return key.decode()[len(prefix) + 1 :]


def readable_name_in(key: bytes, prefix: str) -> str | None:
    """The name in a key. None, and an error in the log, if something else wrote the key."""
    try:
        return name_in(key, prefix)
    except UnicodeDecodeError:
        logger.error("%s", unreadable_row(key), extra=about_event("unreadable"))
        return None
