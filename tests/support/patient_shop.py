"""The example shop's settings. Who does not wait for a lock gets an answer from a store on a busy machine, too."""

from django_distlock.backends.common.timing import Timing
from example_project.settings import *  # noqa: F403

Timing.shortest_call = 30.0
