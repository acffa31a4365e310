"""What is locked now, for the admin and the commands."""
