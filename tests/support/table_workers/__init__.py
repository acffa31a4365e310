"""Workers of django-tasks-db, and programs that queue tasks for them."""
