"""Does the simulation find what it must? ``python -m tests.simulation.mutants make`` and ``run`` (see ``--help``)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from .planted.changes import MUTANTS, PROTOCOL, listed, read, to_text
from .planted.make import for_the_suite, mutants
from .planted.run import SHARE_TO_FIND, look_for, run_all, seed_of_finding
from .planted.verify import notice, verify

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
    rules = commands.add_parser("rules", help="look for each broken rule of the scripts where it was found last")
    rules.add_argument("--only", metavar="TEXT", default="", help="only rules whose name contains the text")
    rules.add_argument("--jobs", type=int, default=2, help="rules at a time (2)")
    check = commands.add_parser("verify", help="run the test of the suite that each planted defect must fail")
    check.add_argument("--only", metavar="TEXT", default="", help="only changes whose name contains the text")
    suite = commands.add_parser("notice", help="run the tests of the modules in which sixty small mistakes are made")
    suite.add_argument("--seed", type=int, default=SEED)
    suite.add_argument("--only", metavar="TEXT", default="", help="only mistakes whose name contains the text")
    suite.add_argument("--jobs", type=int, default=2, help="mistakes at a time (2)")
    commands.add_parser("seeds", help="look for each broken rule of the scripts anew, and note where `rules` begins to")
    commands.add_parser("list", help="print the names of all changes")
    options = parser.parse_args(arguments)
    if options.command == "make":
        known = {change.hunks: change for change in read(MUTANTS)} if MUTANTS.exists() else {}
        made = mutants(options.seed, known)
        head = f"# Made by `python -m tests.simulation.mutants make --seed {options.seed}`.\n"
        MUTANTS.write_text(head + "# `rule` and `unseen` are written by hand, and kept.\n\n" + to_text(made))
        return 0
    if options.command == "rules":
        rules_to_find = [rule for rule in read(PROTOCOL) if options.only in rule.name and not rule.unseen]
        return 1 if look_for(rules_to_find, options.jobs) else 0
    if options.command == "verify":
        return 0 if verify([change for change in listed() if options.only in change.name]) else 1
    if options.command == "notice":
        made = [change for change in for_the_suite(options.seed) if options.only in change.name]
        return 1 if notice(made, options.jobs) else 0
    if options.command == "seeds":
        rules = read(PROTOCOL)
        with ThreadPoolExecutor(2) as pool:
            seeds = pool.map(lambda rule: rule.seed if rule.unseen else seed_of_finding(rule), rules)
            found = [replace(rule, seed=seed) for rule, seed in zip(rules, seeds, strict=True)]
        head, _, _ = PROTOCOL.read_text().partition("[[change]]")
        PROTOCOL.write_text(head + to_text(found))
        return 0
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
