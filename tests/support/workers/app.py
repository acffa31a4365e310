"""The Celery app of the workers: tasks that write down what happens to them.

``celery -A tests.support.workers.app worker`` runs one.
"""

import json
import os
import time

import redis
from celery import Celery, chain, chord, group, shared_task, signals
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.dispatch import receiver

from django_distlock import LockLost, distributed_lock, lock
from django_distlock.celery import unique_task
from django_distlock.celery.tasks import REQUEUES
from django_distlock.signals import lock_busy, lock_lost, lock_unavailable

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.support.workers.settings")
app = Celery("workers")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(settings.PLAN["conf"])
LONG = 120  # seconds of TTL, far longer than any test waits for a lock that is freed at once


def write(name, what, **about):
    """A line in the journal of one lock."""
    with journal() as book:
        book.rpush(f"journal:{name}", json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **about}))


def journal():
    return redis.Redis.from_url(settings.PLAN["journal"], socket_timeout=5, decode_responses=True)


def wait_for_word(name, patience=240.0):
    """Works, in Python's own code, until the test says go."""
    deadline = time.monotonic() + patience
    with journal() as book:
        while not book.exists(f"go:{name}"):
            if time.monotonic() > deadline:
                raise AssertionError("nobody said go")
            time.sleep(0.02)


class Wanted(Exception):
    """What a test asked a task to raise."""


@shared_task(name="hold", bind=True)
@distributed_lock("job:{name}", ttl=LONG, on_busy="skip")
def hold(self, name, do="return"):
    write(name, "run", id=self.request.id, retries=self.request.retries)
    wait_for_word(name)
    if do == "raise":
        raise Wanted(name)
    if do == "retry":
        raise self.retry(countdown=60)
    write(name, "done", id=self.request.id)
    return name


@shared_task(name="hold_autoretry", autoretry_for=(Wanted,), retry_kwargs={"countdown": 60})
@distributed_lock("job:{name}", ttl=LONG, on_busy="skip")
def hold_autoretry(name):
    write(name, "run")
    wait_for_word(name)
    raise Wanted(name)


@shared_task(name="hold_briefly")
@distributed_lock("job:{name}", ttl=2, on_busy="skip")
def hold_briefly(name):
    write(name, "run")
    wait_for_word(name)


@shared_task(name="soft", soft_time_limit=1)
@distributed_lock("job:{name}", ttl=LONG, on_busy="skip")
def soft(name):
    write(name, "run")
    try:
        wait_for_word(name)
    except SoftTimeLimitExceeded:
        write(name, "soft limit")
        raise


@shared_task(name="hard", time_limit=1)
@distributed_lock("job:{name}", ttl=LONG, on_busy="skip")
def hard(name):
    write(name, "run")
    wait_for_word(name)


def wait_in_first_run(task, name):
    """For the test; a second run is seen to end."""
    with journal() as book:
        is_first = book.incr(f"runs:{name}") == 1
    write(name, "run", id=task.request.id)
    if is_first:
        wait_for_word(name)
    write(name, "done", id=task.request.id)
    return name


@shared_task(name="late", bind=True, acks_late=True, reject_on_worker_lost=True)
@distributed_lock("job:{name}", ttl=2, on_busy="skip")
def late(self, name):
    return wait_in_first_run(self, name)


@shared_task(name="retrying", bind=True, max_retries=2)
@distributed_lock("job:{name}", ttl=2, on_busy="retry")
def retrying(self, name):
    write(name, "run", id=self.request.id, retries=self.request.retries)
    return name


@shared_task(name="limited", bind=True, acks_late=True, reject_on_worker_lost=True, max_retries=0)
@distributed_lock("job:{name}", ttl=2, slots=3, on_busy="retry")
def limited(self, name, seconds):
    begin = time.time()
    time.sleep(seconds)
    write(name, "run", id=self.request.id, begin=begin, retries=self.request.retries)


@shared_task(name="impatient", max_retries=0)
@distributed_lock("job:{name}", ttl=LONG, on_busy="retry", retry_for=2)
def impatient(name):
    write(name, "run")


@shared_task(name="late_store", bind=True, max_retries=0)
@distributed_lock("job:{name}", using="late", ttl=2, on_unavailable="retry")
def late_store(self, name):
    write(name, "run", fence=self.request.lease.fence, retries=self.request.retries)
    return name


