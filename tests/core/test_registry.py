"""DISTRIBUTED_LOCKS: what it gives, and what it says when it is wrong."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading
from datetime import timedelta
from typing import get_args, get_type_hints

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_distlock import InvalidLockBackend, LockBackendDoesNotExist, State, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.dummy import DummyBackend
from django_distlock.backends.locmem import LocMemBackend
from django_distlock.celery.config import remember_tasks_for
from django_distlock.options import OPTION_KEYS, LockOptions, Terms
from tests.support.leases import terms_of_detached
from tests.support.programs import ROOT
from tests.support.stores import DATABASE, LOCMEM, REDIS, REDLOCK


@pytest.fixture(autouse=True)
def _fresh():
    yield
    locks.close()


class TestAliases:
    def test_without_the_setting_there_is_local_memory(self, settings):
        del settings.DISTRIBUTED_LOCKS
        assert list(locks) == ["default"]
        assert isinstance(locks["default"], LocMemBackend)

    def test_each_alias_is_a_backend_of_its_own(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}, "other": {"BACKEND": LOCMEM}}
        assert [backend.alias for backend in locks.all()] == ["default", "other"]
        with lock("name"), lock("name", using="other"):
            assert [[info.using for info in backend.held()] for backend in locks.all()] == [["default"], ["other"]]

    def test_all_threads_share_one_backend(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        found = []
        threads = [threading.Thread(target=lambda: found.append(locks["default"])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, found))) == 1

    def test_a_changed_setting_counts_from_the_next_use(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "TTL": 5}}
        handle = lock("name")
        with handle as lease:
            assert lease.ttl == 5
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM, "TTL": 7}}
        with handle as lease:
            assert lease.ttl == 7

    def test_importing_the_package_needs_no_settings(self):
        code = "import django_distlock; django_distlock.lock('name'); print('fine')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={})
        assert done.stdout.strip() == "fine", done.stderr

    def test_the_dummy_grants_everything(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": "django_distlock.backends.dummy.DummyBackend"}}
        with lock("name") as outer, lock("name") as inner:
            assert isinstance(locks["default"], DummyBackend)
            assert inner.fence > outer.fence
            inner.ensure_held()
            assert not lock("name").locked()
            assert list(locks["default"].held()) == []


def test_there_is_one_list_of_options():
    """In the documentation, and for type checkers, which cannot read it."""
    names = [*Terms().as_dict()]
    hints = get_type_hints(Terms)
    seconds = {name for name in names if float in (hints[name], *get_args(hints[name]))}
    given = {name: hints[name] | timedelta if name in seconds else hints[name] for name in names}
    assert get_type_hints(LockOptions) == given
    assert re.findall(r"^ *- ``(\w+)``", lock.__doc__, re.MULTILINE) == names
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    [told] = re.findall(r"The other options of `lock\(\)` have no key here: ([^.]*)\.", page)
    assert set(re.findall(r"`(\w+)`", told)) == {name for name in names if name.upper() not in OPTION_KEYS}
    assert set(OPTION_KEYS) <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))


class TestTerms:
    def test_those_with_another_value_are_checked(self):
        terms = Terms(ttl=timedelta(seconds=5), slots=3)
        assert (terms.ttl, terms.slots, terms.replace(ttl=timedelta(seconds=7)).ttl) == (5.0, 3, 7.0)
        with pytest.raises(ValueError, match="ttl is 'soon'"):
            terms.replace(ttl="soon")
        with pytest.raises(ValueError, match="reentrant=True is for locks with one slot"):
            terms.replace(reentrant=True)
        with pytest.raises(TypeError, match="'timeout'"):
            terms.replace(timeout=3)
        with pytest.raises(ValueError, match="ttl is 'soon'"):
            getattr(copy, "replace", Terms.replace)(terms, ttl="soon")  # of Python 3.13

    def test_those_that_many_locks_have_do_not_change(self):
        terms = Terms()
        with pytest.raises(AttributeError, match=re.escape("replace() returns others")):
            terms.ttl = 5.0
        assert (terms.ttl, repr(terms.replace(label="nightly")).count("label='nightly'")) == (30.0, 1)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies_are_the_same(self, copied):
        terms = Terms(ttl=5.0, label="nightly")
        assert copied(terms) == terms
        assert type(copied(terms)) is Terms


class TestBackendsThatAreReplaced:
    def test_what_is_built_while_they_are_closed_serves_that_call_alone(self, settings):
        class Slow(LocMemBackend):
            def __init__(self, alias, entry):
                super().__init__(alias, entry)
                locks.close()

        globals()["Slow"] = Slow
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": f"{__name__}.Slow"}}
        assert type(locks["default"]) is Slow
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        assert type(locks["default"]) is LocMemBackend

    def test_a_lease_ends_where_it_began(self, settings):
        """Also if its alias is gone, and whatever its body raised is kept."""
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        handle = lock("name")
        with pytest.raises(ZeroDivisionError), handle as lease:
            settings.DISTRIBUTED_LOCKS = {"other": {"BACKEND": LOCMEM}}
            _ = 1 / 0
        assert lease.state is State.RELEASED


class TestDefaultsOfAnAlias:
    def test_are_taken_where_a_lock_says_nothing(self, settings):
        entry = {"BACKEND": LOCMEM, "TTL": 5, "WAIT": 0, "RENEW": False, "MAX_HOLD": None, "MIN_HOLD": 0.01}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        with lock("name") as lease:
            terms = terms_of_detached(lease.detach())
            assert (terms.ttl, terms.wait, terms.renew, terms.max_hold, terms.min_hold) == (5, 0, False, None, 0.01)
        with lock("other", ttl=9, wait=1, renew=True, max_hold=60, min_hold=0) as lease:
            terms = terms_of_detached(lease.detach())
            assert (terms.ttl, terms.wait, terms.renew, terms.max_hold, terms.min_hold) == (9, 1, True, 60, 0)

    def test_are_the_documented_ones_otherwise(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        with lock("name") as lease:
            terms = terms_of_detached(lease.detach())
            assert (terms.ttl, terms.wait, terms.renew, terms.max_hold, terms.min_hold) == (30, 10, True, None, 0)
            assert (terms.reentrant, terms.on_lost) == (False, "raise")


def test_a_ttl_that_looks_like_milliseconds_is_logged_once(caplog):
    handles = [lock("name", ttl=31_234) for _ in range(2)]
    handles += [lock("name", ttl=31_234, renew=False), lock("name", ttl=3600)]
    assert [record.message.partition(". ")[2] for record in caplog.records] == ["Is ttl=31234 meant to be seconds?"]


def test_a_backend_is_asked_by_its_alias():
    for name in ("held", "default"):
        with pytest.raises(
            AttributeError, match=f"There is no locks.{name}. Name a backend by its alias, such as locks"
        ):
            getattr(locks, name)


def test_the_database_backend_without_the_app_says_what_to_do():
    """Also in a process that has imported none of its models yet."""
    program = """
