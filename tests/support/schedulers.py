"""Schedulers of beat that record what they send. They need Celery 5.7."""

from __future__ import annotations

from celery.beat import Scheduler

from django_distlock.celery import beat
from tests.support.beats import Recording


class StockBeat(Recording, Scheduler):
    pass


class MemoryBeat(Recording, beat.MemoryScheduler):
    pass


class FileBeat(Recording, beat.DistlockScheduler):
    pass
