"""What several test modules need: those of the contract suite, and polling in tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from django_distlock.testing.tools import PATIENCE, eventually, ticket

__all__ = ["PATIENCE", "aeventually", "eventually", "ticket"]


async def aeventually(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {patience} s")
        await asyncio.sleep(0.005)
    return value
