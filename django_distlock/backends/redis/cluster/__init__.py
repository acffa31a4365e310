"""Locks on a Redis or Valkey Cluster: what ``OPTIONS={"cluster": True}`` puts in the place of one server."""
