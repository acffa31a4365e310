"""The pools of workers that tests run with."""

from __future__ import annotations

import os
from typing import Any

import celery
import pytest

SOAK = float(os.environ.get("DISTLOCK_SOAK", "0"))
POOLS = ("prefork", "spawn", "threads", "solo", "gevent")

slow = pytest.mark.skipif(not SOAK, reason="adds little but time: DISTLOCK_SOAK=1 runs it")


def pools(*names: str, quick: tuple[str, ...] = ("prefork", "threads", "gevent")) -> list[Any]:
    return [pytest.param(name, marks=[] if name in quick else [slow]) for name in names or POOLS]


def usable(pool: str) -> str:
    if pool == "gevent":
        pytest.importorskip("gevent")
    if pool == "spawn" and celery.VERSION < (5, 7):
        pytest.skip("starting children by spawn needs Celery 5.7")
    return pool
