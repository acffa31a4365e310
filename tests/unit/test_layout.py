"""The structure of the package: who may import whom."""

from __future__ import annotations

import ast
import dis
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

import django_distlock

PACKAGE = "django_distlock"
ROOT = Path(django_distlock.__file__).parent

# From top to bottom. A module imports from its own layer and from those below; what a layer holds is told by the
# beginning of a module's name within the package, of which the longest counts.
LAYERS = {
    "adapters": [
        "apps",
        "admin",
        "management",
        "celery",
        "contrib",
        "fencing",
        "middleware",
        "checks",
        "testing",
        "unique",
        "migrations",
    ],
    "the package": [""],
    "decorators": ["decorators"],
    "monitoring and tasks": [
        "monitoring",
        "celery.config",
        "celery.run_now",
        "celery.schedule_store",
        "celery.scheduled",
        "celery.messages",
        "celery.countdowns",
        "celery.requeue",
        "celery.tasks",
    ],
    "core": ["core"],
    "stores": [
        "backends.locmem",
        "backends.dummy",
        "backends.redis",
        "backends.redlock",
        "backends.database",
        "backends.zookeeper",
    ],
    "contract": ["backends.base", "backends.optional", "backends.twins", "backends"],
    "helpers of stores": ["backends.common"],
    "vocabulary": [
        "version",
        "formats",
        "types",
        "grants",
        "runs",
        "journal",
        "options",
        "names",
        "message_ids",
        "exceptions",
        "signals",
        "models",
    ],
    "utils": ["utils"],
}
STORES = LAYERS["stores"]

DRIVERS = {
    "redis": ("backends.redis", "backends.redlock"), "django_redis": "backends.redis", "psycopg": "backends.database",
    "opentelemetry": "contrib.opentelemetry", "health_check": "contrib.health",
    "kazoo": "backends.zookeeper",
    "django_tasks_db": "django_tasks",
    "celery": "celery", "kombu": "celery", "django_celery_beat": "celery", "pytest": "testing",
}  # fmt: skip


# With loops inside of such blocks: they run in threads of their own, where no signal is handled, or there is nothing to
# end.
ENDED_ANYHOW = {
    "Watchdog._end_late",
    "Renewer._renew_due",
    "Client._close_old",
    "WakeupListener.steps",
}


