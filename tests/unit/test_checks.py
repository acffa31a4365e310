"""System checks: what is said of which setting, and that nothing is said when all is well."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
from django.apps import apps
from django.core import mail
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_distlock import InvalidLockBackend, lock, locks, respond
from django_distlock.checks import TAG
from django_distlock.core.registry import log_once
from django_distlock.decorators import answers
from django_distlock.testing import override_locks
from tests.support.programs import ROOT
from tests.support.stores import DATABASE, REDLOCK

REDIS = {"BACKEND": "django_distlock.backends.redis.RedisBackend", "LOCATION": "redis://nowhere.invalid:6379/3"}
LOCMEM = {"BACKEND": "django_distlock.backends.locmem.LocMemBackend"}
DUMMY = {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}


@pytest.fixture(autouse=True)
def named_templates(monkeypatch):
    """No others than those of the test: the process may have loaded views of any test."""
    names = set()
    monkeypatch.setattr(answers, "named_templates", names)
    return names


@pytest.fixture
def found(settings):
    """The ids that checks give for a setting, without asking any server: there is none."""

    def ids(setting, deploy=False, **others):
        settings.DISTRIBUTED_LOCKS = setting
        for key, value in others.items():
            setattr(settings, key, value)
        messages = run_checks(tags=[TAG], include_deployment_checks=deploy)
        assert all(
            message.msg and (message.hint or message.id in ("distlock.E001", "distlock.E003", "distlock.E004"))
            for message in messages
        )
        return [message.id for message in messages]

    return ids


def test_silent_when_all_is_well(found):
    assert found({"default": REDIS, "other": {**REDIS, "KEY_PREFIX": "other"}}, deploy=True) == []
    assert found({"default": LOCMEM}) == []


class TestWithoutTheSetting:
    """Nobody finds out from silence that locks exclude no other process."""

    @pytest.fixture(autouse=True)
    def absent(self, settings):
        del settings.DISTRIBUTED_LOCKS
        log_once.cache_clear()
        yield settings
        locks.close()

    @pytest.fixture
    def deployed(self, monkeypatch):
        """As where neither DEBUG is on nor a test runner has set up its environment."""
        monkeypatch.delattr(mail, "outbox")

    @staticmethod
    def acquire():
        with lock("name"):
            pass

    def test_who_tests_has_local_memory_and_one_warning(self, caplog):
        assert [message.id for message in run_checks(tags=[TAG])] == ["distlock.W001"]
        assert not caplog.records
        self.acquire()
        locks.close()
        self.acquire()
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "DISTRIBUTED_LOCKS is not set" in record.getMessage()

    def test_who_develops_has_the_same(self, deployed, settings, caplog):
        settings.DEBUG = True
        self.acquire()
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    def test_local_memory_that_is_written_down_is_silent(self, deployed, settings, caplog):
        settings.DISTRIBUTED_LOCKS = {"default": LOCMEM}
        self.acquire()
        assert run_checks(tags=[TAG]) == []
        assert not caplog.records

    @pytest.mark.django_db(databases="__all__")  # checks of other apps ask the database for what it can do
    def test_who_deploys_is_stopped(self, deployed):
        [message] = run_checks(tags=[TAG])
        assert message.id == "distlock.E005"
        with pytest.raises(SystemCheckError, match="DISTRIBUTED_LOCKS is not set"):
            call_command("check")

    def test_what_was_deployed_refuses_each_lock_and_logs_it_once(self, deployed, caplog):
        """Django writes no error of a request to the log of a server without DEBUG."""
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured) as caught:
                self.acquire()
            assert 'DISTRIBUTED_LOCKS = {\n    "default": {"BACKEND": ' in str(caught.value)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("ERROR", str(caught.value))]

    def test_a_test_runner_that_sets_nothing_up_has_the_locks_of_the_test_kit(self, deployed, caplog):
        with override_locks():
            self.acquire()
        assert not caplog.records

    def test_what_was_deployed_logs_it_when_it_starts(self, deployed, caplog):
        apps.get_app_config("distlock").ready()
        [record] = caplog.records
        assert record.levelname == "ERROR"
        assert "DISTRIBUTED_LOCKS is not set" in record.getMessage()

    def test_who_deploys_without_the_app_is_stopped_too(self):
        assert "(distlock.E005) DISTRIBUTED_LOCKS is not set" in refused_by_check_without_the_app("")

    @pytest.mark.seconds(4)
    def test_who_deploys_without_the_app_and_has_locks_in_views_alone_is_told_when_these_are_loaded(self, tmp_path):
        """The checks are under way by then, so that those of the package are not made."""
        (tmp_path / "late_urls.py").write_text("from django_distlock import lock\nurlpatterns = []")
        told = said_by_check("ROOT_URLCONF='late_urls', DISTRIBUTED_LOCK={}", tmp_path, imported="")
        assert told.returncode == 0
        assert told.stderr.count("DISTRIBUTED_LOCKS is not set, but DISTRIBUTED_LOCK is.") == 1
        silent = said_by_check("ROOT_URLCONF='late_urls', DEBUG=True", tmp_path, imported="")
        assert "DISTRIBUTED_LOCKS" not in silent.stderr

    @pytest.mark.parametrize("name", ["DISTRIBUTED_LOCK", "DISTRIBUTE_LOCKS", "DISTLOCK", "DJANGO_DISTLOCK_BACKENDS"])
    def test_a_misspelt_one_is_found(self, settings, name):
        setattr(settings, name, {"default": LOCMEM})
        [message] = run_checks(tags=[TAG])
        assert f"but {name} is" in message.msg

    def test_the_settings_of_beat_are_none_that_is_misspelt(self, settings):
        settings.DISTRIBUTED_LOCKS_BEAT = {}
        assert "but" not in run_checks(tags=[TAG])[0].msg


def said_by_check(settings, folder="", imported="import django_distlock"):
    program = f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        from django.conf import settings
        settings.configure({settings})
        import django
        {imported}
        django.setup()
        from django.core.management import call_command
        call_command("check")
        """
    program = textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def refused_by_check_without_the_app(settings):
    done = said_by_check(settings)
    assert done.returncode == 1
    return done.stderr


