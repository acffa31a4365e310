"""Helpers that know nothing of locks."""
