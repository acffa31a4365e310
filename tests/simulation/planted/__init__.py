"""Broken variants of the package that the simulation must find: old defects, and mutants made by a tool."""
