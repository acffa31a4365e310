"""What a built wheel or sdist does where it is installed. ``make dist`` runs it, far from this checkout."""

import importlib.metadata
from pathlib import Path

import pytest
from django.conf import settings
from django.utils import translation
from valkey import Valkey

settings.configure(SECRET_KEY="for this test only", INSTALLED_APPS=["django_distlock"])

import django

django.setup()

import django_distlock
from django_distlock import adopt, lock, locks
from django_distlock.backends.redis import RedisBackend
from django_distlock.testing import held_elsewhere
from django_distlock.testing.contract import LockBackendContract
from django_distlock.testing.tools import eventually


@pytest.fixture(scope="module")
def server():
    with Valkey() as server:
        yield server


class TestRedis(LockBackendContract):
    @pytest.fixture
    def backend(self, server):
        backend = RedisBackend("default", {"LOCATION": server.url, "KEY_PREFIX": f"lock{id(self)}"})
        yield backend
        backend.close()


def test_it_is_the_installed_one_and_its_version_is_told_once():
    assert "site-packages" in django_distlock.__file__
    assert importlib.metadata.version("django-distlock") == django_distlock.__version__
    assert (Path(django_distlock.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(("language", "text"), [("de", "Gehaltene Sperren"), ("zh-hans", "持有中的锁")])
def test_it_speaks_other_languages(language, text):
    with translation.override(language):
        assert translation.gettext("Held locks") == text


def test_it_offers_no_tools_and_bounds_nothing_above():
    metadata = importlib.metadata.metadata("django-distlock")
    extras = ["beat", "celery", "django-redis", "opentelemetry", "zookeeper"]
    assert sorted(metadata.get_all("Provides-Extra")) == extras
    assert [needed for needed in metadata.get_all("Requires-Dist") if "<" in needed] == []


def test_locks_are_passed_on(server, settings_of):
    with settings_of(server), lock("name") as lease:
        text = lease.detach()
        with adopt(text) as adopted:
            assert adopted.fence == lease.fence
        assert not lock("name").locked()
        eventually(lambda: list(locks["default"].held()) == [])


@pytest.fixture
def settings_of():
    from django.test import override_settings

    def of(server):
        backend = "django_distlock.backends.redis.RedisBackend"
        return override_settings(DISTRIBUTED_LOCKS={"default": {"BACKEND": backend, "LOCATION": server.url}})

    return of


def test_the_plugin_is_there(local_locks, no_lock_left):
    assert local_locks is locks["default"]
    with held_elsewhere("name"):
        assert lock("name").locked()
