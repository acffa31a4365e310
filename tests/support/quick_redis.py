"""redis-py reads the metadata of its package for each client and connection: a millisecond of the processor."""

from functools import cache

from redis import utils

utils.get_lib_version = cache(utils.get_lib_version)
