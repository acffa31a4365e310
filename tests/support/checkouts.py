"""Copies of the package that know a second format of what locks keep in Redis, as later releases will."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.support.programs import ROOT

SCRIPTS = "backends/redis/scripts"
NEWER = {r"'\^\[2-9\] '": "'^[3-9] '"}
COMPARES = {r"string\.sub\(([\w[\]]+), 1, 29\) (==|~=) mine": r"string.sub(\1, 3, 29) \2 string.sub(mine, 3)"}
OWN = {r"local mine = '1 ' \.\.": "local mine = 'OWN ' .."}
# In a copy that writes OWN. The two formats differ by their number alone.
CHANGES = {
    f"{SCRIPTS}/lock.lua": NEWER
    | COMPARES
    | {
        r"string\.sub\(first, 1, 29\), 'c'": "'OWN ' .. string.sub(first, 3, 29), 'c'",
    },
    f"{SCRIPTS}/acquire.lua": OWN
    | COMPARES
    | {
        r"'1 ' \.\. ARGV\[1\]": "'OWN ' .. ARGV[1]",
        r"string\.sub\(first, 1, 29\) \.\. 'c ": "'OWN ' .. string.sub(first, 3, 29) .. 'c ",
    },
    f"{SCRIPTS}/acquire_all.lua": {
        r"string\.sub\(value, 1, 30\) == '1 ' \.\. ARGV": "string.sub(value, 3, 30) == ARGV",
        r"'1 ' \.\. ARGV\[1\] \.\. ' h '": "'OWN ' .. ARGV[1] .. ' h '",
    },
    f"{SCRIPTS}/release.lua": OWN
    | COMPARES
    | {
        r"redis\.call\('GETRANGE', KEYS\[1\], 0, 29\) == '1 ' \.\.": "redis.call('GETRANGE', KEYS[1], 2, 29) ==",
    },
    f"{SCRIPTS}/exchange.lua": {
        r"theirs = '1 ' \.\.": "theirs = 'OWN ' ..",
        r"string\.sub\((\w+), 1, 30\) ~= theirs": r"string.sub(\1, 3, 30) ~= string.sub(theirs, 3)",
        r"'1 ' \.\. new": "'OWN ' .. new",
    },
    f"{SCRIPTS}/renew.lua": NEWER | {r"string\.sub\(lease, 1, 29\) == '1 ' \.\.": "string.sub(lease, 3, 29) =="},
    f"{SCRIPTS}/renew_slot.lua": NEWER
    | {r"'1 ' \.\. ARGV\[1\]": "ARGV[1]", r"string\.sub\(value, 1, 29\) ==": "string.sub(value, 3, 29) =="},
    "formats.py": {"NUMBER, LARGEST = 1, 9": "NUMBER, LARGEST = OWN, 9", "FORMAT < head": '"2 " < head'},
    "backends/redis/codec.py": {r'rb"1 \(': 'rb"[12] ('},
}


def copy_that_reads_both(folder: Path, *, writes: int) -> Path:
    """A folder for ``sys.path`` with a copy that writes format 1 or 2."""
    package = folder / "django_distlock"
    # With what is compiled already, but not what another process is just compiling
    shutil.copytree(ROOT / "django_distlock", package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, changes in CHANGES.items():
        text = (package / name).read_text()
        for old, new in changes.items():
            text, count = re.subn(old, new.replace("OWN", str(writes)), text)
            assert count, f"{name} has no {old}"
        assert writes == 1 or "'1 '" not in text, f"{name} has the number at a place that is not known here"
        (package / name).write_text(text)
    return folder
