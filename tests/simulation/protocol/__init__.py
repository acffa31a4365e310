"""The Redis protocol under faults: our Lua and our rules of waiting, on a toy store with a clock of its own.

The same seed gives the same run, so a failure can be read in its trace. DISTLOCK_SIMULATION_RUNS asks for
more runs per profile than the default.
"""
