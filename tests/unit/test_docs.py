"""What the documentation shows works: the Python blocks of each page run, in their order, on a real server.

Blocks marked ``python`` run in one namespace per page; fragments, such as settings, are marked ``py``.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import get_annotations
from types import ModuleType

import pytest

from django_distlock import AdoptedLease, Lease
from django_distlock.backends.base import KEYS
from django_distlock.backends.redis import RedisBackend, RedisClusterBackend
from django_distlock.celery.config import BEAT_KEYS
from django_distlock.options import OPTION_KEYS, Terms
from django_distlock.utils.other_words import OtherWord
from example_project.valkey import Valkey
from tests.support.programs import ROOT
from tests.support.tools import eventually

pytestmark = [pytest.mark.slow, pytest.mark.once]

PAGES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))]

FENCE = re.compile(r"^ *```(?P<language>\S*).*\n(?P<code>(?:.*\n)*?) *```$", re.MULTILINE)
LANGUAGES = {
    "python", "py", "sh", "console", "text", "html", "json",
    "{eval-rst}", "{toctree}", "{image}", "{figure}", "{literalinclude}",
}  # fmt: skip


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and code of each block; the code begins on its line of the page, so that tracebacks point there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (found["language"], "\n" * text.count("\n", 0, found.start("code")) + found["code"])
        for found in FENCE.finditer(text)
    ]


@pytest.mark.usefixtures("keep_connections")
@pytest.mark.parametrize("page", [page for page in PAGES if "python" in dict(blocks(page))])
def test_python_blocks_run(page: str, valkey_locks: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who pastes the page's blocks one after the other sees no error, and leaves no lock behind."""
    # A module of its own, because Celery names tasks by it, and dataclasses and pickle look it up.
    module = ModuleType("page_" + re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for language, code in blocks(page):
        if language == "python":
            exec(compile(code, ROOT / page, "exec"), vars(module))
    # What is released in the background takes a moment; min_hold outlives the release.
    eventually(lambda: all(info.resting for info in valkey_locks.held()))


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page: str) -> None:
    """A block whose mark is misspelt would never be run."""
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES)
def test_fragments_are_python(page: str) -> None:
    for language, code in blocks(page):
        if language == "py":
            compile(code, ROOT / page, "exec")


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_outside_of_the_documentation_lead_to_files(page: str) -> None:
    """Sphinx looks at the links of the others."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_settings_are_told_with_their_defaults() -> None:
    """What the page says is what the code does: no key or option is forgotten there, or told that does not exist."""
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", page, re.MULTILINE))
    terms = Terms().as_dict()
    assert {key for key in told if key.isupper()} - {*BEAT_KEYS} == set(KEYS)
    assert {option for option in told if option.islower()} <= {*RedisBackend.options, *RedisClusterBackend.options}
    assert {key: ast.literal_eval(told[key]) for key in OPTION_KEYS} == {key: terms[key.lower()] for key in OPTION_KEYS}
    options = {option: ast.literal_eval(told.get(option, "None")) for option in RedisBackend.options}
    assert options == RedisBackend.options


def test_sentences_on_settings_name_all_keys() -> None:
    """Those by which an alias sets options of ``lock()``, the others of these, and the keys that are checked."""
    page = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    [keys, options] = re.findall(r"^(`TTL`.*) are the defaults of the options ([^.]*)", page, re.MULTILINE)[0]
    assert re.findall(r"`(\w+)`", keys) == [*OPTION_KEYS]
    assert re.findall(r"`([a-z_]+)`", options) == [key.lower() for key in OPTION_KEYS]
    [without_key] = re.findall(r"^The other options of `lock\(\)` have no key here: ([^.]*)", page, re.MULTILINE)
    assert {*re.findall(r"`([a-z_]+)`", without_key)} == {*Terms().as_dict()} - {key.lower() for key in OPTION_KEYS}
    [checked] = re.findall(r"^\| a bad (.*) \| `… is not usable", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", checked) == [*OPTION_KEYS, "LONG_HELD", "RESPONSE_MAX_HOLD"]


# What the pages for maintainers name in the code, in backquotes
MAINTAINED = ["CONTRIBUTING.md", "docs/how.md", *(page for page in PAGES if page.startswith("docs/internals/"))]
PACKAGE = ROOT / "django_distlock"
PARTS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}


def quoted_in(page: str, pattern: str) -> Iterator[str]:
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (ROOT / page).read_text(encoding="utf-8")):
        if re.fullmatch(pattern, code):
            yield code


@pytest.mark.parametrize("page", MAINTAINED)
def test_files_that_pages_name_exist(page: str) -> None:
    """By their path in the repository, or within the package; ``file::name`` is a test or a helper of that file."""
    for code in quoted_in(page, r"[\w./*-]+\.(?:py|lua|toml|txt)(?:::\w+)*|(?:tests|docs|benchmarks)/[\w./-]+"):
        path, *names = code.split("::")
        files = [*PACKAGE.glob(path), *ROOT.glob(path)]
        assert files, f"{page} names {code}"
        text = files[0].read_text(encoding="utf-8") if names else ""
        assert all(re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.M) for name in names), code


@pytest.mark.parametrize("page", MAINTAINED)
def test_names_that_pages_give_exist(page: str) -> None:
    """``core.acquire.Acquisition`` is there in the package."""
    for code in quoted_in(page, r"(?:django_distlock\.)?(\w+)(?:\.\w+)+(?:\(\))?"):
        name = code.removeprefix("django_distlock.").removesuffix("()")
        if name.split(".")[0] in PARTS and not name.endswith((".py", ".lua")):
            pkgutil.resolve_name(f"django_distlock.{name}")


def test_each_guarantee_says_what_is_not_promised_and_links_what_holds_it() -> None:
    """A link says the name of a test, of its class or of a judge, or of the file; it leads to the file that has it."""
    page = ROOT / "docs/guarantees.md"
    parts = page.read_text(encoding="utf-8").split("\n\n")
    [[head, _, *rows]] = [part.splitlines() for part in parts if part.startswith("| fault |")]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["fault", "not promised", "promised", "held by"]
    for row in rows:
        fault, *told, holders = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        links = re.findall(r"\[`(\w+(?:\.py)?)`\]\(([\w./]+)\)", holders)
        assert all(told), fault
        assert links, fault
        assert ", ".join(f"[`{name}`]({target})" for name, target in links) == holders, fault
        for name, target in links:
            file = (page.parent / target).resolve()
            defined = re.findall(r"^ *(?:async )?(?:def|class) (\w+)", file.read_text(encoding="utf-8"), re.M)
            assert name in (file.name, *defined), fault


OTHERS_THAN_THREADS = {"distlock-check", "distlock-read"}  # a lock, and tasks of asyncio


def calls_of(maker: str) -> Iterator[ast.Call]:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if maker in text and path.parent.name != "testing":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(maker):
                    yield node


def test_threads_of_a_process_are_told() -> None:
    """Maintainers look up a name that they see in a dump of threads."""
    text = (ROOT / "docs/internals/overview.md").read_text(encoding="utf-8")
    table = text[text.index("### Threads") : text.index("### Sockets")]
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    begun = re.findall(r"(?:\bf|Worker\(|start_thread\()\"(distlock-[a-z]+)", source)
    assert set(re.findall(r"^\| `(distlock-[a-z]+)", table, re.M)) == {*begun} - OTHERS_THAN_THREADS
    assert all("name" in {keyword.arg for keyword in call.keywords} for call in calls_of("threading.Thread"))


INCLUDED = ("lock.lua", "retire.lua")  # in other scripts; they take no arguments of their own
SCRIPTS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.lua") if path.name not in INCLUDED)


def test_system_checks_are_told() -> None:
    """Each of them in the table of their page."""
    written: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        written.update(re.findall(r'"(distlock\.[EW]\d+)"', path.read_text(encoding="utf-8")))
    text = (ROOT / "docs/checks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(distlock\.[EW]\d+)`", text, re.M)) == sorted(written)


@pytest.mark.parametrize("page", PAGES)
def test_system_checks_that_pages_name_exist(page: str) -> None:
    told = re.findall(r"distlock\.[EW]\d+", (ROOT / page).read_text(encoding="utf-8"))
    assert {*told} <= {*re.findall(r"distlock\.[EW]\d+", (ROOT / "docs/checks.md").read_text(encoding="utf-8"))}


def as_message(node: ast.expr) -> str:
    """The text of a string in the source, with … for each part that is filled in; "" for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[-+.\d]*[a-z]", "…", text)
        case ast.JoinedStr(values=parts):
            return "".join(as_message(part) if isinstance(part, ast.Constant) else "…" for part in parts)
    return ""