def test_a_wrong_entry_is_told_also_where_the_app_is_missing():
    told = refused_by_check_without_the_app("DISTRIBUTED_LOCKS={'default': {'BACKEND': 'nowhere.Backend'}}")
    assert "(distlock.E001) DISTRIBUTED_LOCKS['default']['BACKEND'] cannot be imported" in told


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ([], "it is a dict of lock backends by alias"),
        ({"default": {}}, "has no 'BACKEND'"),
        ({"default": {**REDIS, "location": "x"}}, "unknown key 'location'"),
        ({"default": {**REDIS, "OPTIONS": {"socket_timeot": 1}}}, "unknown option 'socket_timeot'"),
        ({"default": {**REDIS, "TTL": 0}}, "ttl is 0"),
        ({"default": {"BACKEND": "nowhere.Backend"}}, "No module named 'nowhere'. Name one by its dotted path"),
    ],
)
def test_a_wrong_entry(settings, setting, said):
    settings.DISTRIBUTED_LOCKS = setting
    [message] = run_checks(tags=[TAG])
    assert message.id == "distlock.E001"
    assert said in message.msg


def test_each_wrong_entry_is_told(found):
    assert found({"default": {}, "good": REDIS, "other": {}}) == ["distlock.E001", "distlock.E001"]


@pytest.mark.parametrize("entry", [LOCMEM, DUMMY], ids=["locmem", "dummy"])
def test_backends_that_are_not_for_deployment(found, entry):
    assert found({"default": entry}) == []
    assert found({"default": entry}, deploy=True) == ["distlock.E002"]


def test_an_alias_for_beat_that_keeps_no_runs(found):
    redlock = {
        "BACKEND": "django_distlock.backends.redlock.RedlockBackend",
        "LOCATION": [f"redis://nowhere{number}.invalid" for number in range(3)],
    }
    both = {"default": REDIS, "quorum": redlock, "dummy": DUMMY}
    assert found(both, DISTRIBUTED_LOCKS_BEAT={}) == []
    assert found(both, DISTRIBUTED_LOCKS_BEAT={"ALIAS": "default"}) == []
    for wrong in ({"ALIAS": "quorum"}, {"ALIAS": "dummy"}, {"ALIAS": "nowhere"}, {"alias": "default"}, []):
        assert found(both, DISTRIBUTED_LOCKS_BEAT=wrong) == ["distlock.E003"]


