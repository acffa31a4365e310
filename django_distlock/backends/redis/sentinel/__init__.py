"""Connections to whichever server is the master, as the sentinels say."""
