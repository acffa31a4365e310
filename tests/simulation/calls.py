"""What callers do with the package, each once for threads and once for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.http import HttpRequest, StreamingHttpResponse
from django.test import RequestFactory

from django_distlock import Lease, State, aadopt, adopt, distributed_lock, lock, lock_all, locks
from django_distlock.core.forced import force_release
from django_distlock.core.succession import Succession
from django_distlock.exceptions import LockBackendError
from django_distlock.types import NOT_WAITING, Grant, Holder, LockInfo, LockRequest

from .plan import Event

if TYPE_CHECKING:
    from .engine.scheduler import Process
    from .judges.calls import Judge
    from .simulation import Simulation

LOOKS_FOR_TEXTS, PAUSE = 60, 0.05  # seconds between two looks
PARTS = 4  # of the content of a response
TRIES = 10  # of who asks for several locks and does not wait for them
OPTIONS = ("ttl", "wait", "renew", "min_hold", "max_hold", "slots", "max_waiters", "reentrant", "on_unavailable")
WITHOUT_LOCK = ("works", "raises")  # what is done by a body that runs without it


def about_of(about: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a group says of one of its locks."""
    options = {key: about[key] for key in ("ttl", "wait", "renew", "min_hold") if key in about}
    return {**options, "name": name, "slots": about["slots"][name]}


class BodyError(Exception):
    """The work that a lock guards has failed."""


def _timeout(about: Mapping[str, Any]) -> float:
    """For ``acquire()``: the wait once more, or the lock's own."""
    wait: float | None = about["wait"] if about.get("is_timed") else None
    return -1 if wait is None else wait


