"""Random numbers for pauses and orders that shall differ between callers and processes."""

from __future__ import annotations

import os
from random import Random

from . import fork

# Its own, and not that of the module random: an application that seeds that one wants to get the same numbers again, of
# which background threads must take none; and all processes that seed it alike would come back at the same moments.
chance = Random()


def _begin_anew() -> None:
    chance.seed(os.urandom(16))


fork.in_child(_begin_anew)  # else all children of a process would draw the same numbers
