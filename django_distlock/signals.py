"""What happens to locks in this process. Sent with ``send_robust`` and never while a store is being asked.

Every signal's ``sender`` is the class of the backend; ``name`` and ``using`` say which lock.

``lock_acquired`` and ``lock_released`` carry ``lease``.
``lock_busy`` carries ``holder`` (a Holder or None) and ``waited`` (seconds).
``lock_lost`` carries ``lease`` and ``reason`` (text).
``lock_held_long`` carries ``lease`` and ``held`` (seconds since it was granted).
``lock_forced`` carries ``info`` (a LockInfo: the lease that an operator ended) and ``by`` (text: who did it).
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from django.dispatch import Signal

from .utils import fork
from .utils.threads import Worker

lock_acquired = Signal()
lock_busy = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_held_long = Signal()
lock_forced = Signal()


class News(NamedTuple):
    """A signal that is about to be sent."""

    signal: Signal
    sender: type
    about: dict[str, Any]

    @property
    def has_listeners(self) -> bool:
        return bool(self.signal.receivers) and self.signal.has_listeners(self.sender)


def announce(news: News | None) -> None:
    if news and news.has_listeners:
        news.signal.send_robust(news.sender, **news.about)


async def aannounce(news: News | None) -> None:
    if news and news.has_listeners:
        await news.signal.asend_robust(news.sender, **news.about)


def announce_in_background(news: News) -> None:
    if news.has_listeners:
        _untold.append(news)
        _teller.nudge()


def _tell() -> None:
    while _untold:
        announce(_untold.popleft())


_untold: deque[News] = deque()
_teller = Worker("distlock-signals", _tell)
fork.in_child(_untold.clear)  # what its parent has to tell, the parent tells
