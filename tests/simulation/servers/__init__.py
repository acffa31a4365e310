"""Models of Redis: one server, replication with sentinels, and a Cluster."""
