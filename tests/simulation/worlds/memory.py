"""Local memory: one process with many threads and tasks."""

from __future__ import annotations

from typing import Any

from django_distlock import locks

from .base import World


class MemoryWorld(World):
    name = "memory"
    has_network = False
    operations = ("wait",)
    most_processes = 1

    def setting(self) -> dict[str, Any]:
        return {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}

    def is_locked(self, name: str) -> bool:
        return any(
            locks[alias].look([name]) != [None]
            for alias, process in self.simulation.processes.items()
            if process.is_alive
        )

    @property
    def may_repeat_numbers(self) -> bool:
        """What a process knew went with it."""
        return not all(process.is_alive for process in self.simulation.processes.values())
