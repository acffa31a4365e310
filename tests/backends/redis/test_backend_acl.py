"""Users who may do no more than the documentation says that locks need, and a new password in the settings."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from django_distlock import LockBackendError, lock, locks
from django_distlock.runs import LastRun
from django_distlock.types import Grant, Level, LockInfo, Slot
from example_project.valkey import Valkey, binary
from tests.support import servers
from tests.support.leases import lease_of, wait_for_renewal
from tests.support.programs import ROOT
from tests.support.sentinel import SERVICE, Watched, warm_up
from tests.support.servers import program_of
from tests.support.stores import REDIS, REDIS_CLUSTER
from tests.support.tools import eventually, lock_request, locked_names

pytestmark = [pytest.mark.slow, pytest.mark.once]

PAGES = ROOT / "docs" / "topologies"
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
    first, second, given_up = lock_request(), lock_request(), lock_request()
    second.takes_by_message = True
    assert isinstance(wrapped.acquire(first, queue=True), Grant)
    assert isinstance(wrapped.acquire(second, queue=True), LockInfo)
    assert isinstance(wrapped.acquire(second, queue=True), LockInfo)  # a look
    assert wrapped.renew([(first, 60.0)]) == [True]
    assert locked_names(wrapped) == ["name"]
    assert wrapped.look(["name"])[0][0].token == first.token
    assert wrapped.count_waiters(["name"]) == [1]
    assert wrapped.release(first) is True  # handed on
    assert eventually(lambda: second.handed)
    assert isinstance(wrapped.acquire(second, queue=True), Grant)
    assert wrapped.release(second, 30.0) is True
    assert wrapped.release(second, force=True) is True
    given_up.in_doubt = True
    wrapped.release(given_up)
    assert isinstance(wrapped.acquire(lock_request(ttl=0.05), queue=False), Grant)
    now = LastRun(at=2.0, host="here", token="t")
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


def test_without_the_right_to_ask_who_listens_a_waiter_is_told_to_look(user, admin):
    backend = user("pubsub|numsub", "pubsub|shardnumsub")
    holder, waiter = lock_request(), lock_request()
    waiter.takes_by_message = True
    assert isinstance(backend.acquire(holder, queue=False), Grant)
    assert isinstance(backend.acquire(waiter, queue=True), LockInfo)
    kind, channel = waiter.inbox[0], waiter.inbox[1:]
    with admin.pubsub() as subscription:
        subscribe, hear = subscription.subscribe, subscription.get_message
        if kind == "T":
            subscribe, hear = subscription.ssubscribe, subscription.get_sharded_message
        subscribe(channel)
        eventually(hear)
        assert backend.release(holder) is True
        assert eventually(hear)["data"] == f"{waiter.token} 1 0 lock:name"
    assert isinstance(backend.acquire(waiter, queue=True), Grant)


def test_a_journal_needs_what_is_documented_for_it(user, admin, settings):
    user()
    entry = {**settings.DISTRIBUTED_LOCKS["default"], "JOURNAL": 5}
    settings.DISTRIBUTED_LOCKS = {"default": entry}
    backend = locks["default"]
    for ask in (backend.read_journal, lambda: backend.write_journal(["1 []"])):
        with pytest.raises(LockBackendError, match="widen its ACL rule") as raised:
            ask()
        assert raised.value.is_final
    [rights] = re.findall(r"With a \[journal\].* add `(.*?)`", (PAGES / "tls-and-acl.md").read_text())
    admin.execute_command("ACL", "SETUSER", "distlock", *rights.split())
    backend.write_journal(["1 []"])
    assert backend.read_journal() == ["1 []"]
    assert backend.waiters(["name"]) == [[]]
    assert list(backend.waited_for()) == []
    assert admin.ttl("lock|j") > 0


ASKED = {
    "acquire": lambda backend, mine: backend.acquire(lock_request("other"), queue=False),
    "wait": lambda backend, mine: backend.acquire(lock_request(), queue=True),
    "renew": lambda backend, mine: backend.renew([(mine, 90.0)]),
    "release": lambda backend, mine: backend.release(mine),
    "look": lambda backend, mine: backend.look(["name"]),
    "held": lambda backend, mine: list(backend.held()),
    "holders": lambda backend, mine: backend.holders([Slot("name"), Slot("other")]),
    "waiters": lambda backend, mine: backend.count_waiters(["name"]),
}
NEEDED = [
    ("acquire", "evalsha"), ("acquire", "set"), ("wait", "zadd"), ("renew", "pexpire"), ("release", "getrange"),
    ("look", "get"), ("held", "scan"), ("holders", "mget"), ("waiters", "zcard"),
]  # fmt: skip
IN_SCRIPTS = {"set", "zadd", "pexpire", "getrange"}


def assert_refused(call, right, backend, mine, *, is_named=True):
    """For good, and with the right that is to be granted."""
    with pytest.raises(LockBackendError) as caught:
        ASKED[call](backend, mine)
    assert caught.value.is_final
    assert "the user may not run this command or use this key; widen its ACL rule" in str(caught.value)
    if is_named:
        assert f"'{right}'" in str(caught.value)


@pytest.mark.parametrize(("call", "right"), NEEDED)
def test_a_right_that_is_missing_is_named(user, admin, kind, calls, call, right):
    backend = user()
    backend.acquire(mine := lock_request(ttl=60), queue=False)
    admin.execute_command("ACL", "SETUSER", "distlock", f"-{right}")
    is_named = right not in IN_SCRIPTS or kind in ("valkey", "redis-8")  # the others do not tell it of a script
    assert_refused(call, right, calls(backend), mine, is_named=is_named)


def test_a_check_names_a_right_that_is_missing(user, calls):
    [found] = [finding for finding in calls(user("evalsha")).check() if finding.level is Level.ERROR]
    assert "widen its ACL rule" in found.message
    assert "'evalsha'" in found.message


@pytest.mark.parametrize("way", ["thread", "task"])
def test_whoever_waits_is_told_at_once_of_a_right_that_was_taken_away(user, admin, way):
    backend = user()
    backend.timing.look_interval = 0.2
    backend.acquire(lock_request(ttl=60), queue=False)

    def take_away():
        eventually(lambda: admin.zcard("lock|q:name") == 1)
        admin.execute_command("ACL", "SETUSER", "distlock", "-evalsha")

    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(take_away)
        with pytest.raises(LockBackendError, match="'evalsha'") as caught:
            handle = lock("name", wait=120)
            handle.acquire() if way == "thread" else asyncio.run(handle.aacquire())
        taken.result()
    assert caught.value.is_final


def test_a_key_that_is_not_allowed(user, settings, server):
    user()
    entry = settings.DISTRIBUTED_LOCKS["default"]
    settings.DISTRIBUTED_LOCKS = {"default": {**entry, "KEY_PREFIX": "other"}}
    with pytest.raises(LockBackendError, match="may not run this command or use this key; widen its ACL rule"):
        lock("name").acquire()


def assert_rights_are_needed(backend, clients):
    """On all servers alike."""

    def change(right):
        for client in clients:
            with client() as admin:
                admin.execute_command("ACL", "SETUSER", "distlock", right)

    mine = lock_request(ttl=60)
    assert isinstance(backend.acquire(mine, queue=False), Grant)
    for call, right in NEEDED:
        change(f"-{right}")
        assert_refused(call, right, backend, mine)
        change(f"+{right}")
    assert backend.release(mine)


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
            assert_rights_are_needed(calls(locks["default"]), [server.client for server in watched.servers])
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
            assert caught.value.is_final
            locks.close()


def test_in_a_cluster(settings, calls, valkey_cluster):
    rule = documented("cluster.md")
    valkey_cluster.flush()
    for node in valkey_cluster.nodes:
        node.client.execute_command("ACL", "SETUSER", "distlock", "reset", *rule)
    urls = [url.replace("//", "//distlock:password@") for url in valkey_cluster.urls]
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS_CLUSTER, "LOCATION": urls}}
    try:
        assert_rights_are_needed(
            calls(locks["default"]), [lambda node=node: node.client for node in valkey_cluster.nodes]
        )
    finally:
        locks.close()
        for node in valkey_cluster.nodes:
            node.client.execute_command("ACL", "DELUSER", "distlock")


class TestANewPassword:
    @pytest.fixture
    def server(self, own_valkey):
        return own_valkey("--requirepass", "old")

    @pytest.fixture(autouse=True)
    def _close(self):
        yield
        locks.close()

    def change(self, server):
        with redis.Redis(unix_socket_path=str(server.socket), password="old") as admin:
            admin.config_set("requirepass", "new")

    def test_what_is_connected_works_on(self, server, settings, calls):
        entry = {"BACKEND": REDIS, "LOCATION": f"unix://:old@{server.socket}?db=0"}
        settings.DISTRIBUTED_LOCKS = {"default": entry}
        held = lock("name", ttl=6)
        calls(held).acquire()
        locks["default"].look(["name"])
        self.change(server)
        wait_for_renewal(lease_of(held))
        calls(held).release()
        locks["default"].close()
        with pytest.raises(LockBackendError, match="the server refused the user or password; correct .*LOCATION"):
            lock("name").acquire()
        settings.DISTRIBUTED_LOCKS = {"default": {**entry, "LOCATION": f"unix://:new@{server.socket}?db=0"}}
        with lock("name"):
            pass