@shared_task(name="away_run", bind=True, acks_late=True)
@distributed_lock("job:{name}", using="away", on_unavailable="run")
def away_run(self, name):
    write(name, "run", fence=self.request.lease.fence, state=self.request.lease.state)
    return name


@shared_task(name="away_skip")
@distributed_lock("job:{name}", using="away", on_unavailable="skip")
def away_skip(name):
    write(name, "run")


@shared_task(name="fails_then_works", bind=True)
@distributed_lock("job:{name}", ttl=2, on_busy="skip")
def fails_then_works(self, name):
    """Is sent again before it has freed its lock."""
    write(name, "run", retries=self.request.retries)
    if not self.request.retries:
        try:
            self.retry(countdown=0)
        finally:
            time.sleep(1)
    return name


@shared_task(name="replacing", bind=True)
@distributed_lock("job:{name}", ttl=LONG, on_busy="skip")
def replacing(self, name):
    write(name, "run")
    raise self.replace(retrying.s(name))


@shared_task(name="rests")
@distributed_lock("job:{name}", min_hold=3, on_busy="skip")
def rests(name):
    write(name, "run")


@shared_task(name="told", bind=True)
@distributed_lock("job:{name}", ttl=2)
def told(self, name):
    """Works on until it sees that its lock was lost."""
    write(name, "run")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            self.request.lease.ensure_held()
        except LockLost:
            write(name, "told", state=self.request.lease.state)
            break
        time.sleep(0.02)
    write(name, "done")


@unique_task("{name}", name="unique", bind=True, using="brief")
def unique(self, name, do="return"):
    write(name, "run", id=self.request.id, retries=self.request.retries)
    wait_for_word(name)
    if do == "retry" and not self.request.retries:
        raise self.retry(countdown=1)
    write(name, "done", id=self.request.id)
    if do == "stay":
        wait_for_word(f"{name} end")
    return name


@unique_task("{name}", name="unique_late", bind=True, using="brief", acks_late=True, reject_on_worker_lost=True)
def unique_late(self, name):
    return wait_in_first_run(self, name)


@unique_task(
    "{name}", name="unique_work", bind=True, using="brief", acks_late=True, reject_on_worker_lost=True, max_retries=1
)
def unique_work(self, name, seconds, retries=False):
    write(name, "run", id=self.request.id)
    time.sleep(seconds)
    write(name, "done", id=self.request.id)
    if retries and not self.request.retries:
        raise self.retry(countdown=1)


@unique_task("{name}", name="unique_start", bind=True, using="brief", until="start")
@distributed_lock("{name}", on_busy="retry", using="brief")
def unique_start(self, name):
    write(name, "run", id=self.request.id)
    wait_for_word(name)
    write(name, "done", id=self.request.id)
    return name


kept = []


@shared_task(name="keeps")
@distributed_lock("other:{name}")
def keeps(name):
    """Leaves a lock behind that nobody gives up."""
    kept.append(lock(f"job:{name}", ttl=LONG))
    kept[-1].acquire()
    write(name, "run")


@shared_task(name="plain")
def plain(value=None, name=None):
    write(name, "plain", value=value)
    return value


@shared_task(name="compose")
def compose(how, name):
    """Starts a canvas whose middle is ``hold``."""
    follow = plain.s(name=name)
    {
        "chain": lambda: chain(plain.s("first", name=name), hold.si(name), follow),
        "group": lambda: group(hold.si(name), plain.si("beside", name=name)),
        "chord": lambda: chord([hold.si(name), plain.si("beside", name=name)], follow),
        "link": lambda: hold.s(name).set(link=follow),
        "chain of one that waits": lambda: chain(plain.s("first", name=name), retrying.si(name), follow),
    }[how]().apply_async()


@receiver(lock_busy)
def tell_busy(name, holder, **_):
    write(name.removeprefix("job:"), "busy", holder=holder and holder.label)


@receiver(lock_unavailable)
def tell_unavailable(name, error, lease, **_):
    write(name.removeprefix("job:"), "unavailable", runs=lease is not None)


@signals.after_task_publish.connect
def tell_requeue(headers, body, **_):
    if REQUEUES in headers:
        write(body[0][0], "requeue", id=headers["id"], eta=headers["eta"])


@receiver(lock_lost)
def tell_lost(name, reason, **_):
    write(name.removeprefix("job:"), "lost", reason=reason)


@signals.worker_ready.connect
def ready(sender, **_):
    write(sender.hostname, "ready")
