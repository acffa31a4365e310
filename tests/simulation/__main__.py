"""``python -m tests.simulation``: simulate, and tell what was found."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets would be another one each time
    os.execve(
        sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
    )

from .engine.package import import_package

import_package()

from .command import main  # noqa: E402 - what it imports must come after that

sys.exit(main(sys.argv[1:]))
