"""``make demo``: many buyers in a small shop, first without the lock, then with it; then a schedule with three beats.

It exits with 0 if the locks kept their promises.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field

from django.core.management import call_command

from django_distlock import locks
from django_distlock.types import LockInfo

from . import beats, buyers
from .server import ROOT, hidden_from_ctrl_c, open_shop, stop

PURCHASES = 200
SOLD, REFUSED, SOLD_OUT = 302, 409, 410


@dataclass
class Rush:
    """The result of one rush of buyers. ``peak``: the locks held at the moment at which most were held."""

    answers: Counter[buyers.Answer] = field(default_factory=Counter)
    peak: list[LockInfo] = field(default_factory=list)
    oversold: int = 0

    @property
    def errors(self) -> list[buyers.Answer]:
        return [answer for answer in self.answers.elements() if answer not in (SOLD, REFUSED, SOLD_OUT)]


def rush(port: int, action: str) -> Rush:
    """Request every item equally often, in random order. Returns the result."""
    from .shop.models import Item  # models can be imported only after Django is set up

    items = list(Item.objects.all())
    paths = [f"/items/{item.pk}/{action}" for item in items] * (PURCHASES // len(items))
    random.shuffle(paths)
    outcome = Rush()
    with closing(buyers.send(port, paths)) as answers:
        for answer in answers:
            outcome.answers[answer] += 1
            outcome.peak = max(outcome.peak, list(locks["default"].held("shop:item:")), key=len)
            if outcome.answers.total() % 50 == 0:
                print(f" {outcome.answers.total()}", end="", flush=True)
    print(" answered", flush=True)
    outcome.oversold = sum(max(0, item.purchases.count() - item.delivered) for item in items)
    return outcome


def reconcile_at_once() -> list[str]:
    """Run ``manage.py reconcile`` in three processes at the same time. Returns what they print."""
    command = [sys.executable, "example_project/manage.py", "reconcile"]
    processes: list[subprocess.Popen[str]] = []
    try:
        with hidden_from_ctrl_c():
            for _ in range(3):
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return [process.communicate(timeout=30)[0].strip() for process in processes]
    finally:
        for process in processes:
            stop(process)


def table(without: Rush, under: Rush) -> str:
    rows = [
        ("", "without lock", "with lock"),
        ("sold", without.answers[SOLD], under.answers[SOLD]),
        ("  of these oversold", without.oversold, under.oversold),
        ("refused, busy (409)", without.answers[REFUSED], under.answers[REFUSED]),
        ("sold out (410)", without.answers[SOLD_OUT], under.answers[SOLD_OUT]),
        ("errors", len(without.errors), len(under.errors)),
    ]
    return "\n".join(f"{label:<22}{left:>14}{right:>14}" for label, left, right in rows)


def described(info: LockInfo) -> str:
    process = f"{info.holder.label} in process {info.holder.pid}" if info.holder else "an unknown holder"
    return f"  {info.name:<14}{process:<48}{info.remaining:>6.2f} s left"


def complaints(without: Rush, under: Rush, reports: list[str]) -> list[str]:
    """Returns why this run proves nothing."""
    skipped = sum(report.startswith("Skipped") for report in reports)
    ran = sum("counted" in report for report in reports)
    is_fine = {
        "Pieces were oversold under the lock.": under.oversold == 0,
        "Nothing was sold under the lock.": under.answers[SOLD] > 0,
        "The lock refused nobody: there was no rush.": under.answers[REFUSED] > 0,
        "Nothing was oversold without the lock: there was no rush.": without.oversold > 0,
        f"Of {len(reports)} reconciliations {ran} ran and {skipped} skipped.": (ran, skipped) == (1, len(reports) - 1),
        f"Errors: {[*without.errors, *under.errors][:3]}": not (without.errors or under.errors),
    }
    return [complaint for complaint, fine in is_fine.items() if not fine]


def main() -> int:
    with open_shop() as shop:
        crowd = f"{buyers.PROCESSES * buyers.THREADS} buyers from {buyers.PROCESSES} processes, {PURCHASES} purchases:"
        print(f"Without the lock, {crowd}", end="", flush=True)
        without = rush(shop.port, "buy-unlocked")
        print("Reconciling in 3 processes at once:", flush=True)
        reports = reconcile_at_once()
        print(*(f"  {report}" for report in reports), sep="\n")
        call_command("fill_shop", verbosity=0)
        print(f"With the lock, {crowd}", end="", flush=True)
        under = rush(shop.port, "buy")
        schedule = None
        if "SHOP_BROKER" in os.environ:  # beats and workers need Valkey as broker
            print(f"Starting {beats.BEATS} beats and {beats.WORKERS} workers for one schedule", flush=True)
            schedule = beats.watch()
        print("Closing the shop", flush=True)

    print(f"\n{table(without, under)}\n")
    print("Each item is asked for 20 times. Under the lock a buyer who comes while another one pays is not kept")
    print("waiting (wait=0) but told 409 at once, and these buyers do not come again.\n")
    print(f"At the peak {len(under.peak)} locks were held, one for each item being bought:")
    print(*map(described, sorted(under.peak, key=lambda info: (len(info.name), info.name))), sep="\n")
    wrong = complaints(without, under, reports)
    fine = "Nothing was oversold under the lock."
    if schedule:
        print(f"\n{beats.table(schedule)}")
        wrong += beats.complaints(schedule)
        fine = "Nothing was oversold under the lock, and each run that was due was sent once."
    print("", *(wrong or [fine]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nStopped.")
