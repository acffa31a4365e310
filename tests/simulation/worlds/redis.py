"""One Redis."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from ..plan import Fault, length
from ..redis_server import Server
from ..sessions import Session
from .base import World

if TYPE_CHECKING:
    from ..network import Socket
    from ..simulation import Simulation

STATES = ("LOADING", "READONLY", "NOREPLICAS", "MASTERDOWN", "MISCONF", "OOM", "BUSY")


class RedisWorld(World):
    name = "redis"
    address = ("10.0.0.1", 6379)

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.server = Server(simulation.network, self.address, self._executed)
        self._lost_at = -1.0
        self._went_back = False

    def _executed(self, session: Session, command: list[str], reply: Any) -> None:
        words = " ".join(word[:30] for word in command if len(word) < 200)
        self.simulation.tell(f"{session.socket.process} to {self.server.address[0]}: {words} -> {str(reply)[:100]}")

    def setting(self) -> dict[str, Any]:
        host, port = self.address
        return {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": f"redis://{host}:{port}/0"}

    def is_locked(self, name: str) -> bool:
        return self.server.store.peek(f"lock:{name}") is not None

    def left(self) -> Collection[str]:
        return {key for key in self.server.store.keys() - {"lock|f"} if not self._runs_out(key)}

    def _runs_out(self, key: str) -> bool:
        """That a text was adopted is remembered for as long as the text could be shown again."""
        return key.startswith("lock:django_distlock.handover:") and self.server.store.remaining(key) < inf

    def has_lost_data_since(self, moment: float) -> bool:
        return self._lost_at >= moment

    def cut(self, socket: Socket) -> None:
        for session in self.server.sessions:
            if session.socket is socket:
                session.end()
                return

    def faults(self) -> dict[str, Fault]:
        def fault(happen: Callable[..., object], draw: Callable[[random.Random], Mapping[str, Any]] = _lasts) -> Fault:
            return Fault(happen, (":".join(map(str, self.address)),), draw)

        return {
            "crash": fault(self._crash),
            "power_loss": fault(self._lose_power),
            "hang": fault(self._hang),
            "refuse": fault(self._refuse, lambda chance: {**_lasts(chance), "state": chance.choice(STATES)}),
            "forget": fault(lambda who: self.server.forget_scripts(), lambda chance: {}),
            "wipe": fault(self._wipe, lambda chance: {}),
            "slow_server": fault(self._slow, lambda chance: {**_lasts(chance), "latency": chance.choice([0.01, 0.3])}),
            "server_clock": fault(self._set_clock, lambda chance: {"by": round(chance.uniform(-10.0, 10.0), 3)}),
        }

    def _crash(self, who: str, seconds: float) -> None:
        if self.server.is_up:
            self.server.stop()
            self.scheduler.at(seconds, self._start)

    def _lose_power(self, who: str, seconds: float) -> None:
        if self.server.is_up:
            self.server.lose_power()
            self.scheduler.at(seconds, self._start)

    def _start(self) -> None:
        self.server.start(keeps_data=True)

    def _hang(self, who: str, seconds: float) -> None:
        self.server.hang()
        self.scheduler.at(seconds, self.server.go_on)

    def _refuse(self, who: str, seconds: float, state: str) -> None:
        self.server.states.add(state)
        self.scheduler.at(seconds, lambda: self.server.states.discard(state))

    def _wipe(self, who: str) -> None:
        self.server.store.restore({})
        self._lost_at = self.scheduler.now
        self.may_repeat_numbers = self._went_back

    def _slow(self, who: str, seconds: float, latency: float) -> None:
        self.server.latency = latency

        def end() -> None:
            self.server.latency = 0.0

        self.scheduler.at(seconds, end)

    def _set_clock(self, who: str, by: float) -> None:
        self.server.store.clock_error += by
        self._went_back = self._went_back or by < 0.0
        self.may_repeat_numbers = self._went_back and self._lost_at >= 0.0


def _lasts(chance: random.Random) -> dict[str, Any]:
    return {"seconds": length(chance)}