import django
from django.conf import settings
entry = {"BACKEND": "django_distlock.backends.database.DatabaseBackend"}
settings.configure(SECRET_KEY="x", DISTRIBUTED_LOCKS={"default": entry})
django.setup()
from django_distlock import lock
lock("name").acquire()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "keeps locks in a table of the app 'django_distlock': add it to INSTALLED_APPS" in done.stderr


class TestWrongSettings:
    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ([], "DISTRIBUTED_LOCKS is []; it is a dict"),
            (
                {"BACKEND": LOCMEM},
                "DISTRIBUTED_LOCKS is one backend; it is a dict of them by alias:\n\nDISTRIBUTED_LOCKS = {",
            ),
            ({"default": {}}, "DISTRIBUTED_LOCKS['default'] has no 'BACKEND'. Name one by its dotted path"),
            ({"default": "redis://"}, "DISTRIBUTED_LOCKS['default'] has no 'BACKEND'"),
            ({"default": {"BACKEND": "django_distlock.backends.redis.Reddis"}}, "cannot be imported: "),
            ({"default": {"BACKEND": "no.such.module"}}, "DISTRIBUTED_LOCKS['default']['BACKEND'] cannot be imported"),
            ({"default": {"BACKEND": "os.path.join"}}, "is os.path.join, which is no lock backend"),
            ({"default": {"BACKEND": LOCMEM, "location": 5}}, "has the unknown key 'location'. Known: BACKEND, LOC"),
            ({"default": {"BACKEND": LOCMEM, "TIMEOUT": 5}}, "has the unknown key 'TIMEOUT'. TTL or WAIT? 'TTL': 30"),
            ({"default": {"BACKEND": LOCMEM, "EXPIRE": 5}}, "has the unknown key 'EXPIRE'. TTL or WAIT? 'TTL': 30"),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"wait": 5}}},
                "['OPTIONS'] has the unknown option 'wait'. Write it beside OPTIONS, as the key 'WAIT'.",
            ),
            (
                {"default": {"BACKEND": LOCMEM, "OPTIONS": {"fast": 1}}},
                "unknown option 'fast'. LocMemBackend knows: none",
            ),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"Socket_Timeout": 1}}},
                "unknown option 'Socket_Timeout'. RedisBackend knows: credential_provider, failover_timeout, ",
            ),
            ({"default": {"BACKEND": LOCMEM, "TTL": 0}}, "DISTRIBUTED_LOCKS['default'] is not usable: ttl is 0."),
            ({"default": {"BACKEND": LOCMEM, "WAIT": -5}}, "DISTRIBUTED_LOCKS['default'] is not usable: wait is -5."),
            (
                {"default": {"BACKEND": REDIS, "LOCATION": "localhost:6379"}},
                "['LOCATION'] is 'localhost:6379'. It is a URL",
            ),
            ({"default": {"BACKEND": REDIS, "LOCATION": None}}, "['LOCATION'] is None. It is a URL such as redis://"),
            ({"default": {"BACKEND": REDIS, "LOCATION": "redis://h:port/0"}}, "is a URL that redis-py cannot read"),
            ({"default": {"BACKEND": REDIS, "LOCATION": "cache:nope"}}, "but CACHES has no alias 'nope'"),
            (
                {"default": {"BACKEND": REDIS, "LOCATION": "cache:default"}},
                "is no cache in Redis, neither Django's nor that of django-redis. Give a URL",
            ),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"credential_provider": "nowhere.Provider"}}},
                "['credential_provider'] is 'nowhere.Provider'; no provider can be made of it: No module named",
            ),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"credential_provider": "redis.Redis"}}},
                "['credential_provider'] is 'redis.Redis'; it is a redis.CredentialProvider, or the dotted path of one",
            ),
            (
                {
                    "default": {
                        "BACKEND": REDIS,
                        "LOCATION": "redis://:secret@h",
                        "OPTIONS": {"credential_provider": "redis.credentials.UsernamePasswordCredentialProvider"},
                    }
                },
                "['LOCATION'] names a user or a password, and OPTIONS has a 'credential_provider', which names others",
            ),
            ({"default": {"BACKEND": REDIS, "KEY_PREFIX": "a{b}"}}, "['KEY_PREFIX'] is 'a{b}'. It is the text"),
            ({"default": {"BACKEND": REDIS, "KEY_PREFIX": "{}"}}, "without '{', '}' and '|', or all of it in one pair"),
            ({"default": {"BACKEND": REDIS, "KEY_PREFIX": "{a}{b}"}}, "['KEY_PREFIX'] is '{a}{b}'"),
            (
                {"default": {"BACKEND": f"{REDIS[:-12]}RedisClusterBackend", "KEY_PREFIX": "{a}"}},
                "without '{', '}' and '|'.",
            ),
            ({"default": {"BACKEND": REDIS, "KEY_PREFIX": ""}}, "['KEY_PREFIX'] is ''"),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"socket_timeout": None}}},
                "['OPTIONS']['socket_timeout'] is None; it is a number of seconds above 0",
            ),
            (
                {"default": {"BACKEND": REDIS, "OPTIONS": {"max_connections": 0.5}}},
                "is 0.5; it is a whole number above 0",
            ),
            ({"default": {"BACKEND": REDIS, "OPTIONS": [1]}}, "['OPTIONS'] is […]; it is a dict of keywords"),
            ({"default": {"BACKEND": REDIS, "LOCATION": "redis://h?speed=9"}}, "a URL with an unknown parameter: "),
        ],
    )
    def test_say_what_to_change(self, settings, setting, message):
        settings.DISTRIBUTED_LOCKS = setting
        with pytest.raises(InvalidLockBackend) as caught:
            locks["default"]
        assert message in str(caught.value)
        assert isinstance(caught.value, ImproperlyConfigured)

    def test_say_what_to_install_for_a_cache(self, settings, monkeypatch):
        class Nowhere:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name == "django_redis":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        for module in [name for name in sys.modules if name.partition(".")[0] == "django_redis"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(sys, "meta_path", [Nowhere, *sys.meta_path])
        settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://h"}}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "cache:default"}}
        with pytest.raises(InvalidLockBackend, match=r'pip install "django-distlock\[django-redis\]"$'):
            locks["default"]

    def test_unknown_alias(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": LOCMEM}}
        with pytest.raises(LockBackendDoesNotExist) as caught:
            lock("name", using="reports").acquire()
        assert str(caught.value) == "DISTRIBUTED_LOCKS has no alias 'reports'. Known: 'default'."
        assert isinstance(caught.value, KeyError)

    def test_a_password_is_never_shown(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "redis://u:hush@h:port/0"}}
        with pytest.raises(InvalidLockBackend) as caught:
            locks["default"]
        shown = [str(caught.value), repr(caught.value.__cause__), str(caught.value.__suppress_context__)]
        assert "hush" not in "".join(shown)
        assert caught.value.__suppress_context__


def test_a_waiter_looks_again_before_it_counts_as_gone():
    assert Timing.look_interval < Timing.waiter_expires_after


class TestLengthsOfTime:
    def test_may_be_timedeltas(self, settings, sqlite_database):
        second, two = timedelta(seconds=1), timedelta(seconds=2)
        timeouts = {"socket_timeout": second, "socket_connect_timeout": two, "failover_timeout": two}
        sentinels = {"sentinels": [("h", 1)], "service_name": "s", "sentinel_kwargs": {"socket_timeout": second}}
        settings.DISTRIBUTED_LOCKS = {
            "redis": {"BACKEND": REDIS, "LOCATION": "redis://h", "OPTIONS": timeouts},
            "sentinel": {"BACKEND": REDIS, "LOCATION": "redis://s/0", "OPTIONS": {**timeouts, **sentinels}},
            "quorum": {
                "BACKEND": REDLOCK,
                "LOCATION": [f"redis://h{number}" for number in range(3)],
                "OPTIONS": {"node_timeout": second, "retry_delay": (second, two)},
            },
            "database": {"BACKEND": DATABASE, "LOCATION": "locks", "OPTIONS": {"timeout": second}},
        }
        used = {option: value for backend in locks.all() for option, value in backend.option.items()}
        assert (used["socket_timeout"], used["failover_timeout"], used["timeout"]) == (1.0, 2.0, 1.0)
        assert (used["node_timeout"], list(used["retry_delay"])) == (1.0, [1.0, 2.0])
        settings.DISTRIBUTED_LOCKS_REMEMBER_TASKS = timedelta(hours=1)
        assert remember_tasks_for() == 3600.0

    def test_are_refused_as_numbers_are(self, settings):
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "OPTIONS": {"socket_timeout": timedelta(-1)}}}
        with pytest.raises(InvalidLockBackend, match=r"'socket_timeout'\] is -86400.0; it is a number"):
            locks["default"]
        settings.DISTRIBUTED_LOCKS_REMEMBER_TASKS = timedelta(0)
        with pytest.raises(ImproperlyConfigured, match="it is a number of seconds above 0"):
            remember_tasks_for()
