"""What has the true clocks in a simulation, because it is imported before the package. No module here imports that."""

from __future__ import annotations

import sys

import celery  # noqa: F401
from hiredis import Reader

__all__ = ["Reader"]

sys.modules["hiredis"] = None  # type: ignore[assignment] - under redis-py it reads from sockets of the system alone

import redis.asyncio  # noqa: E402, F401
