"""Beats and workers as processes, for the tests of beat: see harness.py."""