class Calls:
    """``getattr(self, what)(process, **about)``, for tasks ``a`` and the same. What they raise is judged."""

    def __init__(self, simulation: Simulation) -> None:
        self._judges = simulation.judges
        self._sleep = simulation.scheduler.sleep
        self._simulation = simulation
        self.detached: list[str] = []  # texts on their way to whoever adopts them
        self.kept: list[Any] = []  # handles

    def _handle(self, process: Process, about: Mapping[str, Any], name: str = "") -> Any:
        options = {key: about[key] for key in OPTIONS if key in about}
        handle = lock(name or about["name"], using=process.name, **options)
        if about.get("keeps_handle") and not about.get("forgets"):
            self.kept.append(handle)
        return handle

    def with_(self, process: Process, **about: Any) -> Lease | None:
        if about.get("in_atomic"):
            self._in_transaction(process, about)
            return None
        with self._judges.acquiring(process, about) as judge, self._handle(process, about) as lease:
            judge.got(lease)
            with judge.body():
                self._work(process, lease, about)
        return judge.lease

    def _in_transaction(self, process: Process, about: Mapping[str, Any]) -> None:
        """Which ends by COMMIT, or, where the body raised, by ROLLBACK."""
        lease = None
        with suppress(BodyError), transaction.atomic():
            lease = self.with_(process, **{**about, "in_atomic": None})
            self._sleep(0.1)
            if lease:
                self._judges.holders.commits(lease)
            if about.get("raises"):
                raise BodyError
        # A call that is told what to do with its handle may be struck, and Django only logs what strikes at its hook.
        if lease and "keeps_handle" not in about:
            self._judges.holders.freed(lease, "S14: its transaction has ended")

    async def awith_(self, process: Process, **about: Any) -> None:
        with self._judges.acquiring(process, about) as judge:
            async with self._handle(process, about) as lease:
                judge.got(lease)
                with judge.body():
                    await self._awork(process, lease, about)

    def acquire(self, process: Process, **about: Any) -> None:
        handle = self._handle(process, about)
        with self._judges.acquiring(process, about) as judge:
            if not handle.acquire(timeout=_timeout(about)):
                judge.got(None)
                return
            lease = judge.got_by(process, about["name"])
            if lease is None or about.get("forgets"):
                return
            try:
                self._work(process, lease, about)
            finally:
                judge.leaves()
                for _ in range(1 + about.get("releases_twice", False)):
                    handle.release()

    async def aacquire(self, process: Process, **about: Any) -> None:
        handle = self._handle(process, about)
        with self._judges.acquiring(process, about) as judge:
            if not await handle.aacquire(timeout=_timeout(about)):
                judge.got(None)
                return
            lease = judge.got_by(process, about["name"])
            if lease is None or about.get("forgets"):
                return
            try:
                await self._awork(process, lease, about)
            finally:
                judge.leaves()
                for _ in range(1 + about.get("releases_twice", False)):
                    await handle.arelease()

    def gathers(self, process: Process, **about: Any) -> None:
        """Several locks together; who does not wait tries again and again."""
        for _ in range(TRIES if about["wait"] == 0 else 1):
            self._gathers(process, about)
            self._sleep(about["works"] / TRIES)

    async def agathers(self, process: Process, **about: Any) -> None:
        for _ in range(TRIES if about["wait"] == 0 else 1):
            await self._agathers(process, about)
            await asyncio.sleep(about["works"] / TRIES)

    def _gathers(self, process: Process, about: Mapping[str, Any]) -> None:
        group = self._group(process, about)
        with self._judges.gathering(process, about) as judge, group as leases:
            judge.got_all(leases)
            with judge.body():
                for _ in range(PARTS):
                    self._sleep(about["works"] / PARTS)
                    judge.holds_all()
                if about.get("raises"):
                    raise BodyError

    async def _agathers(self, process: Process, about: Mapping[str, Any]) -> None:
        group = self._group(process, about)
        with self._judges.gathering(process, about) as judge:
            async with group as leases:
                judge.got_all(leases)
                with judge.body():
                    for _ in range(PARTS):
                        await asyncio.sleep(about["works"] / PARTS)
                        judge.holds_all()
                    if about.get("raises"):
                        raise BodyError

    def _group(self, process: Process, about: Mapping[str, Any]) -> Any:
        handles = [self._handle(process, about_of(about, name)) for name in about["names"]]
        return lock_all(*handles, wait=about["wait"])

    def poll(self, process: Process, **about: Any) -> None:
        handle = self._handle(process, about)
        for _ in range(5):
            with self._judges.acquiring(process, {**about, "wait": 0}) as judge:
                if handle.acquire(blocking=False):
                    lease = judge.got_by(process, about["name"])
                    if lease is None:
                        return
                    try:
                        self._work(process, lease, about)
                    finally:
                        judge.leaves()
                        handle.release()
                    return
                judge.got(None)
            self._sleep(0.2)

    async def apoll(self, process: Process, **about: Any) -> None:
        handle = self._handle(process, about)
        for _ in range(5):
            with self._judges.acquiring(process, {**about, "wait": 0}) as judge:
                if await handle.aacquire(blocking=False):
                    lease = judge.got_by(process, about["name"])
                    if lease is None:
                        return
                    try:
                        await self._awork(process, lease, about)
                    finally:
                        judge.leaves()
                        await handle.arelease()
                    return
                judge.got(None)
            await asyncio.sleep(0.2)

    def adopt(self, process: Process, **about: Any) -> None:
        for _ in range(LOOKS_FOR_TEXTS):
            if text := self._text():
                break
            self._sleep(PAUSE)
        else:
            return
        with self._judges.adopting(process, text) as judge, adopt(text) as lease:
            judge.got(lease)
            self._judges.holders.adopted(text, judge.began)
            with judge.body():
                self._work(process, lease, about)

    async def aadopt(self, process: Process, **about: Any) -> None:
        for _ in range(LOOKS_FOR_TEXTS):
            if text := self._text():
                break
            await asyncio.sleep(PAUSE)
        else:
            return
        with self._judges.adopting(process, text) as judge:
            async with await aadopt(text) as lease:
                judge.got(lease)
                self._judges.holders.adopted(text, judge.began)
                with judge.body():
                    await self._awork(process, lease, about)

    def _text(self) -> str:
        """Sometimes one that others adopt, too."""
        if not self.detached:
            return ""
        return self.detached[-1] if self._simulation.chance.random() < 0.3 else self.detached.pop()

    def succeeds(self, process: Process, name: str, **about: Any) -> None:
        """A message holds the lock, and its run exchanges that lease for one that is renewed, as unique tasks do."""
        claimed = None
        with self._judges.acquiring(process, {"text": "claims"}) as judge:
            succession = Succession(process.name)
            queued = self._request(name, about, "queued")
            claimed = succession.claim(queued)
            judge.got(None)
        for retries_left in range(about["retries"], -1, -1):
            if not isinstance(claimed, Grant):
                return
            self._sleep(about["queued"])
            claimed = None
            with self._judges.acquiring(process, {"text": "begins"}) as judge:
                claimed = self._run_of(process, succession, queued.copy(in_doubt=True), judge, name, about)
                if claimed and retries_left:
                    queued = self._request(name, about, "queued")
                    self._judges.holders.passes_on(claimed)
                    lease, claimed = claimed, None
                    claimed = succession.requeue(lease, queued)
                elif claimed:
                    claimed.release()

    def _run_of(
        self, process: Process, succession: Succession, queued: LockRequest, judge: Judge, name: str, about: Any
    ) -> Any:
        """The lease after its work; None where the name is another one's by now."""
        try:
            lease = succession.begin(queued, self._request(name, about, "running"))
        except LockBackendError:
            succession.release_in_background(queued)
            raise
        if isinstance(lease, LockInfo):
            judge.got(None)
            return None
        judge.got(lease)
        with judge.body():
            self._sleep(about["works"])
        return lease

    def _request(self, name: str, about: Mapping[str, Any], label: str) -> LockRequest:
        slots = about.get("slots", 1)
        holder = Holder.here(label, slots=slots)
        request = LockRequest(name, about["ttl"], holder, slots=slots, deadline=NOT_WAITING)
        if label == "queued":
            self._judges.holders.is_queued(request.token)
        return request

    def free(self, process: Process, name: str, **about: Any) -> None:
        """An operator does."""
        with self._judges.acquiring(process, {"frees": name}) as judge:
            [leases] = locks[process.name].look([name])
            judge.got(None)
            if leases:
                info = leases[int(self._judges.now * 1000) % len(leases)]
                self._judges.freed(info)
                judge.leaves()
                force_release(info, by="operator")

    async def afree(self, process: Process, name: str, **about: Any) -> None:
        with self._judges.acquiring(process, {"frees": name}) as judge:
            [leases] = await locks[process.name].alook([name])
            judge.got(None)
            assert all(info.name == name for info in leases)

    def lists(self, process: Process, prefix: str, **about: Any) -> None:
        """As ``manage.py locks list`` and the pages of the admin do."""
        backend = locks[process.name]
        with self._judges.listing(process, prefix) as judge:
            judge.told_slots(slots := backend.list_slots(prefix))
            names = [*{name: None for name, _ in slots}]
            judge.told_infos([info for leases in backend.look(names) for info in leases])
            judge.told_infos([*backend.held(prefix, step=2)])
            judge.told_waiters(names, backend.count_waiters(names))

    async def alists(self, process: Process, prefix: str, **about: Any) -> None:
        backend = locks[process.name]
        with self._judges.listing(process, prefix) as judge:
            judge.told_slots(slots := await backend.alist_slots(prefix))
            names = [*{name: None for name, _ in slots}]
            judge.told_infos([info for leases in await backend.alook(names) for info in leases])
            judge.told_infos([info async for info in backend.aheld(prefix, step=2)])
            judge.told_waiters(names, await backend.acount_waiters(names))

    def responds(self, process: Process, **about: Any) -> None:
        """A view does, whose content is made slowly. ``ends``: how its server is done with the response."""
        ends, request = about["ends"], RequestFactory().get("/")
        with self._judges.acquiring(process, about) as judge:
            streamed = self._judges.responding(judge)

            @self._locks_view(process, about)
            def view(request: HttpRequest) -> StreamingHttpResponse:
                judge.got_by(process, about["name"])
                return StreamingHttpResponse(self._parts(judge, about))

            response = view(request)
            streamed.begins()
            if about.get("asks_again"):
                self.with_(process, name=about["name"], ttl=about["ttl"], wait=0, works=0.0)
            try:
                for number, _ in enumerate(response):
                    streamed.is_open()
                    if ends != "read" and number:
                        break
            except BodyError:
                streamed.is_done()
                raise
            if ends == "dropped":
                judge.lease = None  # released in the background, of which no signal tells
                del response
            else:
                if ends == "closed":
                    response.close()
                elif ends == "replaced":
                    request.close()
                streamed.is_done()
                response.close()
                if self._judges.calls_may_fail(judge.began, process):
                    judge.lease = None  # a release that failed is logged, and repeated in the background
        self._sleep(streamed.soon)
        streamed.is_done()

    async def aresponds(self, process: Process, **about: Any) -> None:
        """In an event loop all is released in the background."""
        ends, request = about["ends"], RequestFactory().get("/")
        with self._judges.acquiring(process, about) as judge:
            streamed = self._judges.responding(judge)

            @self._locks_view(process, about)
            async def view(request: HttpRequest) -> StreamingHttpResponse:
                judge.got_by(process, about["name"])
                return StreamingHttpResponse(self._aparts(judge, about))

            response = await view(request)
            streamed.begins()
            if about.get("asks_again"):
                await self.awith_(process, name=about["name"], ttl=about["ttl"], wait=0, works=0.0)
            judge.lease = None
            number = 0
            async with aclosing(aiter(response)) as parts:
                async for _ in parts:
                    streamed.is_open()
                    number += 1
                    if ends != "read" and number > 1:
                        break
            if ends == "closed":
                response.close()
            elif ends == "replaced":
                request.close()
            elif ends == "dropped":
                del response
        await asyncio.sleep(streamed.soon)
        streamed.is_done()

    def _locks_view(self, process: Process, about: Mapping[str, Any]) -> Any:
        options = {key: about[key] for key in OPTIONS if key in about}
        return distributed_lock(about["name"], using=process.name, on_busy="raise", **options)

    def _parts(self, judge: Judge, about: Mapping[str, Any]) -> Iterator[bytes]:
        try:
            for number in range(PARTS):
                self._sleep(about["works"] / PARTS)
                if number == 1 and about.get("raises"):
                    raise BodyError
                yield b"part"
        finally:
            judge.leaves()

    async def _aparts(self, judge: Judge, about: Mapping[str, Any]) -> AsyncIterator[bytes]:
        try:
            for number in range(PARTS):
                await asyncio.sleep(about["works"] / PARTS)
                if number == 1 and about.get("raises"):
                    raise BodyError
                yield b"part"
        finally:
            judge.leaves()

    # With the lock

    def _work(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> None:
        if lease.state is State.UNAVAILABLE:
            about = {key: about[key] for key in WITHOUT_LOCK if key in about}
        self._sleep(about["works"] / 2)
        if "renews" in about:
            with self._judges.renewing(process, lease):
                lease.renew(about["renews"])
        if inside := about.get("inside"):
            self._simulation.reached("enters again")
            with self._judges.inside(process, inside), self._handle(process, {**about, "wait": 1}, inside) as other:
                if other.state is not State.UNAVAILABLE:
                    self._judges.granted(other, {**about, "name": inside})
                self._sleep(0.05)
        self._sleep(about["works"] / 2)
        if about.get("renewed_meanwhile"):
            self._sleep(self._renew_meanwhile(process, lease, about))
        self._end_work(process, lease, about)

    async def _awork(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> None:
        if lease.state is State.UNAVAILABLE:
            about = {key: about[key] for key in WITHOUT_LOCK if key in about}
        await asyncio.sleep(about["works"] / 2)
        if "renews" in about:
            with self._judges.renewing(process, lease):
                await lease.arenew(about["renews"])
        if inside := about.get("inside"):
            self._simulation.reached("enters again")
            with self._judges.inside(process, inside):
                async with self._handle(process, {**about, "wait": 1}, inside) as other:
                    if other.state is not State.UNAVAILABLE:
                        self._judges.granted(other, {**about, "name": inside})
                    await asyncio.sleep(0.05)
        await asyncio.sleep(about["works"] / 2)
        if about.get("renewed_meanwhile"):
            await asyncio.sleep(self._arenew_meanwhile(process, lease, about))
        self._end_work(process, lease, about)

    def _renew_meanwhile(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> float:
        """Another thread does. Returns the seconds after which the lease is given up, while that is on its way."""

        def renew() -> None:
            with self._judges.renewing_meanwhile(process, lease, about):
                lease.renew()

        self._simulation.begin(process, Event(self._judges.now, "renews"), renew)
        return self._simulation.chance.uniform(0.0, 2.0) * self._simulation.distance

    def _arenew_meanwhile(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> float:
        async def renew() -> None:
            with self._judges.renewing_meanwhile(process, lease, about):
                await lease.arenew()

        self._simulation.begin(process, Event(self._judges.now, "renews", about={"in_task": True}), renew)
        return self._simulation.chance.uniform(0.0, 2.0) * self._simulation.distance

    def _end_work(self, process: Process, lease: Lease, about: Mapping[str, Any]) -> None:
        self._simulation.reached("ends")
        if about.get("detaches"):
            passed = self._judges.detaching(lease)
            text = lease.detach()
            self._judges.holders.passed[text] = passed
            self.detached.append(text)
        if about.get("raises"):
            raise BodyError