def test_a_time_to_remember_tasks_that_is_none(found):
    assert found({"default": REDIS}, DISTRIBUTED_LOCKS_REMEMBER_TASKS=3600) == []
    for wrong in (0, -1, None, "3600", True, float("inf"), float("nan")):
        assert found({"default": REDIS}, DISTRIBUTED_LOCKS_REMEMBER_TASKS=wrong) == ["distlock.E004"]


def test_templates_of_answers_that_cannot_be_used(found, named_templates, settings, tmp_path):
    (tmp_path / "good.html").write_text("{{ detail }}")
    (tmp_path / "wrong.html").write_text("{% nothing %}")
    settings.TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "DIRS": [tmp_path]}]
    respond(template_name="good.html")
    assert found({"default": REDIS}) == []
    respond(template_name="missing.html")
    respond(template_name="wrong.html")
    assert found({"default": REDIS}) == ["distlock.W007", "distlock.W007"]
    said = [message.msg for message in run_checks(tags=[TAG])]
    assert "'missing.html'): the template cannot be used. TemplateDoesNotExist" in said[0]
    assert "'wrong.html'): the template cannot be used. TemplateSyntaxError" in said[1]


def test_templates_of_views_that_nothing_has_imported_yet(tmp_path):
    (tmp_path / "late_urls.py").write_text(
        "from django_distlock import respond\nrespond(template_name='missing.html')\nurlpatterns = []"
    )
    told = said_by_check("INSTALLED_APPS=['django_distlock'], ROOT_URLCONF='late_urls', DISTRIBUTED_LOCKS={}", tmp_path)
    assert "(distlock.W007)" in told.stderr


def test_two_aliases_of_the_same_locks(found):
    assert found({"default": REDIS, "again": {**REDIS, "TTL": 60}}) == ["distlock.W002"]
    local, same = "redis://localhost/0", "redis://127.0.0.1:6379"
    assert found({"default": {**REDIS, "LOCATION": local}, "again": {**REDIS, "LOCATION": same}}) == ["distlock.W002"]
    assert found({"default": {**REDIS, "LOCATION": local}, "again": {**REDIS, "LOCATION": "redis://localhost/1"}}) == []
    assert found({"default": LOCMEM, "again": LOCMEM}) == []


@pytest.mark.parametrize(
    ("outer", "inner", "ids"),
    [
        ("lock", "lock:b", ["distlock.W002"]),
        ("lock", "lock:b:c", ["distlock.W002"]),
        ("lock", "locks", []),
        ("lock", "lock-b", []),
        ("lock:a", "lock:b", []),
    ],
)
def test_prefixes_of_which_one_contains_the_other(found, sqlite_database, outer, inner, ids):
    """The lock "b:x" of the first would be "x" of the second."""
    database = {"BACKEND": DATABASE, "LOCATION": "locks"}
    nodes = {"BACKEND": REDLOCK, "LOCATION": ["redis://a", "redis://b", "redis://c"]}
    for entry in (REDIS, database, nodes):
        for one, other in ((outer, inner), (inner, outer)):
            assert found({"default": {**entry, "KEY_PREFIX": one}, "two": {**entry, "KEY_PREFIX": other}}) == ids
    elsewhere = {**REDIS, "LOCATION": "redis://elsewhere.invalid/0"}
    assert found({"default": {**REDIS, "KEY_PREFIX": outer}, "two": {**elsewhere, "KEY_PREFIX": inner}}) == []


def test_sentinels_in_plain_text_beside_a_master_with_tls(found):
    def entry(location, **options):
        return {"default": {**REDIS, "LOCATION": location, "OPTIONS": {"sentinels": [("s", 26379)], **options}}}

    assert found(entry("rediss://mymaster/0")) == ["distlock.W012"]
    assert found(entry("rediss://mymaster/0", sentinel_kwargs={"ssl": False})) == ["distlock.W012"]
    assert found(entry("rediss://mymaster/0", sentinel_kwargs={"ssl": True})) == []
    assert found(entry("redis://mymaster/0")) == []


def test_a_ttl_that_is_never_renewed(found):
    assert found({"default": {**REDIS, "TTL": 60, "MAX_HOLD": 60}}) == ["distlock.W003"]
    assert found({"default": {**REDIS, "TTL": 60, "MAX_HOLD": 60, "RENEW": False}}) == []
    assert found({"default": {**REDIS, "TTL": 60}}) == []
    assert found({"default": {**REDIS, "TTL": 60, "MAX_HOLD": None}}) == []


