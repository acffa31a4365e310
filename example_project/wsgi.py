"""The application that gunicorn runs."""

import os

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

# Here Python serves the admin's style sheets; on a real site the web server does.
application = StaticFilesHandler(get_wsgi_application())
