"""What a simulation asks of a world."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from logging import LogRecord
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from django_distlock import LockBackendError

from ..engine.scheduler import Host
from ..plan import PROFILES, RESPONSE_MAX_HOLD, Fault, Profile, Weighed, profile_of

if TYPE_CHECKING:
    from ..engine.lines import Lines
    from ..engine.network import Address, Socket
    from ..engine.scheduler import Process
    from ..simulation import Simulation


class World(ABC):
    name: ClassVar[str]
    has_network: ClassVar[bool] = True
    forks: ClassVar[bool] = True  # whether its processes do
    operations: ClassVar[Sequence[str]] = ("acquire", "wait", "renew", "release")  # that take time: faults meet them
    most_processes: ClassVar[int] = 4
    profiles: ClassVar[Sequence[Weighed]] = PROFILES
    own_profiles: ClassVar[Sequence[Profile]] = ()  # which other worlds have not
    drift: ClassVar[float] = 0.004  # by which share the clocks of processes run faster or slower, at most
    longest_attempt: ClassVar[float] = inf  # seconds after which a newcomer is told that the store fails
    survived: ClassVar[Collection[str]] = ()  # faults one of which fails no call
    keeping_connections: ClassVar[Collection[str]] = ()  # faults by which none ends
    task_time: ClassVar[float] = 0.0  # seconds that calls of tasks may last longer, which threads make for them
    timeout: ClassVar[float] = 2.0  # seconds for an answer of a server
    turns_away: ClassVar[bool] = False  # callers, from a server that refused one of their process
    has_slots: ClassVar[bool] = True  # several may hold a lock at once
    has_max_waiters: ClassVar[bool] = True  # its stores count those who wait
    has_exchange: ClassVar[bool] = True  # one lease may follow on another one
    has_minorities: ClassVar[bool] = False  # a lock may be held on servers that are too few
    ways_to_connect: ClassVar[int] = 0  # that bytes go until a process that begins knows its servers, if they are many

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.lines: Lines | None = None
        self.scheduler = simulation.scheduler
        self.profile = profile_of(simulation.seed, self.profiles, self.own_profiles)
        aliases = [f"p{number}.{times}" for number in range(self.most_processes) for times in range(10)]
        self.settings = {alias: {**self.setting(), "RESPONSE_MAX_HOLD": RESPONSE_MAX_HOLD} for alias in aliases}

    @abstractmethod
    def setting(self) -> dict[str, Any]:
        """The entry of each process in DISTRIBUTED_LOCKS."""

    def new_host(self, name: str, rate: float) -> Host:
        """Where the process of that name runs."""
        return Host(name, self.scheduler, rate)

    def forked(self) -> None:
        """A child goes on in the place of a process."""
        return

    def end(self) -> None:
        """The simulation is over."""
        return

    def faults(self) -> dict[str, Fault]:
        """Those of its servers."""
        return {}

    def of_call(self, chance: random.Random, about: Mapping[str, Any]) -> Mapping[str, Any]:
        """What it adds to the description of a call."""
        return {}

    def holders(self) -> Mapping[str, Collection[str]] | None:
        """The tokens of the leases of each lock that is held, as the stores have it. None: it does not tell."""
        return None

    def was_taken_since(self, name: str, moment: float, slots: int) -> bool:
        """Whether so many had the lock, or one a place in its queue, at that moment or later, as far as it can tell."""
        return True

    def most_places(self, name: str, moment: float) -> float:
        """How many had a place in its queue at once, at that moment or later, as far as it can tell."""
        return inf

    def promised(self, name: str, token: str, about: Mapping[str, Any]) -> None:
        """A lease was granted for a call with these options."""
        return

    def logged(self, record: LogRecord) -> None:
        """The package has told its operators that."""
        return

    def told(self, error: LockBackendError) -> None:
        """A caller was told that."""
        return

    def connects(self, process: Process, address: Address) -> None:
        """A process begins to."""
        return

    def closes(self, socket: Socket) -> None:
        """A process gives up a connection that works."""
        return

    def watch(self) -> None:
        """Its judges look, as time passes."""
        return

    def may_stay(self, thread: str) -> bool:
        """Whether the thread of that name stays when it has nothing to do."""
        return False

    @abstractmethod
    def leases(self, name: str) -> int:
        """How many there are of that lock, as far as callers may be kept from it by them."""

    def left(self) -> Collection[str]:
        """What is in the stores, but for the numbers of grants, which stay."""
        return ()

    def lacks(self, backend: Any) -> Collection[str]:
        """What its process had at its begin, and has no more."""
        return ()

    @property
    def queueing_time(self) -> float:
        """Seconds for which calls may wait for a connection, where they are many."""
        return 0.0

    def asking_time(self, ttl: float) -> float:
        """Seconds in addition that its servers have for their answers to one acquisition."""
        return 0.0

    def keeps_connections(self, address: Address) -> bool:
        """Whether those to that server are used again and again."""
        return False

    def ways_to_grant(self, locks: int) -> int:
        """That bytes go in one attempt to grant so many locks in one step, if that takes several requests."""
        return 0

    def is_kept_for(self, name: str, token: str, seconds: float) -> bool:
        """Whether nobody else is granted the lock for so many seconds, though the token has no confirmed lease.

        It was handed over to the token, or a crash has brought back the lease before.
        """
        return False

    def longest_call(self, operation: str, ttl: float) -> float:
        """Seconds that a call of the store lasts at most where nothing fails, but for the ways of its bytes."""
        return inf

    def patience(self, error: LockBackendError, wait: float | None) -> float:
        """Seconds for which that fails no caller who waits."""
        return 0.0

    def may_be_final(self, error: LockBackendError) -> bool:
        """Whether somebody has to correct something before what failed can succeed."""
        return True

    def last_fault(self, moments: Mapping[str, float]) -> float:
        """When its servers last failed as a whole, or will. ``moments``: when each that ever failed did so."""
        return max(moments.values(), default=-inf)

    def has_lost_data_since(self, moment: float) -> bool:
        return False

    @property
    def may_repeat_numbers(self) -> bool:
        """Where data is lost that was confirmed."""
        return False

    def delayed_until(self, process: Process, address: Address) -> float:
        """The moment until which bytes between them do not get through."""
        return 0.0

    def cut(self, socket: Socket) -> None:
        """The connection ends, for both sides."""
        raise NotImplementedError
