"""What INFO tells: the lines that anybody reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .redis_server import Server

VERSION = "9.1.2"
MODULES = [{"name": "lua", "ver": 1, "path": "lua", "args": []}]


def text_of(server: Server, sections: Sequence[str]) -> str:
    """All sections, or those of these names."""
    wanted = set(sections) - {"all", "default", "everything"}
    texts = [
        f"# {name}\r\n" + "".join(f"{key}:{value}\r\n" for key, value in lines.items())
        for name, lines in _sections(server).items()
        if not wanted or name.lower() in wanted
    ]
    return "\r\n".join(texts)


def _sections(server: Server) -> dict[str, dict[str, object]]:
    return {
        "Server": {
            "redis_version": "7.2.4",
            "server_name": "valkey",
            "valkey_version": VERSION,
            "server_mode": server.mode,
            "tcp_port": server.address[1],
            "uptime_in_seconds": int(server.scheduler.now - server.started_at),
        },
        "Clients": {"connected_clients": len(server.sessions), "maxclients": server.maxclients},
        "Memory": {
            "used_memory": server.store.used_memory,
            "maxmemory": server.maxmemory,
            "maxmemory_policy": "noeviction",
        },
        "Persistence": {"loading": int("LOADING" in server.states), "aof_enabled": 0},
        "Replication": server.about_replication(),
        "Cluster": {"cluster_enabled": int(server.mode == "cluster")},
    }
