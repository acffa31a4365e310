"""What needs Celery."""
