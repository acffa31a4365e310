"""Changes of the package's text: where they are listed, and how a copy of the package gets one."""

from __future__ import annotations

import hashlib
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[3]
PACKAGE = "django_distlock"
LISTS = Path(__file__).parent
MUTANTS = LISTS / "mutants.toml"
PROTOCOL = LISTS / "protocol.toml"

WORLDS = (
    "memory", "redis", "threads", "interrupts", "proxied", "sentinel", "quorum", "cluster", "postgresql", "mariadb",
)  # fmt: skip


class DoesNotApply(Exception):
    """The text to change does not stand in its file exactly once."""


@dataclass(frozen=True)
class Hunk:
    """Whole lines of a file of the package, and what stands there instead."""

    file: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        if source.count(self.before) != 1:
            raise DoesNotApply(f"{self.file} has {source.count(self.before)} times, not once:\n{self.before}")
        return source.replace(self.before, self.after)


@dataclass(frozen=True)
class Change:
    """``rule``: what it breaks. ``test``: one of the suite that fails with it. ``worlds``: those that can show it,
    tried in this order. ``unseen``: why none of them does, such as that nothing changes that can be observed.
    ``seed``: with which one did, where the suite begins to look."""

    name: str
    worlds: tuple[str, ...]
    hunks: tuple[Hunk, ...]
    rule: str = ""
    test: str = ""
    unseen: str = ""
    seed: int = 1

    @property
    def group(self) -> str:
        """The world that must find its share: the first part of the name."""
        return self.name.partition("/")[0]

    @property
    def digest(self) -> str:
        """Of what is changed: tells results of today from those of another text."""
        return hashlib.sha1(repr(self.hunks).encode()).hexdigest()[:12]

    def check(self, root: Path = ROOT) -> None:
        """Raises DoesNotApply."""
        self._texts(root)

    def _texts(self, root: Path) -> dict[Path, str]:
        texts: dict[Path, str] = {}
        for hunk in self.hunks:
            path = root / PACKAGE / hunk.file
            source = texts[path] if path in texts else path.read_text()
            texts[path] = hunk.applied(source)
        for path, text in texts.items():
            if path.suffix == ".py":
                compile(text, str(path), "exec")
        return texts

    @contextmanager
    def environment(self, root: Path = ROOT) -> Iterator[dict[str, str]]:
        """The environment of a process that imports a copy of the package with this change."""
        with TemporaryDirectory(prefix="distlock-planted-") as folder:
            copy = Path(folder)
            # Without what another process is just compiling
            shutil.copytree(root / PACKAGE, copy / PACKAGE, ignore=shutil.ignore_patterns("*.pyc.*"))
            for path, text in self._texts(copy).items():
                path.write_text(text)
            # Safe path: else Python looks into the current folder first, where the package is unchanged.
            yield {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join((folder, str(root)))}


def read(path: Path) -> list[Change]:
    return [_change(entry) for entry in tomllib.loads(path.read_text()).get("change", [])]


def _change(entry: dict[str, object]) -> Change:
    known: dict[str, object] = {**entry, "worlds": tuple(entry["worlds"])}  # type: ignore[arg-type]
    known["hunks"] = tuple(Hunk(**hunk) for hunk in entry["hunks"])  # type: ignore[attr-defined]
    return Change(**known)  # type: ignore[arg-type]


def listed() -> list[Change]:
    """All changes; those that the simulation must find are not ``unseen``."""
    return [change for path in sorted(LISTS.glob("*.toml")) for change in read(path)]


def to_text(changes: list[Change]) -> str:
    return "\n".join(map(_entry, changes))


def _entry(change: Change) -> str:
    worlds = ", ".join(f'"{world}"' for world in change.worlds)
    lines = ["[[change]]", f'name = "{change.name}"', f"worlds = [{worlds}]"]
    lines += [f"{key} = {_quoted(text)}" for key in ("rule", "test", "unseen") if (text := getattr(change, key))]
    lines += [f"seed = {change.seed}"] if change.seed != 1 else []
    for hunk in change.hunks:
        lines += ["[[change.hunks]]", f'file = "{hunk.file}"']
        lines += [f"before = '''\n{hunk.before}'''", f"after = '''\n{hunk.after}'''"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
