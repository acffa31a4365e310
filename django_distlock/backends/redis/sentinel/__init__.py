"""Connections to whichever server is the master, as sentinels tell."""
