"""Locks on a Redis or Valkey Cluster: the differences to one server."""
