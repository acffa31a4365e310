"""A program: the example shop's manage.py. Who does not wait for a lock gets its answer on a busy machine, too."""

import runpy

from django_distlock.backends.common.timing import Timing

if __name__ == "__main__":
    Timing.shortest_call = 30.0
    runpy.run_path("example_project/manage.py", run_name="__main__")