@pytest.mark.seconds(4)
def test_messages_for_troubleshooting_exist() -> None:
    """A reader searches the page for a message; one that was reworded would not be found."""
    messages: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        messages += filter(None, (as_message(node) for node in ast.walk(tree) if isinstance(node, ast.expr)))
    all_messages = "\n".join(messages)
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        code
        for cell in re.findall(r"^\| (.*?)(?<!\\) \| ", page, re.MULTILINE)
        for code in re.findall(r"`([^`]+)`", cell)
        if re.match(r"[A-Za-z…@]\S* \S+ \S", code) and not code.startswith("python ")
    ]
    assert len(quoted) > 20
    patterns = {code: ".*".join(re.escape(part.strip()) for part in code.split("…")) for code in quoted}
    assert [code for code, pattern in patterns.items() if not re.search(pattern, all_messages)] == []


def test_events_for_troubleshooting_exist() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    told = {*re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page)} - {"min-replicas-to-write"}
    events = re.findall(r"^\| `([a-z0-9-]+)` \| [A-Z]+ \|", (ROOT / "docs/events.md").read_text(encoding="utf-8"), re.M)
    assert told
    assert told <= {*events}


def test_names_of_own_locks_are_told() -> None:
    """``django_distlock.done:…`` is made somewhere."""
    made = {ast.literal_eval(call.args[0]).partition(":")[0] for call in calls_of("own_name")}
    told: set[str] = set()
    for page in PAGES:
        told.update(re.findall(r"`django_distlock\.(\w[\w.]*):…`", (ROOT / page).read_text(encoding="utf-8")))
    assert told == made


