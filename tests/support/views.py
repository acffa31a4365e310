"""What views of projects are wrapped in."""

from __future__ import annotations

import functools


def logged(view):
    """A decorator of somebody else's, between a view and its lock."""

    @functools.wraps(view)
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper
