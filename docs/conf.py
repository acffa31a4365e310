"""How Sphinx builds these pages: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django_distlock"],
    DISTRIBUTED_LOCKS={"default": {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}},
)
django.setup()

import django_distlock  # noqa: E402 - needs the settings

project = "django-distlock"
author = "The django-distlock authors"
project_copyright = "the django-distlock authors"
version = release = django_distlock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {version}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"  # leases and locks are made by lock(), not by their classes
autodoc_default_options = {"exclude-members": "__init__, __new__"}
