"""The tests of a module are found by its name, and the module by that of its tests.

Those of ``django_distlock/core/lease.py`` are ``tests/core/test_lease.py`` and ``tests/core/test_lease_*.py``. For the
modules at the top of the package the folder is ``tests/unit``, for a package itself it is its own folder. A part of a
store without tests of its own is tested through the store: by ``test_backend.py`` and ``test_backend_*.py`` beside.
"""

from __future__ import annotations

from pathlib import Path

import django_distlock

ROOT = Path(django_distlock.__file__).parent
TESTS = ROOT.parent / "tests"

FOLDERS = {
    "": "unit",
    "admin": "monitoring",  # it stands where Django looks for it; beside its parts it is tested
    "fencing": "fencing",  # on databases with tables of its own
}

THROUGH_OTHERS = [
    # modules without tests of their own | the tests that go through them | why
    ("apps", "unit/test_checks", "it connects the checks"),
    (
        "backends.base backends.locmem backends.optional backends.twins",
        "backends/contract/test_contract",
        "it is the contract's text",
    ),
    ("backends.common.attempts", "backends/redis/test_client", "a policy shows where commands are sent"),
    ("backends.common.backoff", "backends/redis/test_backend", "a pause shows where something fails"),
    (
        "backends.common.per_loop backends.common.permits",
        "backends/redis/test_backend",
        "what it limits are connections",
    ),
    ("backends.common.selftest", "management/commands/test_locks", "locks check runs it"),
    ("backends.common.timing backends.dummy core.service options", "core/test_registry", "what settings lead to"),
    ("celery.broker", "celery/test_beat_resending", "it shows in what a beat claims"),
    ("celery.run_now", "management/commands/test_beat_runs", "the command sends it"),
    ("monitoring.admin_runs", "monitoring/test_admin_beat", "actions of its page"),
    ("celery.config", "celery/test_schedule_store", "the setting is that of the runs"),
    ("celery.deferred_signals", "processes/test_fleet", "signals go to processes"),
    ("celery.countdowns", "celery/test_requeue", "they are what a task is sent again with"),
    ("celery.messages message_ids", "celery/test_tasks_copies", "the copies of a message have its id"),
    (
        "celery.unique_runs core.succession unique.options unique.publishing unique.queued unique.runs",
        "celery/test_unique_tasks",
        "a lease of a message becomes that of a run",
    ),
    ("django_tasks.queues", "django_tasks/test_unique_tasks", "what unique tasks need of a backend"),
    ("core.busy", "core/test_lock", "what errors and signals tell of a busy lock"),
    ("core.dropped", "core/test_lock", "handles go away"),
    ("core.known_leases", "core/test_renewal", "the renewer knows them"),
    ("core.own_leases", "core/test_lock_slots", "which of several leases is entered again"),
    ("core.detached", "core/test_adoption", "a text is written to be adopted"),
    ("decorators.key", "decorators/test_decorators", "names are seen by what is locked"),
    ("decorators.task_context", "celery/test_tasks_rules", "tasks are Celery's and Django's"),
    ("exceptions signals types", "core/test_lock", "words, which say something where they are used"),
    ("version", "backends/redis/test_backend", "connections tell it"),
    ("grants", "core/test_handed_lease", "leases are made of them"),
    ("formats", "backends/redis/test_codec_formats", "one number, and what follows from a newer one"),
    ("middleware", "decorators/test_answers", "it gives the decorator's answers"),
    ("models", "monitoring/test_admin", "the admin shows them"),
    (
        "monitoring.admin_filters monitoring.admin_pages monitoring.admin_querysets monitoring.admin_texts",
        "monitoring/test_admin",
        "parts of its pages",
    ),
    ("monitoring.diagnostics monitoring.formatting", "management/commands/test_locks", "what the command prints"),
    ("management.translated", "unit/test_translations", "it is one of those who speak"),
    ("management.actions", "management/commands/test_locks", "actions are of the command"),
    ("monitoring.explain management.moments", "management/commands/test_locks_explain", "what the command prints"),
    ("backends.database.journal journal", "backends/contract/test_journal", "each store has one"),
    ("monitoring.series", "contrib/test_opentelemetry", "labels are of metrics"),
    (
        "testing.contract testing.exchange_contract testing.plugin testing.runs_contract testing.tools",
        "testing/test_testing",
        "one kit",
    ),
    ("testing.slots_contract", "testing/test_testing", "part of the kit"),
    ("testing.waiters_contract", "testing/test_testing", "of the same kit"),
    ("utils.clock", "unit/test_platforms", "each system has its own clocks"),
    ("utils.drive utils.wakeup", "core/test_acquire", "waiting is made of them"),
    ("utils.events", "core/test_events", "records are of locks"),
    ("utils.other_words", "core/test_lock", "its users have a handle or a lease in hand"),
]

OF_MANY_MODULES = {
    # tests, or a folder of them: what they are of
    "backends/contract": "the contract, on every store",
    "monitoring/test_secrets": "passwords, wherever something is shown",
    "processes": "whole programs, and those who judge what they noted",
    "simulation": "the whole package in seeded worlds, the models of servers, planted changes",
    "unit/test_distribution": "what is packed",
    "unit/test_docs": "the pages",
    "unit/test_forked_run": "a run of tests in several processes",
    "unit/test_forkserver": "programs that tests fork",
    "unit/test_interrupts": "exceptions at each point of the package",
    "unit/test_imports": "what a process loads",
    "unit/test_layout": "the structure of the package",
    "unit/test_platforms": "other systems",
    "unit/test_private_names": "the tests",
    "unit/test_private_names_of_others": "what the package uses of others",
    "unit/test_replaced_names": "the words of the code",
    "unit/test_requirements": "the end of a run of tests",
    "unit/test_translations": "what people read in other languages, wherever it is said",
    "unit/test_tutorial": "a page, and who follows it",
    "unit/test_typing": "the types that users see",
    "unit/test_where_tests_are": "the tests",
}

MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in ROOT.rglob("*.py")}
TEST_MODULES = {path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py")}
ELSEWHERE = {module: tests for modules, tests, _ in THROUGH_OTHERS for module in modules.split()}


def name_for(module: str) -> str:
    """Of the module that has all tests of ``module``; those that have a part of them begin with it."""
    parts = module.removesuffix(".__init__").split(".")
    folder = "/".join(parts if module.endswith(".__init__") else parts[:-1])
    return f"{FOLDERS.get(module) or FOLDERS.get(folder) or folder}/test_{parts[-1]}"


def found_by_name(module: str) -> set[str]:
    name = name_for(module)
    return {tests for tests in TEST_MODULES if tests == name or tests.startswith(f"{name}_")}


def found_by_store(module: str) -> set[str]:
    folder, _, _ = module.rpartition(".")
    return found_by_name(f"{folder}.backend") if folder.startswith("backends.") else set()


def found_for(module: str) -> set[str]:
    through = ELSEWHERE.get(module, "")
    by_list = {tests for tests in TEST_MODULES if through and (tests == through or tests.startswith(f"{through}_"))}
    return found_by_name(module) | found_by_store(module) | by_list


def is_in(tests: str, name: str) -> bool:
    """``name``: of tests, or of a folder of them."""
    return tests == name or tests.startswith(f"{name}/")
