"""What gunicorn runs."""

import os

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

# The admin's style sheets come from Python here; a real site leaves them to its web server.
application = StaticFilesHandler(get_wsgi_application())