@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_of_scripts_are_told(script: str) -> None:
    """Each of them in the table that follows the name of the script."""
    text = (ROOT / "docs/internals/protocol.md").read_text(encoding="utf-8")
    table = text.partition(f"`{script}`")[2].partition("| argument | content |\n")[2].partition("\n\n")[0]
    used = set(re.findall(r"ARGV\[(\d+)\]", (PACKAGE / script).read_text(encoding="utf-8")))
    assert used
    assert re.findall(r"^\| (\d+) \|", table, re.M) == sorted(used, key=int)


@pytest.mark.seconds(5)
def test_frames_of_a_free_lock_are_printed(valkey: Valkey) -> None:
    """From the handle to its release, on a real server; in a process of its own, which has nobody else's profiler."""
    command = [sys.executable, "-m", "benchmarks.frames", "--url", valkey.url]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    functions = [line.split()[0] for line in printed.splitlines() if line.strip()]
    way = ["Lock.__enter__", "RedisBackend.acquire", "Lock.__exit__", "RedisBackend.release"]
    assert [function for function in functions if function in way] == way


@pytest.mark.seconds(5)
def test_the_price_of_each_step_of_a_free_lock_is_printed() -> None:
    """The steps that are cut out are those of today. Here each is measured once, which tells no price."""
    program = "from benchmarks import ladder as l; l.WARM_UP = l.BATCH = l.ROUNDS = 1; l.main()"
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(r"µs  a pair; .*\n.*µs  the name is checked; .*\n", printed)


def test_a_lease_has_what_the_reference_tells_and_no_more() -> None:
    """What else it has begins with an underscore, and is used in core alone."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    [told] = re.findall(r"autoclass:: Lease\n((?:.+\n|\n(?=   ))*)", page)
    [members] = re.findall(r":members:((?:.*\n)+?)   :undoc", told)
    attributes = re.findall(r"attribute:: (\w+)", told)
    for lease_class in (Lease, AdoptedLease):
        others = {name for name, value in vars(Lease).items() if isinstance(value, OtherWord)}
        assert {*re.findall(r"\w+", members), *attributes} == {
            one for one in (*dir(lease_class), *get_annotations(Lease)) if one[0] != "_"
        } - others


def events_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Event and level of each record that a module logs."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in calls:
            methods = map(ast.unparse, [call.func, *call.args])  # by the method itself, or by a partial of it
            if level := next((found[1] for method in methods if (found := re.fullmatch(r"logger\.(\w+)", method))), ""):
                assert "extra" in {keyword.arg for keyword in call.keywords}, ast.unparse(call)
                told = [one for one in calls if re.search(r"about(_\w+)?$", ast.unparse(one.func))]
                before = [one for one in told if one.lineno <= (call.end_lineno or 0)]
                event = max(before, key=lambda one: one.lineno).args[0]
                yield ast.literal_eval(event), {"exception": "ERROR"}.get(level, level.upper())


@pytest.mark.seconds(3)
def test_events_of_the_log_are_told() -> None:
    """Each record names its event, which is in the tables with its level; and those have no others."""
    logged: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        if "logger." in (text := path.read_text(encoding="utf-8")):
            logged.update(events_of(ast.parse(text)))
    page = (ROOT / "docs/events.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([a-z0-9-]+)` \| ([A-Z]+) \|", page, re.M)
    assert len(told) == len(set(told))
    of_any_level = {event for event, level in logged if level == "LOG"}
    assert {event for event, _ in told if event in of_any_level} == of_any_level
    assert {one for one in told if one[0] not in of_any_level} == {one for one in logged if one[1] != "LOG"}
