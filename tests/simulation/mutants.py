"""Does the simulation find what it must? ``python -m tests.simulation.mutants make`` and ``run`` (see ``--help``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .planted.changes import MUTANTS, listed, read, to_text
from .planted.make import mutants
from .planted.run import SHARE_TO_FIND, run_all
from .planted.verify import verify

SEED = 17


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="make the mutants anew from the code of today")
    make.add_argument("--seed", type=int, default=SEED)
    run = commands.add_parser("run", help="plant each change in a copy of the package, and simulate that")
    run.add_argument("--world", help="only changes whose name begins with it")
    run.add_argument("--only", metavar="TEXT", default="", help="only changes whose name contains the text")
    run.add_argument("--minutes", type=float, default=10.0, help="for each change in each of its worlds (10)")
    run.add_argument("--jobs", type=int, default=2, help="changes at a time (2)")
    run.add_argument("--seed", type=int, default=1, help="of the first run in each world (1)")
    run.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there; those that stand there are not run again"
    )
    check = commands.add_parser("verify", help="run the test of the suite that each planted defect must fail")
    check.add_argument("--only", metavar="TEXT", default="", help="only changes whose name contains the text")
    commands.add_parser("list", help="print the names of all changes")
    options = parser.parse_args(arguments)
    if options.command == "make":
        known = {change.hunks: change for change in read(MUTANTS)} if MUTANTS.exists() else {}
        made = mutants(options.seed, known)
        head = f"# Made by `python -m tests.simulation.mutants make --seed {options.seed}`.\n"
        MUTANTS.write_text(head + "# `rule` and `unseen` are written by hand, and kept.\n\n" + to_text(made))
        return 0
    if options.command == "verify":
        return 0 if verify([change for change in listed() if options.only in change.name]) else 1
    if options.command == "list":
        for change in listed():
            print(f"{change.name:90} {change.unseen and 'unseen: '}{change.unseen}")
        return 0
    to_find = [change for change in listed() if not change.unseen]
    chosen = [change for change in to_find if options.only in change.name and options.world in (None, change.group)]
    shares = run_all(chosen, seed=options.seed, minutes=options.minutes, jobs=options.jobs, results=options.json)
    return 0 if all(share >= SHARE_TO_FIND for share in shares.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
