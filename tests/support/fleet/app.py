"""The Celery app of a fleet: ``celery -A tests.support.fleet.app beat``. It writes down what is sent and what runs."""

import json
import math
import os
import socket
import time
from datetime import UTC, datetime, timedelta

import redis
from celery import Celery, signals
from celery.schedules import BaseSchedule, crontab, schedstate
from django.conf import settings

from django_distlock.backends.redis import RedisBackend
from django_distlock.celery.scheduled import HEADER, scheduled_run

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.fleet.settings")
NAME = os.environ.get("FLEET_NAME", "")
AHEAD = timedelta(seconds=float(os.environ.get("FLEET_AHEAD", "0")))


class FleetApp(Celery):
    def now(self):
        """A clock that may be wrong."""
        return super().now() + AHEAD


class Wall(BaseSchedule):
    """At each full multiple of so many seconds, as crontab does with minutes."""

    def __init__(self, every, **options):
        super().__init__(**options)
        self.every = every

    def is_due(self, last_run_at):
        now = self.now().timestamp()
        left = self._after(self.maybe_make_aware(last_run_at).timestamp()) - now
        return schedstate(True, self._after(now) - now) if left <= 0 else schedstate(False, left)

    def _after(self, moment):
        return (math.floor(moment / self.every) + 1) * self.every

    def remaining_estimate(self, last_run_at):
        return timedelta(seconds=self.is_due(last_run_at).next)

    def __eq__(self, other):
        return isinstance(other, Wall) and other.every == self.every

    def __hash__(self):
        return hash(self.every)

    def __reduce__(self):
        return type(self), (self.every,)


def read(kind, value):
    return {"every": float, "wall": Wall, "cron": crontab.from_string}[kind](value)


if NAME:
    socket.gethostname = lambda: NAME  # each process stands for a host
granted = {}  # by entry, the claim that is to be sent: its token, and when it saw the entry run
claim_run = RedisBackend.claim_run


def noted_claim(self, name, seen, now, ttl):
    standing = claim_run(self, name, seen, now, ttl)
    if standing is None:
        granted[name.removeprefix("fleet:")] = now.token, seen.at
    return standing


RedisBackend.claim_run = noted_claim
RedisBackend.grace = settings.PLAN["settle"]  # shorter, where no data is lost: the tests take less time
app = FleetApp("fleet")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(settings.PLAN["conf"])
app.conf.beat_schedule = {
    name: {"task": "note", "args": [name], "schedule": read(kind, value)}
    for name, (kind, value) in settings.PLAN["entries"].items()
}


def journal():
    """A connection of its own for each entry, because worker -B forks."""
    return redis.Redis.from_url(settings.PLAN["journal"], socket_timeout=5, decode_responses=True)


def write(what, *about):
    with journal() as book:
        book.rpush(what, json.dumps([*about, NAME, time.time()]))


@app.task(name="note", bind=True)
def note(self, entry):
    write("runs", entry, self.request.id, *self.request.get("claim"))
    with journal() as book:
        run = scheduled_run(self.request)
        write("worked" if run and book.set(f"done:{run}", "1", nx=True) else "refused", entry)


@signals.before_task_publish.connect
def is_about_to_send(headers, body, **_):
    headers["claim"] = granted.get(body[0][0], ("", 0.0))
    strike_if_asked("before", headers)


@signals.after_task_publish.connect
def sent(headers, body, **_):
    write("sends", body[0][0], headers["id"], *headers["claim"])
    if HEADER in headers:  # a stock beat has none
        write("scheduled", *json.loads(headers[HEADER]))
    strike_if_asked("after", headers)


def strike_if_asked(moment, headers):
    """Stop or kill this process between claim and message, or between message and mark, when the test asks for it."""
    with journal() as book:
        number = book.getdel(f"{moment}:{NAME}")
    if number:
        write("struck", *json.loads(headers[HEADER]))
        os.kill(os.getpid(), int(number))


@signals.beat_init.connect
def beat_is_ready(**_):
    write("ready")


@signals.worker_ready.connect
def worker_is_ready(**_):
    write("ready")


def make_rows(rows):
    """Migrate, and make rows of django-celery-beat."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    from django_celery_beat.models import ClockedSchedule, CrontabSchedule, IntervalSchedule, PeriodicTask

    for name, (kind, value, one_off) in rows.items():
        when = {
            "every": lambda value: {"interval": IntervalSchedule.objects.create(every=value, period="seconds")},
            "cron": lambda value: {"crontab": CrontabSchedule.objects.create(minute=value)},
            "clocked": lambda value: {
                "clocked": ClockedSchedule.objects.create(clocked_time=datetime.fromtimestamp(value, UTC))
            },
        }[kind](value)
        PeriodicTask.objects.create(name=name, task="note", args=json.dumps([name]), one_off=one_off, **when)


if __name__ == "__main__":
    make_rows(settings.PLAN["rows"])
