"""Users who may do no more than the documentation says that locks need, and passwords that change."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import redis
from django_redis.pool import ConnectionFactory

from django_distlock import LockBackendError, lock, locks
from django_distlock.backends.base import FORCED
from django_distlock.findings import Level
from django_distlock.stamps import RunStamp
from django_distlock.tickets import Grant, LockInfo
from example_project.valkey import Valkey, binary

from . import servers
from .conftest import REDIS, program_of
from .sentinel import SERVICE, Watched
from .test_sentinel import warm_up
from .tools import eventually, ticket

PAGES = Path(__file__).resolve().parent.parent / "docs" / "topologies"
NOT_IN_6_2 = {"+spublish", "+ssubscribe"}


def documented(page):
    """The words of the rule on a page, behind the name of the user."""
    [rule] = re.findall(r"^user distlock (.*?)```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return rule.split()


@pytest.fixture(scope="module", params=("valkey", *servers.KINDS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def server(kind):
    with Valkey(program=binary() if kind == "valkey" else program_of(kind)) as server:
        yield server


@pytest.fixture
def admin(server):
    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        admin.flushall()
        yield admin


@pytest.fixture
def user(server, kind, admin, settings):
    """``locks["default"]`` as a user with the documented rights, without some of them."""

    def user(*without, protocol=3):
        rule = [word for word in documented("tls-and-acl.md") if word not in {f"+{right}" for right in without}]
        if kind == "redis-6.2":
            rule = [word for word in rule if word not in NOT_IN_6_2]
        if kind in ("valkey", "redis-8"):
            rule.append("+client|setinfo")
        admin.execute_command("ACL", "SETUSER", "distlock", "reset", *rule)
        admin.execute_command("ACL", "LOG", "RESET")
        location = f"unix://distlock:password@{server.socket}?db=0&protocol={protocol}"
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": location}}
        return locks["default"]

    yield user
    locks.close()
    admin.execute_command("ACL", "DELUSER", "distlock")


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_documented_rights_suffice(user, admin, kind, calls, protocol):
    """For all that locks and beats ask of a server; nothing is refused, not even unnoticed."""
    backend = user(protocol=protocol)
    wrapped = calls(backend)
    first, second, given_up = ticket(), ticket(), ticket()
    assert isinstance(wrapped.acquire(first, queue=True), Grant)
    assert isinstance(wrapped.acquire(second, queue=True), LockInfo)
    assert isinstance(wrapped.acquire(second, queue=True), LockInfo)  # a look
    assert wrapped.renew([(first, 60.0)]) == [True]
    assert wrapped.names() == ["name"]
    assert wrapped.look(["name"])[0].token == first.token
    assert wrapped.count_waiters(["name"]) == [1]
    assert wrapped.release(first) is True  # handed on
    assert second.bell.wait(5) is not False
    assert isinstance(wrapped.acquire(second, queue=True), Grant)
    assert wrapped.release(second, 30.0) is True
    assert wrapped.release(second, FORCED) is True
    given_up.unanswered = True
    wrapped.release(given_up)
    assert isinstance(wrapped.acquire(ticket(ttl=0.05), queue=False), Grant)
    now = RunStamp(at=2.0, host="here", token="t")
    assert backend.claim_run("entry", now, now, 10.0) is not None
    assert backend.find_runs(["entry"]) == [now]
    assert list(backend.runs()) == [("entry", now)]
    found = {finding.about: finding.level for finding in wrapped.check()}
    assert found["reachable"] is Level.OK
    assert "permissions" not in found
    refused = admin.execute_command("ACL", "LOG")
    if kind in ("redis-server", "redis-6.2"):  # they know no right for redis-py's telling its name
        refused = [entry for entry in refused if entry["object"] not in ("client", "client|setinfo")]
    assert refused == []


@pytest.mark.parametrize("right", ["evalsha", "set", "zadd", "scan"])
def test_a_right_that_is_missing_is_named(user, kind, calls, right):
    backend = calls(user(right))
    with pytest.raises(LockBackendError) as caught:
        backend.acquire(mine := ticket(), queue=False)
        backend.acquire(ticket(), queue=True)
        backend.release(mine)
        backend.names()
    assert "the user may not run this command or use this key; widen its ACL rule" in str(caught.value)
    if right == "scan" or kind in ("valkey", "redis-8"):  # the others do not tell it of a script
        assert f"'{right}'" in str(caught.value)


def test_a_key_that_is_not_allowed(user, settings, server):
    user()
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": {**entry, "KEY_PREFIX": "other"}}
    with pytest.raises(LockBackendError, match="may not run this command or use this key; widen its ACL rule"):
        lock("name").acquire()


class TestSentinels:
    def test_the_documented_rights_suffice(self, settings, calls):
        link = ["user default on nopass ~* &* +@all"]  # what the servers use among themselves
        mine = [f"user distlock {' '.join(documented('tls-and-acl.md'))} +client|setinfo"]
        at_sentinels = [f"user distlock {' '.join(documented('sentinel.md'))}"]
        with Watched(server=link + mine, sentinel=link + at_sentinels) as watched:
            options = {**watched.options, "sentinel_kwargs": {"username": "distlock", "password": "password"}}
            location = f"redis://distlock:password@{SERVICE}/0"
            entry = {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}
            settings.DISTRIBUTED_LOCKS = {"default": entry}
            warm_up(calls)
            for process in [*watched.servers, *watched.sentinels]:
                with process.client() as admin:
                    assert admin.execute_command("ACL", "LOG") == []
            for sentinel in watched.sentinels:
                with sentinel.client() as admin:
                    admin.execute_command("ACL", "SETUSER", "distlock", "-sentinel|master")
            locks.close()
            settings.DISTRIBUTED_LOCKS = {"default": {**entry, "WAIT": 0}}
            with pytest.raises(LockBackendError) as caught:
                calls(lock("name")).acquire()
            assert "or its ACL rule; correct DISTRIBUTED_LOCKS['default']['OPTIONS']['sentinel_kwargs']" in str(
                caught.value
            )
            assert "sentinel|master" in str(caught.value)
            locks.close()


class TestANewPassword:
    @pytest.fixture
    def server(self, own_valkey):
        return own_valkey("--requirepass", "old")

    @pytest.fixture(autouse=True)
    def _close(self, monkeypatch):
        monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of the process, by URL
        yield
        locks.close()

    def change(self, server):
        with redis.Redis(unix_socket_path=str(server.socket), password="old") as admin:
            admin.config_set("requirepass", "new")

    def test_what_is_connected_works_on(self, server, settings, calls):
        entry = {"BACKEND": REDIS, "LOCATION": f"unix://:old@{server.socket}?db=0"}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        held = lock("name", ttl=1.5)
        calls(held).acquire()
        locks["default"].look(["name"])
        self.change(server)
        with redis.Redis(unix_socket_path=str(server.socket), password="new") as admin:
            eventually(lambda: admin.pttl("lock:name") < 1200)
            eventually(lambda: admin.pttl("lock:name") > 1200)  # renewed
        calls(held).release()
        locks["default"]._wire.close()
        with pytest.raises(LockBackendError, match="the server refused the user or password; correct .*LOCATION"):
            lock("name").acquire()
        settings.DISTRIBUTED_LOCKS = {"default": {**entry, "LOCATION": f"unix://:new@{server.socket}?db=0"}}
        with lock("name"):
            pass

    def test_a_provider_is_asked_for_each_connection(self, server, settings, calls):
        class Provider(redis.CredentialProvider):
            password = "old"

            def get_credentials(self):
                return (self.password,)

        provider = Provider()
        options = {"CONNECTION_POOL_KWARGS": {"credential_provider": provider}}
        location = f"unix://{server.socket}?db=0"
        settings.CACHES = {
            "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}
        }
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "cache:default"}}
        held = lock("name")
        calls(held).acquire()
        self.change(server)
        provider.password = "new"
        locks["default"]._wire.close()
        assert locks["default"].look(["name"])[0] is not None
        asyncio.run(lock("name").alocked())  # a connection of its own
        calls(held).release()
        assert not lock("name").locked()
