"""The app for INSTALLED_APPS."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"
