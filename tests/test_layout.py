"""The structure of the package: imports point one way, and drivers are imported by their backend alone."""

from __future__ import annotations

import ast
from pathlib import Path

import django_distlock

ROOT = Path(django_distlock.__file__).parent

# A module imports only from modules above it.
ORDER = [
    "forks", "exceptions", "texts", "names", "stamps", "terms", "detached", "bells", "abreast", "findings", "tickets",
    "workers", "signals", "models",
    "backends.probing", "backends.base", "backends.loops", "backends.permits", "backends.locmem", "backends.dummy",
    "backends.redis.keys", "backends.redis.leases", "backends.redis.connections", "backends.redis.errors",
    "backends.redis.location", "backends.redis.health", "backends.redis.commands", "backends.redis.timeouts",
    "backends.redis.wire",
    "backends.redis.sentinels",
    "backends.redis.masters", "backends.redis.topology", "backends.redis.checkup", "backends.redis.listing",
    "backends.redis.listener",
    "backends.redis.cluster", "backends.redis.cluster.slots", "backends.redis.cluster.routing",
    "backends.redis.cluster.wire", "backends.redis.cluster.listener", "backends.redis.cluster.checkup",
    "backends.redis.parts", "backends.redis.cluster.parts",
    "backends.redis.backend",
    "backends.redis",
    "backends.redlock.asking", "backends.redlock.listing", "backends.redlock.quorum", "backends.redlock.rounds",
    "backends.redlock.lineup", "backends.redlock.nodes", "backends.redlock.tasks", "backends.redlock.findings",
    "backends.redlock.settings", "backends.redlock.backend",
    "backends.redlock",
    "backends.database.files", "backends.database.errors",
    "backends.database.rows", "backends.database.pruning", "backends.database.statements", "backends.database.quick",
    "backends.database.steps", "backends.database.runs",
    "backends.database.watchdog", "backends.database.forks",
    "backends.database.opening", "backends.database.wrappers",
    "backends.database.looks", "backends.database.connections", "backends.database.listener",
    "backends.database.calls", "backends.database.location",
    "backends.database.checks", "backends.database.backend", "backends.database",
    "backends",
    "leases", "lines", "cleaning", "renewal", "handlers", "options", "waiting", "transactions", "entries", "attempts",
    "locking",
    "handover", "assertions",
    "background", "calls", "requests", "responses", "guarding", "decorators", "", "middleware",
    "runs", "capabilities", "inventory", "snapshots", "tables", "reports", "checks", "apps", "pages", "admin",
    "migrations", "migrations.0001_initial",
    "management", "management.commands", "management.commands.locks", "management.commands.runlocked",
    "celery", "celery.stopping", "celery.beat", "celery.database", "celery.messages", "celery.tasks",
    "testing", "testing.tools", "testing.contract", "testing.plugin",
]  # fmt: skip

DRIVERS = {
    "redis": ("backends.redis", "backends.redlock"), "django_redis": "backends.redis", "psycopg": "backends",
    "celery": "celery", "kombu": "celery", "django_celery_beat": "celery", "pytest": "testing",
}  # fmt: skip


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def runtime_imports(name: str, tree: ast.Module) -> list[str]:
    """Absolute names of what a module imports, except for type checkers."""
    imported = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += absolute(name, node)
        pending += ast.iter_child_nodes(node)
    return imported


def absolute(name: str, node: ast.ImportFrom) -> list[str]:
    if not node.level:
        return [node.module or ""]
    is_package = (ROOT / Path(*name.split(".")) / "__init__.py").exists() if name else True
    parts = name.split(".") if name else []
    parents = parts[: len(parts) - node.level + is_package]
    if node.module:
        return [".".join(["django_distlock", *parents, node.module])]
    return [".".join(["django_distlock", *parents, alias.name]) for alias in node.names]


def test_every_module_has_its_place():
    assert sorted(modules()) == sorted(ORDER)


def test_imports_point_upward():
    for name, tree in modules().items():
        for imported in runtime_imports(name, tree):
            if imported.startswith("django_distlock"):
                target = imported.removeprefix("django_distlock").removeprefix(".")
                assert ORDER.index(target) < ORDER.index(name), f"{name or 'the package'} imports {target}"


def test_drivers_are_imported_by_their_backend_alone():
    for name, tree in modules().items():
        for imported in runtime_imports(name, tree):
            home = DRIVERS.get(imported.split(".")[0])
            assert home is None or name.startswith(home), f"{name} imports {imported}"


def test_only_two_modules_know_http():
    for name, tree in modules().items():
        if name not in ("requests", "responses"):
            assert not any(imported.startswith("django.http") for imported in runtime_imports(name, tree)), name
