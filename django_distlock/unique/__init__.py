"""Tasks that are in the queue once, whatever queue that is. ``celery`` has what its messages add."""
