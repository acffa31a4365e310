"""What beats share of their runs: the setting, the stamps, and what is refused."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import celery
import pytest
from django.core.exceptions import ImproperlyConfigured

from django_distlock import LockBackendError, locks
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.dummy import DummyBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redlock import RedlockBackend
from django_distlock.runs import Ledger, recorded_runs
from django_distlock.stamps import RunStamp

from .tools import backend_on, eventually

backend = backend_on("redis", "sqlite")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ([], "it is a dict"),
        ({"alias": "default"}, "unknown key 'alias'. Known: ALIAS, PREFIX"),
        ({"ALIAS": None}, "both are texts"),
        ({"PREFIX": 1}, "both are texts"),
        ({"ALIAS": "nope"}, "no alias 'nope'"),
    ],
)
def test_a_wrong_setting_is_named(setting, message, settings, locmem_locks):
    settings.DISTRIBUTED_LOCKS_BEAT = setting
    with pytest.raises(ImproperlyConfigured, match=message):
        Ledger("shop")


KEEPERS = {
    "Redis": (RedisBackend, "redis://nowhere.invalid"),
    "database": (DatabaseBackend, "default"),
    "local memory": (LocMemBackend, None),
    "Redlock": (RedlockBackend, [f"redis://nowhere{number}.invalid" for number in range(3)]),
    "dummy": (DummyBackend, None),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_backend_that_keeps_no_runs_is_refused_as_the_docs_say(kind, settings):
    backend, location = KEEPERS[kind]
    where = {} if location is None else {"LOCATION": location}
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": f"{backend.__module__}.{backend.__name__}", **where}}
    if backend.supports_runs:
        assert Ledger("shop").using == "default"
    else:
        refused = (
            rf"DISTRIBUTED_LOCKS_BEAT\['ALIAS'\] is 'default', a {backend.__name__}, .* on Redis or on a database\."
        )
        with pytest.raises(ImproperlyConfigured, match=refused):
            Ledger("shop")
        assert list(recorded_runs("default")) == []
    locks.close()
    page = Path(__file__).resolve().parent.parent.joinpath("docs", "beat.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith("| `ALIAS`")]
    [said] = [clause for clause in row.split(";") if kind in clause]
    assert ("cannot" not in said) == backend.supports_runs


def test_apps_that_share_a_store_do_not_meet(backend, settings):
    for app in ("shop", "office"):
        Ledger(app).tell("celery.backend_cleanup", RunStamp(100.0))
    settings.DISTRIBUTED_LOCKS_BEAT = {"PREFIX": "both/"}
    Ledger("third").tell("celery.backend_cleanup", RunStamp(100.0))
    entries = sorted(run.entry for run in recorded_runs("default"))
    assert entries == ["both/celery.backend_cleanup", "office:celery.backend_cleanup", "shop:celery.backend_cleanup"]


def test_stamps_run_out_a_week_or_two_periods_after_their_entry_is_gone(valkey_locks, store):
    ledger = Ledger("shop")
    week, month = 7 * 86_400, 30 * 86_400
    ledger.tell("often", RunStamp(100.0, next_at=102.0))
    ledger.tell("monthly", RunStamp(100.0, next_at=100.0 + month))
    assert week <= store.ttl("lock|r:shop:often") <= week + 4
    assert week + 2 * month - 5 <= store.ttl("lock|r:shop:monthly") <= week + 2 * month


@pytest.mark.parametrize("times", [1, 2])
def test_a_claim_whose_reply_is_lost_is_granted_when_it_is_asked_again(times, proxied, proxy, monkeypatch):
    """Once lost it is repeated unseen; twice, and the caller is told and asks again."""
    monkeypatch.setattr(proxied, "runs_settle", 0.01)
    ledger = Ledger("shop")
    ledger.tell("entry", RunStamp(100.0))
    eventually(lambda: ledger.claim("entry", 100.0, 110.0, 30.0) is None)
    proxy.cut_reply("EVALSHA", times)
    if times == 2:
        with pytest.raises(LockBackendError):
            ledger.claim("entry", 110.0, 130.0, 30.0)
    assert ledger.claim("entry", 110.0, 131.0, 30.0) is None
    standing = Ledger("shop").claim("entry", 110.0, 132.0, 30.0)  # of another beat
    assert standing.at == 131.0


def test_a_beat_never_claims_again_what_it_knows_to_have_run(locmem_locks, monkeypatch):
    """The store may have forgotten it, and the row or the file that the caller read, too."""
    monkeypatch.setattr(locmem_locks, "runs_settle", 0.0)
    ledger = Ledger("shop")
    ledger.tell("entry", RunStamp(100.0))
    assert ledger.claim("entry", 100.0, 110.0, 10.0) is None
    locmem_locks._runs.clear()
    for _ in range(2):
        assert ledger.claim("entry", 100.0, 111.0, 10.0).at == 110.0
    assert ledger.known["entry"].at == 110.0
    locmem_locks._runs.clear()
    older = RunStamp(90.0)
    locmem_locks.claim_run("shop:entry", older, older, 60)
    assert ledger.claim("entry", 100.0, 112.0, 10.0).at == 110.0
    assert ledger.claim("entry", 110.0, 120.0, 10.0) is None


def test_a_foreign_value_is_told_and_not_touched(valkey_locks, store):
    store.set("lock|r:shop:entry", "something else")
    with pytest.raises(LockBackendError, match="holds something that is no run of beat"):
        list(recorded_runs("default"))
    assert store.get("lock|r:shop:entry") == "something else"


def test_an_older_celery_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(celery, "VERSION", celery.VERSION._replace(minor=6))
    monkeypatch.delitem(sys.modules, "django_distlock.celery.beat", raising=False)
    with pytest.raises(ImproperlyConfigured, match=r"need Celery 5\.7 or later.*pip install"):
        importlib.import_module("django_distlock.celery.beat")
