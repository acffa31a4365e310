"""Signals of what happens to locks in this process. Sent with ``send_robust``, never during a call of the store.

The ``sender`` of every signal is the class of the backend; ``name``, ``template`` and ``using`` say which lock.
``waited``: seconds since the lock was asked for. ``held``: seconds since it was granted.

``lock_acquired`` carries ``lease`` and ``waited``.
``lock_busy`` carries ``holder`` (a Holder or None), ``waited`` and ``reason``: the reason of LockNotAcquired, or
"duplicate" if a unique task of Celery is not queued again.
``lock_unavailable`` carries ``error`` (a LockBackendError), ``lease`` (with which the caller continues, or None) and
``waited``.
``lock_renewed`` carries ``lease``.
``lock_released`` carries ``lease`` and ``held``.
``lock_lost`` carries ``lease``, ``reason`` (text) and ``held``.
``lock_held_long`` carries ``lease`` and ``held``.
``lock_forced`` carries ``info`` (a LockInfo: the lease that an operator ended) and ``by`` (text: who did it). Its
``template`` is the whole name if another process held the lock, because only that process knows the template.

``beat_run_sent`` reports a run of beat, in the process of the beat that sent it. It carries ``using``, ``entry``,
``scheduled_at`` (a datetime: when the run was due) and ``lateness`` (seconds from then until it was sent).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

from django.dispatch import Signal

from .utils import fork
from .utils.threads import Worker

lock_acquired = Signal()
lock_busy = Signal()
lock_unavailable = Signal()
lock_renewed = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_held_long = Signal()
lock_forced = Signal()
beat_run_sent = Signal()


def send_signal(signal: Signal, sender: type, **about: object) -> None:
    """Send the signal if it has receivers for that sender. Their errors are logged."""
    if _has_receivers(signal, sender):
        signal.send_robust(sender, **about)


async def asend_signal(signal: Signal, sender: type, **about: object) -> None:
    """``send_signal()`` for tasks."""
    if not _has_receivers(signal, sender):
        return
    if len(signal.receivers) == len(_prompt[signal]):
        signal.send_robust(sender, **about)
    else:
        await signal.asend_robust(sender, **about)


def connect_prompt(signal: Signal, receiver: Callable[..., None]) -> None:
    """Connect a receiver that never waits, so that an event loop can call it directly, without a thread.

    Django would call it in a thread, and the task that has the lock would wait for that.
    """
    signal.connect(receiver, weak=False, dispatch_uid=receiver)
    _prompt[signal].add(receiver)


def disconnect_prompt(signal: Signal, receiver: Callable[..., None]) -> None:
    signal.disconnect(receiver, dispatch_uid=receiver)
    _prompt[signal].discard(receiver)


def send_signal_in_background(signal: Signal, sender: type, **about: object) -> None:
    """Send the signal from another thread, so that a slow receiver does not delay the caller."""
    if _has_receivers(signal, sender):
        _unsent.append(partial(send_signal, signal, sender, **about))
        _worker.nudge()


def _has_receivers(signal: Signal, sender: type) -> bool:
    return bool(signal.receivers) and signal.has_listeners(sender)


def _send_all() -> None:
    while _unsent:
        _unsent.popleft()()


_prompt: defaultdict[Signal, set[Callable[..., None]]] = defaultdict(set)  # receivers that never wait
_unsent: deque[Callable[[], None]] = deque()
_worker = Worker("distlock-signals", _send_all)
fork.in_child(_unsent.clear)  # the parent sends its own signals
