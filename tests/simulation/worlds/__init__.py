"""The worlds: which stores there are, what may befall them, and what they promise."""

from .base import World
from .memory import MemoryWorld
from .redis import RedisWorld

WORLDS: dict[str, type[World]] = {world.name: world for world in (MemoryWorld, RedisWorld)}
