"""Tasks of ``django.tasks`` that are in the queue only once. Needs Django 6."""

from django import VERSION

if VERSION < (6, 0):
    raise ImportError("django_distlock.django_tasks is for tasks of django.tasks, which came with Django 6.0.")

from ..exceptions import TaskAlreadyQueued
from ..unique.publishing import UniqueHolder
from .unique_tasks import UniqueTask, unique_task

__all__ = ["TaskAlreadyQueued", "UniqueHolder", "UniqueTask", "unique_task"]
