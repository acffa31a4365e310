"""The tool that plants changes: that its lists fit the code of today, and what it makes of what a simulation says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.planted.changes import MUTANTS, ROOT, WORLDS, Change, DoesNotApply, Hunk, listed, read, to_text
from tests.simulation.planted.make import SHARES, mutants
from tests.simulation.planted.operators import PythonEdits, lua_edits
from tests.simulation.planted.run import run_all

IN_NAMES = Hunk("names.py", "from __future__ import annotations\n", "from __future__ import annotations\nPLANTED = 1\n")
PLANTED = Change("memory/planted", ("memory",), (IN_NAMES,))

# As ``python -m tests.simulation``: finds something where the package has a change.
STUB = """
import json, sys
from django_distlock import names
planted = hasattr(names, "PLANTED")
findings = [{"seed": 7, "kind": "two holders", "events": ["a", "b", "c"]}] if planted else []
print("progress")
print(json.dumps({"runs": 5, "virtual_hours": 1.0, "findings": findings}))
sys.exit(1 if findings else 0)
"""


def applied(source, edit):
    return source[: edit.start] + edit.text + source[edit.end :]


def edited(source):
    never = re.compile("(?!)")
    return {applied(source, edit) for edit in PythonEdits(source, never, never).all()}


@pytest.mark.parametrize("change", listed(), ids=lambda change: change.name)
def test_a_change_fits_the_code(change):
    change.check()
    assert set(change.worlds) <= set(WORLDS)


def test_names_are_unique():
    assert max(Counter(change.name for change in listed()).values()) == 1


@pytest.fixture(scope="module")
def made():
    return mutants(1, {})


def test_the_same_seed_makes_the_same_mutants(made):
    assert mutants(1, {}) == made != mutants(2, {})


def test_mutants_that_are_marked_do_not_count(made):
    first = next(change for change in made if change.group == "sentinel")
    marked = mutants(1, {first.hunks: Change("", (), first.hunks, unseen="changes nothing")})
    assert next(change for change in marked if change.hunks == first.hunks).unseen == "changes nothing"
    assert len(marked) == len(made) + 1


def test_each_world_has_its_share_of_mutants():
    counted = Counter(change.group for change in read(MUTANTS) if not change.unseen)
    assert counted == {group: sum(share.number for share in shares) for group, shares in SHARES.items()}
    assert set(counted.values()) == {10}


def test_a_change_that_stands_there_twice_is_refused(tmp_path):
    (tmp_path / "django_distlock").mkdir()
    (tmp_path / "django_distlock" / "names.py").write_text(2 * IN_NAMES.before)
    with pytest.raises(DoesNotApply, match="2 times, not once"):
        PLANTED.check(tmp_path)


def test_a_process_imports_the_copy_and_the_tree_is_untouched():
    with PLANTED.environment() as environment:
        program = "import django_distlock.names as names, tests.simulation as s; print(names.PLANTED, s.__file__)"
        said = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert said.stdout.split() == ["1", str(ROOT / "tests/simulation/__init__.py")]
    assert "PLANTED" not in (ROOT / "django_distlock/names.py").read_text()


def test_a_list_is_read_as_it_was_written(tmp_path):
    change = Change("sql/x", ("sql",), (IN_NAMES, IN_NAMES), 'a "rule"', "tests/x.py::test_x", "because \\", 7)
    (tmp_path / "list.toml").write_text(to_text([change]))
    assert read(tmp_path / "list.toml") == [change]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a < b:\n        return 1", {"if not (a < b):\n        return 1", "if a <= b:\n        return 1",
                                        "if a > b:\n        return 1", "if a < b:\n        return 0"}),
        ("x = a and b or True", {"x = ((a and b) and True)", "x = (a or b) or True", "x = a and b or False"}),
        ("self.x = min(a, b)", {"pass", "self.x = max(a, b)"}),
        ("a.do(b, c=d)", {"pass", "a.do(b)"}),
        ("raise Wrong('a' + 'b', 1)", {"pass", "raise Wrong(('a' - 'b'), 1)", "raise Wrong('a' + 'b', 0)"}),
        ("try:\n        x\n    finally:\n        y", {"try:\n        x\n    finally:\n        pass"}),
        ("try:\n        x\n    except E:\n        y", {"try:\n        x\n    except E:\n        raise"}),
    ],
    ids=["if", "and-or", "assignment", "call", "raise", "finally", "except"],
)  # fmt: skip
def test_mistakes_in_python(source, expected):
    function = f"def f():\n    {source}\n"
    assert edited(function) == {f"def f():\n    {text}\n" for text in expected}


def test_a_function_without_a_result_may_return_early():
    assert "def f() -> None:\n    a\n    return\n    b\n" in edited("def f() -> None:\n    a\n    b\n")


def test_mistakes_in_lua():
    source = "if a == 1 then redis.call('DEL', KEY) end -- 1 == 1\n"
    assert {applied(source, edit) for edit in lua_edits(source)} == {
        "if not (a == 1) then redis.call('DEL', KEY) end -- 1 == 1\n",
        "if a ~= 1 then redis.call('DEL', KEY) end -- 1 == 1\n",
        "if a == 0 then redis.call('DEL', KEY) end -- 1 == 1\n",
        "if a == 1 then  end -- 1 == 1\n",
    }


def run(change, program, tmp_path, minutes=1, **options):
    said = []
    stub = tmp_path / "stub.py"
    stub.write_text(program)
    shares = run_all([change], seed=1, minutes=minutes, jobs=1, simulate=(str(stub),), report=said.append, **options)
    return shares, said


def test_what_the_simulation_finds_is_told(tmp_path):
    shares, said = run(PLANTED, STUB, tmp_path)
    assert shares == {"memory": 1.0}
    assert "| memory/planted | memory | found | 5 |" in said[0]
    assert said[0].endswith("| 3 | two holders (seed 7) |")
    assert said[-1] == "memory: 1 of 1 found"


def test_what_it_does_not_find_is_told(tmp_path):
    changes_nothing = Change("memory/nothing", ("memory", "redis"), (Hunk("names.py", *2 * (IN_NAMES.before,)),))
    shares, said = run(changes_nothing, STUB, tmp_path)
    assert shares == {"memory": 0.0}
    assert "| memory/nothing | redis | not found | 10 |" in said[0]  # runs of both worlds


def test_a_simulation_that_is_broken_finds_nothing(tmp_path):
    shares, said = run(PLANTED, "raise SystemExit('no such world')", tmp_path)
    assert shares == {"memory": 0.0}
    assert "| failed |" in said[0]
    assert "status 1: no such world" in said[0]


def test_what_is_found_in_the_unchanged_package_too_proves_nothing(tmp_path):
    shares, said = run(PLANTED, STUB.replace("if planted else []", ""), tmp_path, minutes=0.01)
    assert shares == {"memory": 0.0}
    assert "| found without it |" in said[0]


def test_known_results_are_not_made_again(tmp_path):
    results = tmp_path / "results.jsonl"
    first, _ = run(PLANTED, STUB, tmp_path, results=results)
    again, said = run(PLANTED, "raise SystemExit('again')", tmp_path, results=results)
    assert first == again == {"memory": 1.0}
    assert said[0] == f"1 of 1 are known from {results}"
    assert len(results.read_text().splitlines()) == 1
    assert json.loads(results.read_text())["events"] == 3
