"""Each module of the package has tests where they are looked for, and each test module is found from one."""

from __future__ import annotations

from tests.support.where_tests_are import (
    ELSEWHERE,
    MODULES,
    OF_MANY_MODULES,
    TEST_MODULES,
    THROUGH_OTHERS,
    found_by_name,
    found_for,
    is_in,
    name_for,
)


def test_each_module_has_tests():
    for module in MODULES:
        defines_nothing = module.startswith("migrations.") or module.endswith("__init__")
        if not (found_for(module) or defines_nothing):
            raise AssertionError(f"where is {name_for(module)}.py?")


def test_all_tests_are_of_a_module():
    by_name = {tests for module in MODULES for tests in found_by_name(module)}
    by_list = {tests for tests in TEST_MODULES if any(is_in(tests, name) for name in OF_MANY_MODULES)}
    assert by_name | by_list == TEST_MODULES
    assert not by_name & by_list


def test_what_is_listed_is_there_and_found_no_other_way():
    for module, tests in ELSEWHERE.items():
        assert module in MODULES
        assert tests in TEST_MODULES
        assert not found_by_name(module), module
    assert len(ELSEWHERE) == sum(len(modules.split()) for modules, _, _ in THROUGH_OTHERS)
    for name in OF_MANY_MODULES:
        assert any(is_in(tests, name) for tests in TEST_MODULES), name
