"""Many beats in one process, on a clock that the test moves."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

from celery import Celery
from celery.beat import Scheduler
from kombu.exceptions import OperationalError

from django_distlock.celery.scheduled import scheduled_run

SOON = 0.005  # seconds that a tick takes: a due one is waited for by ticks over its last 0.01 s


class Killed(BaseException):
    """Ends a beat at once, wherever it is."""


class Connection:
    """To the broker of a world, from one beat."""

    connection_errors = channel_errors = ()
    transport, transport_options = SimpleNamespace(driver_type="memory"), {}

    def __init__(self, beat):
        self.beat = beat

    def clone(self, **_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ensure_connection(self, **_):
        if self.beat in self.beat.app.world.cut_off:
            raise OperationalError("the broker is down")


class Recording(Scheduler):
    """Sends into a list."""

    producer = None

    @property
    def connection(self):
        return Connection(self)

    def apply_async(self, entry, producer=None, advance=True, **kwargs):
        headers = entry.options.setdefault("headers", {})
        headers["celery_beat_task"] = True  # as Celery does, in the entry itself
        world = self.app.world
        world.before_sending(self, entry.name)
        self.connection.ensure_connection()
        world.sent.append((entry.name, world.now))
        world.headers.append((entry.name, headers))
        world.after_sending(self, entry.name)


class Request(NamedTuple):
    """Of a task, as it is sent."""

    headers: dict


class World:
    """The time, what was sent, and the beats that run, each with the time at which it wakes."""

    def __init__(self, now, entries, zone="UTC", **conf):
        self.now, self.entries, self.zone, self.conf = now, entries, zone, conf
        self.sent = []
        self.headers = []  # of what was sent, with the entries
        self.cut_off = set()  # beats that do not reach the broker
        self.before_sending = self.after_sending = lambda beat, entry: None
        self.wakes = {}
        self.started = []

    def start(self, kind, ahead=0.0, **options):
        app = Celery("fleet", set_as_current=False, broker="memory://")
        app.conf.update(timezone=self.zone, beat_schedule=self.entries(), result_expires=None, **self.conf)
        app.world = self
        self.set_clock(app, ahead)
        started = kind(app, **{"max_interval": 300, **options})
        self.wakes[started] = self.now
        self.started.append(started)
        return started

    def set_clock(self, app, ahead):
        app.now = lambda: (self.now + timedelta(seconds=ahead)).astimezone(app.timezone)

    def end(self):
        """Celery may take an app of this world for the current one of the tests that follow."""
        for started in self.started:
            vars(started.app).pop("now", None)

    def kill(self, victim):
        """Without a last word."""
        del self.wakes[victim]

    def run(self, until):
        """Let everybody tick who wants to; in random order where two want to at once."""
        restless = 0  # ticks, one after another, after which a beat did not sleep
        while self.wakes:
            woken = min(self.wakes, key=lambda one: (self.wakes[one], random.random()))
            if self.wakes[woken] > until:
                break
            self.now = max(self.now, self.wakes[woken])
            try:
                wait = woken.tick()
            except Killed:
                self.kill(woken)
            if woken in self.wakes:
                restless = restless + 1 if wait < SOON else 0
                assert restless < 1000, "beats do not sleep until something is due"
                self.wakes[woken] = self.now + timedelta(seconds=max(wait, SOON))
        self.now = until

    def runs(self, entry):
        """Which runs were sent, in the order of the messages."""
        return [scheduled_run(Request(headers)).scheduled_at for name, headers in self.headers if name == entry]

    def times(self, entry):
        return [when for name, when in self.sent if name == entry]


def task(when, **more):
    return {"task": "task", "schedule": when, **more}


def gaps(times):
    return [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
