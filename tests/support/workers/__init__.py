"""Celery workers as processes, for the tests of tasks: see harness.py."""
