"""Tasks that are in the queue only once, for any queue. ``celery`` and ``django_tasks`` have the parts for theirs."""
