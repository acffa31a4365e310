"""Processes that fork. The simulation goes on with the child, and its parent stands still until it dies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from django.http import StreamingHttpResponse

from django_distlock import (
    Lease,
    LockBackendError,
    LockError,
    LockLost,
    LockNotHeld,
    State,
    distributed_lock,
    lock,
    locks,
)

from .engine.threads import Thread
from .plan import Fault

if TYPE_CHECKING:
    from django_distlock.backends.base import BaseLockBackend

    from .engine.scheduler import Process
    from .simulation import Simulation

TTL = 5.0  # seconds, of what is held at a fork


def draw(chance: random.Random) -> Mapping[str, Any]:
    """``lives``: seconds after which the parent dies. ``name``: of what its child asks for. ``holds``: how it does."""
    return {
        "lives": round(chance.choice([0.0, chance.uniform(0.0, 1.0), chance.uniform(1.0, 20.0)]), 3),
        "name": chance.choice("aaab"),
        "holds": chance.choice(["", "", "acquire", "with", "response"]),
        "wait": chance.choice([0, 1.0, 8.0]),
    }


class Forks:
    """S8."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._judges = simulation.judges
        simulation.network.misuses = lambda socket: self._judges.fail(
            f"S8: a child of {socket.process} uses its connection to {socket.address}"
        )
        self.fault = Fault(self._fork, (), draw)

    def _fork(self, who: str, **about: Any) -> None:
        """A thread of the process does, wherever the others are."""
        process = self._simulation.processes[who]
        work = partial(self._go_on_as_child, process, **about)
        Thread(self._simulation.scheduler, process, target=work, name=f"{process} forks").start()

    def _go_on_as_child(self, parent: Process, lives: float, name: str, holds: str, wait: float) -> None:
        leave = self._hold(parent, name, holds) if holds else lambda: None
        service = locks.service(parent.name)
        inherited = service.renewer.leases()
        child = self._simulation.fork(parent, lives)
        with self._simulation.counted(child, "goes on"):
            for lease in inherited:
                self._judge(lease)
            leave()
            self._ask(child, service.backend, name)
            self._simulation.calls.with_(child, name=name, ttl=2.0, wait=wait, works=0.1)

    def _hold(self, process: Process, name: str, how: str) -> Callable[[], object]:
        """Returns how the child leaves what its parent holds: it is told of nothing but the end of ``acquire()``."""
        handle, leave = lock(name, using=process.name, ttl=TTL, wait=0), lambda: None
        with self._judges.acquiring(process, {"name": name, "ttl": TTL, "wait": 0}) as judge:
            if how == "with":
                handle.__enter__()
                leave = partial(handle.__exit__, None, None, None)
            elif how == "response":
                view = distributed_lock(name, using=process.name, ttl=TTL)(lambda: StreamingHttpResponse(["part"]))
                leave = view().close
            elif handle.acquire():
                leave = partial(self._judge_refusal, "release() of a handle", handle.release)
            else:
                judge.got(None)
                return leave
            judge.got_by(process, name)
        return leave

    def _judge(self, lease: Lease) -> None:
        """A child neither believes in a lease of its parent nor renews, releases or passes it on, and is told so."""
        if lease.state in (State.HELD, State.UNKNOWN) or lease.remaining:
            self._judges.fail(f"S8: a child believes in {lease!r}")
        for ask in (lease.ensure_held, lease.renew, lease.release, lease.detach):
            self._judge_refusal(f"{ask.__name__}() of {lease!r}", ask)

    def _ask(self, child: Process, backend: BaseLockBackend, name: str) -> None:
        """By what the parent had of the store. Nothing that threads of the parent used or held is in its way."""
        began = self._judges.now
        try:
            backend.look([name])
        except LockBackendError as error:
            if not self._judges.calls_may_fail(began, child):
                self._judges.fail(f"S8: {child} asks by a backend of its parent: {error!r}")
        finally:
            backend.close()

    def _judge_refusal(self, what: str, ask: Any) -> None:
        try:
            ask()
        except (LockLost, LockNotHeld):
            return
        except LockError as error:
            self._judges.fail(f"S8: a child was told {error!r} by {what}", error)
        else:
            self._judges.fail(f"S8: a child was told nothing by {what}")
