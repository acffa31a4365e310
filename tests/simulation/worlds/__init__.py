"""The worlds: which stores there are, what may befall them, and what they promise."""

from .base import World
from .cluster import ClusterWorld
from .lines import InterruptsWorld, ThreadsWorld
from .mariadb import MariaDBWorld
from .memory import MemoryWorld
from .postgresql import PostgresWorld
from .proxied import ProxiedWorld
from .quorum import QuorumWorld
from .redis import RedisWorld
from .sentinel import SentinelWorld
from .sqlite import SQLiteWorld

ALL: tuple[type[World], ...] = (
    MemoryWorld,
    RedisWorld,
    ThreadsWorld,
    InterruptsWorld,
    ProxiedWorld,
    SentinelWorld,
    QuorumWorld,
    ClusterWorld,
    PostgresWorld,
    MariaDBWorld,
    SQLiteWorld,
)
WORLDS = {world.name: world for world in ALL}