def files() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = files()


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def absolute(name: str, node: ast.ImportFrom) -> str:
    """The module that a relative import names, within the package."""
    is_package = (ROOT / Path(*name.split(".")) / "__init__.py").exists() if name else True
    parts = name.split(".") if name else []
    parents = parts[: len(parts) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


@cache
def imports(name: str) -> list[str]:
    """Absolute names of all that a module imports: for annotations and inside of functions, too."""
    return [*_imported(name)]


def _imported(name: str) -> Iterator[str]:
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            base = absolute(name, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                yield f"{PACKAGE}.{inner if inner in MODULES else base}".rstrip(".")


@cache
def own_imports(name: str) -> set[str]:
    """Those from the package, by their names within it."""
    return {
        imported.removeprefix(PACKAGE).removeprefix(".")
        for imported in imports(name)
        if imported == PACKAGE or imported.startswith(f"{PACKAGE}.")
    }


def layer_of(name: str) -> str:
    def length(begin: str) -> int:
        return len(begin) if name == begin or name.startswith(f"{begin}.") else -1

    return max(LAYERS, key=lambda layer: max(map(length, LAYERS[layer])))


def store_of(name: str) -> str | None:
    return next((store for store in STORES if name == store or name.startswith(f"{store}.")), None)


def test_imports_point_down():
    order = list(LAYERS)
    pairs = [(name, imported) for name in MODULES for imported in own_imports(name)]
    up = [(name, it) for name, it in pairs if order.index(layer_of(it)) < order.index(layer_of(name))]
    assert not up, "the first imports the second"


def test_the_core_knows_the_contract_and_no_store():
    for name in MODULES:
        if layer_of(name) in ("adapters", "the package", "decorators", "monitoring", "core"):
            assert not [imported for imported in own_imports(name) if store_of(imported)], name


def test_stores_do_not_know_each_other():
    for name in MODULES:
        allowed = {store_of(name), *(["backends.redis"] if store_of(name) == "backends.redlock" else [])}
        if store_of(name):
            strange = [i for i in own_imports(name) if store_of(i) and store_of(i) not in allowed]
            assert not strange, f"{name} imports {strange}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: own_imports(name) - {name} for name in MODULES}
    # What imports nothing that is left is taken away, until only circles and what leads to them is left.
    while free := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in free:
            del graph[name]
    while free := [name for name in graph if not any(name in imported for imported in graph.values())]:
        for name in free:
            del graph[name]
    assert not graph, {name: sorted(imported & graph.keys()) for name, imported in graph.items()}


def test_drivers_are_imported_by_their_backend_alone():
    for name in MODULES:
        for imported in imports(name):
            home = DRIVERS.get(imported.split(".")[0])
            assert home is None or name.startswith(home), f"{name} imports {imported}"


def test_one_module_knows_http():
    """Beside the pages of the admin, which Django calls with requests."""
    pages = {"admin", "monitoring.admin_pages", "monitoring.admin_runs"}
    knowing = {name for name in MODULES if any(imported.startswith("django.http") for imported in imports(name))}
    assert knowing == {*pages, "contrib.health", "decorators.answers", "decorators.http"}


def test_clocks_sleep_and_threads_come_from_one_place():
    """Which a simulated world can replace. Those who ask are the package, not its testing kit."""
    forbidden = {"time": {"time", "time_ns", "monotonic", "perf_counter", "sleep"}}
    forbidden["threading"] = {"Thread", "Timer", "RLock"}
    for name in MODULES:
        if name in ("utils.clock", "utils.threads", "utils.guards") or (
            layer_of(name) == "adapters" and name.startswith("testing")
        ):
            continue
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not forbidden.get(node.module or "", set()) & {alias.name for alias in node.names}, name
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                assert not (isinstance(of, ast.Name) and node.func.attr in forbidden.get(of.id, ())), (
                    f"{name}:{node.lineno}"
                )


def test_conditions_have_a_guard_which_is_entered():
    """An exception that a handler of a signal raises inside of the code of a Condition leaves it locked."""
    conditions, entered = set(), set()
    for name in MODULES:
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.With):
                entered |= {ast.unparse(item.context_expr) for item in node.items}
            elif isinstance(node, ast.Assign) and "Condition(" in ast.unparse(node.value):
                assert ast.unparse(node.value) == "threading.Condition(self._guard)", name
                conditions |= set(map(ast.unparse, node.targets))
    assert conditions
    assert "self._guard" in entered
    assert not conditions & entered


def test_no_module_is_long():
    """One idea has room in 450 lines."""
    long = {path.name: lines for path in ROOT.rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450}
    assert not long


TESTS = ROOT.parent / "tests"


def test_tests_lie_in_folders():
    """By what they are of; helpers are in ``support``."""
    assert not [*TESTS.glob("test_*.py")]
    assert not [path.name for path in (TESTS / "support").rglob("test_*.py")]
    assert {path.name for path in TESTS.glob("*.py")} == {"__init__.py", "conftest.py", "settings.py", "urls.py"}
    assert not [path for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]


def test_nobody_imports_a_test_module():
    """What tests share is in ``support``; pytest itself loads a conftest."""
    test_module = re.compile(r"tests(\.\w+)*\.(test_\w+|conftest)(\.\w+)*")
    looks_like_it = re.compile(r"^ *(?:from|import)\b[^\n(]*(?:\([^)]*)?\b(?:test_|conftest)", re.MULTILINE)
    for path in (*TESTS.rglob("*.py"), *TESTS.parent.glob("benchmarks/*.py")):
        text = path.read_text()
        if looks_like_it.search(text):  # to parse all takes seconds
            package = path.relative_to(TESTS.parent).parent.parts
            assert not [name for name in imported_by(ast.parse(text), package) if test_module.fullmatch(name)], path


def imported_by(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Absolute names, each name that is imported from a module among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join(filter(None, [*parents, node.module, alias.name])) for alias in node.names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _with_an_end(module: ast.Module) -> Iterator[range]:
    """The lines of each block that something must end, whatever is raised in it."""
    for node in ast.walk(module):
        if isinstance(node, ast.With) or (isinstance(node, ast.Try) and (node.finalbody or _meets_all(node))):
            yield range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)


def _meets_all(node: ast.Try) -> bool:
    return any(isinstance(each.type, ast.Name) and each.type.id == "BaseException" for each in node.handlers)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="what CPython compiles tells the line of a jump from 3.13 on")
def test_what_a_handler_of_a_signal_raises_ends_what_it_interrupts():
    """CPython before 3.15 does not, where a round of a loop ends at a condition: such loops are kept out of "with"."""
    found = set()
    for file in sorted(ROOT.rglob("*.py")):
        source = file.read_text()
        blocks = list(_with_an_end(ast.parse(source)))
        for code in _codes(compile(source, str(file), "exec")):
            covered = dis._parse_exception_table(code)
            for step in dis.get_instructions(code):
                if step.opname != "JUMP_BACKWARD" or any(each.start <= step.offset < each.end for each in covered):
                    continue
                if code.co_name != "<genexpr>" and any(step.positions.lineno in block for block in blocks):
                    found.add(code.co_qualname)
    assert found - ENDED_ANYHOW == set()
