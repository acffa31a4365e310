"""The whole package in a seeded world (see docs/internals/simulation.md)."""
