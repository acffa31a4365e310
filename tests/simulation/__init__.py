"""The whole package in a simulated world, from one seed: its stores, its network, its threads, and what befalls them.

The same seed gives the same run, so a failure can be repeated and read in its trace. See ``python -m tests.simulation
--help``.
"""
