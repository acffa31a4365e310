"""The app as INSTALLED_APPS names it."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"
