"""Shows which locks are held now, for the admin and the commands."""
