"""Tasks that are in the queue once, whatever queue that is. ``celery`` and ``django_tasks`` have
what their messages need."""