def test_a_ttl_that_is_too_short_for_renewal(found):
    assert found({"default": {**LOCMEM, "TTL": 0.5}}) == ["distlock.W004"]
    assert found({"default": {**LOCMEM, "TTL": 30_000}}) == ["distlock.W006"]  # of milliseconds
    assert found({"default": {**LOCMEM, "TTL": 30_000, "RENEW": False}}) == []
    assert found({"default": {**LOCMEM, "TTL": 0.5, "RENEW": False}}) == []


def test_locks_that_are_gone_on_without_by_default(found):
    running = {**LOCMEM, "ON_UNAVAILABLE": "run"}
    assert found({"default": running}) == ["distlock.W008"]
    assert found({"default": LOCMEM, "cache": running}) == []
    assert found({"default": {**LOCMEM, "ON_UNAVAILABLE": "raise"}}) == []


def test_what_only_a_call_can_do_is_no_default_of_an_alias(found):
    assert found({"default": {**LOCMEM, "ON_UNAVAILABLE": "skip"}}) == ["distlock.E001"]
    with pytest.raises(
        InvalidLockBackend, match=r"'default'\] is not usable: on_unavailable is 'skip'; .* of @distributed_lock alone"
    ):
        locks["default"]


def test_a_ttl_that_is_too_short_for_the_timeouts(found):
    assert found({"default": {**REDIS, "TTL": 4}}) == ["distlock.W011"]
    assert found({"default": {**REDIS, "TTL": 4, "OPTIONS": {"socket_timeout": 0.5}}}) == []


@pytest.mark.parametrize(
    "cache",
    [
        {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://nowhere.invalid:6379/3"},
        {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": ["redis://a/3", "redis://nowhere.invalid/3"]},
        {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": "redis://a/3, redis://nowhere.invalid/3"},
        {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "redis://NOWHERE.invalid",
            "OPTIONS": {"db": "3"},
        },
    ],
)  # fmt: skip
def test_locks_in_the_database_of_a_cache(found, cache):
    """cache.clear() is FLUSHDB there."""
    assert found({"default": REDIS}, CACHES={"default": cache}) == ["distlock.W010"]


def test_locks_beside_a_cache(found):
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://nowhere.invalid:6379/4"}
    assert found({"default": REDIS}, CACHES={"default": cache}) == []


def test_locks_by_the_alias_of_a_cache_are_in_its_database(found):
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://nowhere.invalid:6379/4"}
    assert found({"default": {**REDIS, "LOCATION": "cache:default"}}, CACHES={"default": cache}) == ["distlock.W010"]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({}, ["distlock.W005"]),
        ({b"gevent": b"50"}, []),
        ({b"enable-threads": b"false"}, ["distlock.W005"]),
        ({"enable-threads": True}, []),
        ({b"enable-threads": b"true"}, []),
        ({b"threads": b"4"}, []),
    ],
)
def test_uwsgi_without_threads(found, monkeypatch, caplog, options, ids):
    """Without them there is no renewal. Under uWSGI itself no checks run, so it is logged there, too."""
    server = ModuleType("uwsgi")
    server.opt = options
    monkeypatch.setitem(sys.modules, "uwsgi", server)
    assert found({"default": REDIS}) == ids
    with caplog.at_level(logging.WARNING, "django_distlock"):
        apps.get_app_config("distlock").ready()
    assert ("--enable-threads" in caplog.text) == bool(ids)


@pytest.mark.django_db(databases="__all__")
def test_they_run_with_all_others(settings, capsys):
    settings.DISTRIBUTED_LOCKS = {"default": LOCMEM}
    settings.SILENCED_SYSTEM_CHECKS = ["admin.E403", "admin.E408", "admin.E409", "admin.E410", "admin.E404"]
    call_command("check")
    assert "no issues" in capsys.readouterr().out


def test_a_store_that_cannot_keep_tasks_unique(found, unique_aliases):
    redlock = {"BACKEND": REDLOCK, "LOCATION": ["redis://a", "redis://b", "redis://c"]}
    assert found({"default": REDIS, "quorum": redlock}) == []
    unique_aliases.update({"default", "quorum"})
    assert found({"default": REDIS, "quorum": redlock}) == ["distlock.E007"]
