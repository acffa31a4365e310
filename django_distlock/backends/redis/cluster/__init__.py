"""Locks on a Redis or Valkey Cluster: what is other there than on one server."""
