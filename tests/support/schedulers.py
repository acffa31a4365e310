"""Schedulers of beat that record what they send. They need Celery 5.7."""

from __future__ import annotations

from django_distlock.celery import beat
from tests.support.beats import Recording


class StockBeat(Recording):
    pass


class MemoryBeat(beat.MemoryScheduler, Recording):
    pass


class FileBeat(beat.DistlockScheduler, Recording):
    pass
