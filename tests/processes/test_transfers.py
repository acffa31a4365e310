"""Processes that move money between several accounts under ``lock_all()``, and are killed at any moment."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.tools import PATIENCE, eventually

ACCOUNTS, PROCESSES, KILLS, BALANCE = 5, 8, 6, 1000

TRANSFERS = """
import random
import redis

accounts, chance = redis.Redis.from_url(sys.argv[1]), random.Random(SEED)
while True:
    several = [chance.randrange(ACCOUNTS) for _ in range(chance.choice((2, 3)))]
    with lock_all(*(lock("account:{}", one, ttl=5) for one in several), wait=WAIT) as leases:
        balances = {one: int(accounts.get(f"balance:{one}")) for one in several}
        time.sleep(chance.random() / 100)
        for source, target in zip(several, several[1:]):
            amount = chance.randrange(10)
            balances[source] -= amount
            balances[target] += amount
        leases.ensure_held()
        accounts.mset({f"balance:{one}": balance for one, balance in balances.items()})
    accounts.incr(f"transfers:{os.getpid()}")
"""


@pytest.mark.seconds(9)
def test_the_sum_is_kept_and_nobody_waits_for_ever(program, store):
    """The writes of one transfer are one step, so a kill cannot break the sum; only two at one account can."""
    chance = random.Random(22)
    balances = {f"balance:{account}": BALANCE for account in range(ACCOUNTS)}
    store.mset(balances)

    def start():
        values = {"SEED": chance.random(), "ACCOUNTS": ACCOUNTS, "WAIT": 3 * PATIENCE}
        return program("".join(f"{name} = {value!r}\n" for name, value in values.items()) + TRANSFERS)

    def transfers(process):
        return int(store.get(f"transfers:{process.pid}") or 0)

    def total():
        return sum(map(int, store.mget(list(balances))))

    running = [start() for _ in range(PROCESSES)]
    for _ in range(KILLS):
        victim = running.pop(chance.randrange(PROCESSES))
        eventually(lambda victim=victim: transfers(victim), 3 * PATIENCE)
        time.sleep(chance.random() / 10)  # anywhere in a transfer
        victim.kill()
        victim.wait()
        running.append(start())
        assert total() == ACCOUNTS * BALANCE
    before = {process.pid: transfers(process) for process in running}
    for process in running:
        eventually(lambda process=process: transfers(process) > before[process.pid] + 5, 3 * PATIENCE)
        assert process.poll() is None
    assert total() == ACCOUNTS * BALANCE
