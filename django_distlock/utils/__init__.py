"""Helpers that know nothing about locks."""
