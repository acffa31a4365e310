"""Many beats in one process, on a clock that the test moves."""

from __future__ import annotations

import random
from datetime import timedelta
from itertools import pairwise

from celery import Celery

SOON = 0.002  # seconds that a tick takes: a due one is waited for by ticks over its last 0.01 s


class Recording:
    """Sends into a list."""

    producer = None

    def apply_async(self, entry, producer=None, advance=True, **kwargs):
        entry.options.setdefault("headers", {})["celery_beat_task"] = True  # as Celery does, in the entry itself
        self.app.world.sent.append((entry.name, self.app.world.now))


class World:
    """The time, what was sent, and the beats that run, each with the time at which it wakes."""

    def __init__(self, now, entries, zone="UTC", **conf):
        self.now, self.entries, self.zone, self.conf = now, entries, zone, conf
        self.sent = []
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
        while self.wakes:
            woken = min(self.wakes, key=lambda one: (self.wakes[one], random.random()))
            if self.wakes[woken] > until:
                break
            self.now = max(self.now, self.wakes[woken])
            wait = woken.tick()
            if woken in self.wakes:
                self.wakes[woken] = self.now + timedelta(seconds=max(wait, SOON))
        self.now = until

    def times(self, entry):
        return [when for name, when in self.sent if name == entry]


def task(when, **more):
    return {"task": "task", "schedule": when, **more}


def gaps(times):
    return [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
