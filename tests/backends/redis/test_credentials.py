"""Users and passwords that a credential provider of redis-py gives, and changes."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import redis
from django_redis.pool import ConnectionFactory
from redis.credentials import CredentialProvider

from django_distlock import InvalidLockBackend, LockBackendError, lock, locks
from django_distlock.backends.common.timing import Timing
from django_distlock.backends.redis.credentials import Credentials
from django_distlock.signals import lock_lost
from tests.support.credentials import RIGHTS, USER, Account, Asked, Managed, Pushing
from tests.support.interrupts import at_each_point
from tests.support.leases import lease_of, wait_for_renewal
from tests.support.programs import FORKS, in_a_fork
from tests.support.scripted import Scripted
from tests.support.sentinel import Watched, warm_up
from tests.support.stores import REDIS, REDIS_CLUSTER, REDLOCK
from tests.support.tools import PATIENCE, aeventually, eventually, renewer_of

pytestmark = pytest.mark.slow

CACHES = {"django": "django.core.cache.backends.redis.RedisCache", "django-redis": "django_redis.cache.RedisCache"}
OTHERS = ("default", "(superuser)")  # users of clients of the test, and of servers among themselves
EVERYWHERE = [f"name {number}" for number in range(50)]  # on all primaries of a Cluster
TTL = 5.0  # seconds; a third of it until a lease is renewed
KINDS = ("server", "master", "cluster", "quorum")


class Store(NamedTuple):
    """``entry``: of DISTRIBUTED_LOCKS, without a login. ``admins``: a client of each server."""

    entry: dict
    admins: list[redis.Redis]

    @property
    def is_quorum(self):
        return self.entry["BACKEND"] == REDLOCK

    @property
    def is_one_server(self):
        return len(self.admins) == 1

    def point(self, settings, provider, **options):
        options = {**self.entry.get("OPTIONS", {}), "credential_provider": provider, **options}
        settings.DISTRIBUTED_LOCKS = {"default": {**self.entry, "OPTIONS": options}}
        return locks["default"]

    @property
    def patience(self):
        """Options for many callers on a busy machine."""
        timeouts = {"node_timeout": 5.0} if self.is_quorum else {"socket_timeout": 10.0}
        return {**timeouts, "socket_connect_timeout": 10.0}

    @property
    def one_connection(self):
        """Options for one to each server, which is kept although an answer of a busy machine takes long."""
        return {**self.patience, **({} if self.is_quorum else {"max_connections": 1})}

    def logins(self):
        """The users of connections that send commands of locks, by server and number of the connection."""
        return {where: client["user"] for where, client in self._clients() if not is_subscribed(client)}

    def logins_of_all(self, backend):
        """When all servers that it asks were asked; a quorum answers before its last node is connected."""
        backend.look(EVERYWHERE)
        if self.is_quorum:
            eventually(lambda: backend.look(["name"]) and len(self.logins()) == len(self.admins))
        return self.logins()

    def subscribers(self):
        """The users of connections that wait for messages."""
        return [client["user"] for _, client in self._clients() if is_subscribed(client)]

    def _clients(self):
        for number, admin in enumerate(self.admins):
            for client in admin.client_list():
                if client["user"] not in OTHERS:
                    yield (number, client["id"]), client


def is_subscribed(client):
    return any(int(client.get(kind, 0)) for kind in ("sub", "ssub"))


@pytest.fixture(scope="module")
def watched():
    """The users "one" and "two" may ask the sentinel, too."""
    users = [f"user {user} >{user} {' '.join(RIGHTS)}" for user in ("one", "two")]
    with Watched(sentinels=1, sentinel=users) as watched:
        yield watched


# Both ask for the settings, which change back only after the backend was closed.


@pytest.fixture(params=KINDS)
def store(request, settings):
    yield from made(request.param, request)


@pytest.fixture
def server(request, settings):
    yield from made("server", request)


def made(kind, request):
    with ExitStack() as stack:

        def clients(*urls):
            found = [stack.enter_context(redis.Redis.from_url(url, decode_responses=True)) for url in urls]
            for client in found:
                client.flushall()
            return found

        match kind:
            case "server":
                url = request.getfixturevalue("valkey").url
                found = Store({"BACKEND": REDIS, "LOCATION": url}, clients(url))
            case "master":
                watched = request.getfixturevalue("watched")
                admins = [stack.enter_context(server.client()) for server in watched.servers]
                admins[0].flushall()
                found = Store({"BACKEND": REDIS, "OPTIONS": watched.options}, admins)
            case "cluster":
                cluster = request.getfixturevalue("valkey_cluster")
                cluster.flush()
                urls = [node.url for node in cluster.primaries]  # a replica is asked for slots, and then no more
                found = Store({"BACKEND": REDIS_CLUSTER, "LOCATION": urls}, [node.client for node in cluster.nodes])
            case "quorum":
                urls = [server.url for server in request.getfixturevalue("five_valkeys")[:3]]
                entry = {"BACKEND": REDLOCK, "LOCATION": urls, "OPTIONS": {"node_timeout": 1.0}}
                found = Store(entry, clients(*urls))
        yield found
        renewer = renewer_of(locks["default"])
        eventually(lambda: not renewer.is_cleaning)
        locks.close()


@pytest.fixture
def account(store):
    account = Account(store.admins)
    yield account
    account.close()


class Workers:
    """Threads and tasks that hand locks on to each other, each after it was renewed."""

    def __init__(self, names):
        self.is_over, self.problems, self.grants = threading.Event(), [], []
        self._names = names
        self._threads = [threading.Thread(target=self._work, args=(name,)) for name in names]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._work_in_tasks())))

    def __enter__(self):
        lock_lost.connect(self._note_loss)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.is_over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
        lock_lost.disconnect(self._note_loss)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for_grants(self):
        """One of each name. A machine may be so busy that the next change came before they were back from the last."""
        before = len(self.grants)
        eventually(lambda: self.problems or len({name for name, _ in self.grants[before:]}) == len(self._names))

    @property
    def have_all_been_served(self):
        """Each name was held by a thread and by a task."""
        return len({*self.grants}) == 2 * len(self._names)

    def _note_loss(self, lease, **_):
        self.problems.append(f"{lease.name} was lost")

    def _work(self, name):
        while not self.is_over.is_set():
            try:
                with lock(name, ttl=TTL, wait=PATIENCE) as lease:
                    self.grants.append((name, "thread"))
                    wait_for_renewal(lease)
            except Exception as error:
                self.problems.append(error)

    async def _work_in_tasks(self):
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._work_in_task(name))

    async def _work_in_task(self, name):
        while not self.is_over.is_set():
            try:
                async with lock(name, ttl=TTL, wait=PATIENCE) as lease:
                    self.grants.append((name, "task"))
                    until = lease.remaining + time.monotonic()
                    await aeventually(lambda until=until: lease.remaining + time.monotonic() > until + 0.01)
            except Exception as error:
                self.problems.append(error)


class TestAPasswordThatChanges:
    @pytest.mark.seconds(6)
    def test_no_lock_is_lost(self, store, account, settings):
        """Renewed and handed on, while each second all are thrown out and the password changes on their way back."""
        store.point(settings, Asked(account, seconds=0.05), **store.patience)
        number, changes = (20, 3) if store.is_one_server else (10, 2)
        with Workers([f"name {name}" for name in range(number)]) as workers:
            for _ in range(changes):
                workers.is_over.wait(1)
                account.throw_out()
                time.sleep(0.02)
                account.change()
                account.throw_out()
                workers.wait_for_grants()
            eventually(lambda: workers.problems or workers.have_all_been_served, 2 * PATIENCE)
        assert workers.problems == []
        assert account.asked > changes

    @pytest.mark.seconds(5)
    def test_and_is_streamed_no_lock_is_lost(self, store, account, settings):
        class Streaming(Pushing):
            def get_credentials(self):
                return USER, account.ask()

        provider = Streaming(USER, "")
        store.point(settings, provider, **store.patience)
        with Workers([f"name {name}" for name in range(10)]) as workers:
            for _ in range(2):
                workers.is_over.wait(1)
                account.change()
                provider.push(USER, account.password)
                workers.wait_for_grants()
            eventually(lambda: workers.problems or workers.have_all_been_served, 2 * PATIENCE)
        assert workers.problems == []

    def test_that_of_connections_that_stand_matters_no_more(self, server, settings, calls):
        account = Account(server.admins)
        server.point(settings, Asked(account))
        held = lock("name", ttl=3)
        calls(held).acquire()
        for _ in range(2):
            account.change()
            wait_for_renewal(lease_of(held))
        calls(held).release()

    def test_it_is_asked_for_anew_where_it_changed_just_now(self, store, account, settings, calls):
        """On its way from the provider to the server."""
        changes = iter([account.change])

        class Late(Asked):
            def get_credentials(self):
                said = super().get_credentials()
                for change in changes:
                    change()
                return said

        store.point(settings, Late(account))
        warm_up(calls)
        assert next(changes, None) is None
        assert account.asked >= 2

    def test_one_that_is_wrong_for_good_is_told_after_two_questions(self, store, account, settings, calls):
        asked = []

        class Wrong(CredentialProvider):
            def get_credentials(self):
                asked.append(1)
                return USER, "wrong"

        backend = store.point(settings, Wrong())
        with pytest.raises(LockBackendError) as caught:
            calls(lock("name", wait=PATIENCE, ttl=1)).acquire()
        assert caught.value.is_final
        where = "DISTRIBUTED_LOCKS['default']['OPTIONS']['credential_provider']"
        assert f"the server refused the user or password; correct {where}" in str(caught.value)
        assert len(asked) >= 2
        assert len(asked) == 2 or not store.is_one_server
        assert backend.outages() == []


@contextmanager
def users(admins):
    """ "one" and "two", who have their names for passwords."""
    for admin in admins:
        for user in ("one", "two"):
            admin.execute_command("ACL", "SETUSER", user, f">{user}", *RIGHTS)
    yield
    for admin in admins:
        admin.execute_command("ACL", "DELUSER", "one", "two")


class TestAToken:
    """That a provider streams, of another user, so that the server shows who was told."""

    @pytest.fixture(autouse=True)
    def users(self, store):
        with users(store.admins):
            eventually(lambda: not (store.logins() or store.subscribers()))  # those of tests before
            yield

    def test_is_told_to_the_server_on_connections_that_stand(self, store, settings, calls):
        provider = Pushing("one", "one")
        backend = calls(store.point(settings, provider, **store.one_connection))
        before = store.logins_of_all(backend)
        assert {*before.values()} == {"one"}
        provider.login = "two", "two"
        provider.push("two", "two")
        backend.look(EVERYWHERE)

        def are_all_told():
            if store.is_quorum:
                backend.look(EVERYWHERE)  # its last node is heard by a loop that runs
            return store.logins() == dict.fromkeys(before, "two")

        eventually(are_all_told)

    def test_that_comes_while_a_connection_opens_is_told_on_it(self, store, settings, calls):
        class Hasty(Pushing):
            def get_credentials(self):
                said, self.login = self.login, ("two", "two")
                self.push("two", "two")
                return said

        store.point(settings, Hasty("one", "one"))
        warm_up(calls)
        assert {*store.logins().values()} == {"two"}

    def test_is_told_to_the_server_where_its_messages_come_from(self, store, settings, calls):
        """Whoever waits there is handed the lock, also when the former user is no more."""
        if store.is_quorum:
            pytest.skip("nobody is sent messages there")
        provider = Pushing("one", "one")
        store.point(settings, provider)
        held, waiting = lock("name", ttl=PATIENCE), lock("name", wait=PATIENCE)
        held.acquire()
        with ThreadPoolExecutor(1) as threads:
            waiter = threads.submit(calls(waiting).acquire)
            eventually(lambda: any(store.subscribers()))
            assert {*store.subscribers()} == {"one"}
            provider.login = "two", "two"
            provider.push("two", "two")
            eventually(lambda: {*store.subscribers()} == {"two"})
            for admin in store.admins:
                admin.execute_command("ACL", "SETUSER", "one", "off")
                admin.execute_command("CLIENT", "KILL", "USER", "one")
            held.release()
            assert waiter.result(PATIENCE)
        calls(waiting).release()

    def test_that_the_server_refuses_costs_a_connection(self, store, settings, calls):
        provider = Pushing("one", "one")
        backend = store.point(settings, provider, **store.one_connection)
        before = store.logins_of_all(calls(backend))
        provider.push("two", "wrong")
        calls(backend).look(EVERYWHERE)
        eventually(lambda: not {*before} & {*store.logins()})
        assert {*store.logins().values()} == {"one"}
        assert backend.outages() == []


def test_a_token_is_told_by_redis_py_where_we_do_not_read_replies_ourselves(server, settings, calls):
    """As by RESP3."""
    provider = Pushing("one", "one")
    location = f"{server.entry['LOCATION']}&protocol=3"
    with users(server.admins):
        Store({**server.entry, "LOCATION": location}, []).point(settings, provider, max_connections=1)
        warm_up(calls)
        [connection] = server.logins()
        provider.push("two", "two")
        warm_up(calls)
        assert server.logins() == {connection: "two"}


class TestSentinels:
    """They have users of their own."""

    @pytest.fixture
    def sentinel(self, watched, settings):
        with watched.sentinels[0].client() as sentinel:
            yield sentinel
        locks.close()

    def point(self, settings, watched, provider):
        options = {**watched.options, "sentinel_kwargs": {"credential_provider": provider}}
        settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "OPTIONS": options}}

    def users_at(self, sentinel):
        return {client["user"] for client in sentinel.client_list()} - {"default"}

    def test_are_told_what_is_streamed(self, watched, sentinel, settings, calls):
        provider = Pushing("one", "one")
        self.point(settings, watched, provider)
        warm_up(calls)
        eventually(lambda: self.users_at(sentinel) == {"one"})
        provider.login = "two", "two"
        provider.push("two", "two")
        eventually(lambda: self.users_at(sentinel) == {"two"})
        warm_up(calls)

    def test_take_a_dotted_path_as_well(self, watched, sentinel, settings, calls):
        self.point(settings, watched, f"{__name__}.One")
        warm_up(calls)
        eventually(lambda: self.users_at(sentinel) == {"one"})

    def test_refuse_what_is_wrong_for_good(self, watched, sentinel, settings, calls):
        self.point(settings, watched, Pushing("one", "two"))
        with pytest.raises(LockBackendError, match="the sentinels refuse the user or password") as caught:
            calls(lock("name", wait=PATIENCE)).acquire()
        assert caught.value.is_final


class One(CredentialProvider):
    def get_credentials(self):
        return "one", "one"


def at_cache(settings, location, kind, options, **own):
    settings.CACHES = {"default": {"BACKEND": CACHES[kind], "LOCATION": location, "OPTIONS": options}}
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": "cache:default", "OPTIONS": own}}
    return locks["default"]


@pytest.mark.parametrize("kind", ["django", "django-redis"])
def test_a_cache_with_a_password_leaves_nothing_to_ask_for(settings, monkeypatch, kind):
    monkeypatch.setattr(ConnectionFactory, "_pools", {})
    with pytest.raises(InvalidLockBackend, match=r"'LOCATION'\] names a user or a password, and OPTIONS has a 'cred"):
        at_cache(settings, "redis://one:one@nowhere.invalid", kind, {}, credential_provider=One())


class TestCaches:
    """Whose login locks take."""

    @pytest.fixture(autouse=True)
    def users(self, server, monkeypatch):
        monkeypatch.setattr(ConnectionFactory, "_pools", {})  # of django-redis in this process, by URL
        with users(server.admins):
            yield

    @pytest.mark.parametrize("kind", ["django", "django-redis"])
    @pytest.mark.parametrize("where", ["url", "options", "provider", "option of the locks"])
    def test_may_name_it_anywhere(self, valkey, server, settings, calls, kind, where):
        login = "one:one@" if where == "url" else ""
        options = {
            "options": {"username": "one", "password": "one"}, "provider": {"credential_provider": One()}
        }.get(where, {})  # fmt: skip
        options = options if kind == "django" else {"CONNECTION_POOL_KWARGS": options}
        own = {"credential_provider": f"{__name__}.One"} if where == "option of the locks" else {}
        at_cache(settings, f"unix://{login}{valkey.socket}?db=3", kind, options, **own)
        held, of_earlier_tests = calls(lock("name")), server.logins()  # which may still be closing
        assert held.acquire()
        assert {user for where, user in server.logins().items() if where not in of_earlier_tests} == {"one"}
        assert [client["db"] for client in server.admins[0].client_list() if client["user"] == "one"] == ["3"]
        held.release()

    def test_stream_to_locks_as_well(self, valkey, server, settings, calls):
        provider = Pushing("one", "one")
        at_cache(settings, valkey.url, "django", {"credential_provider": provider}, max_connections=1)
        warm_up(calls)
        [connection] = server.logins()
        provider.push("two", "two")
        warm_up(calls)
        assert server.logins() == {connection: "two"}

    def test_of_django_lend_the_first_of_their_servers(self, valkey, settings, calls):
        urls = [valkey.url, "redis://replica.invalid", "redis://another.invalid"]
        for location in (urls, ",".join(urls)):
            backend = at_cache(settings, location, "django", {"socket_timeout": None})
            assert backend.location.text == valkey.url
            assert backend.location.arguments["socket_timeout"] == 2.0
            warm_up(calls)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_asks_by_itself(server, settings, fork):
    """Where its parent was asking just then, and its thread is the parent's."""
    provider = Slow()
    backend = server.point(settings, provider, **server.patience)
    with ThreadPoolExecutor(1) as threads:
        look = threads.submit(backend.look, ["name"])
        eventually(provider.asked.is_set)

        def look_in_child():
            provider.may_answer.set()
            return lock("name").locked()

        assert in_a_fork(look_in_child, FORKS[fork]) == "False"
        provider.may_answer.set()
        assert look.result(PATIENCE) == [[]]


class TestATokenManager:
    """As that of redis-entraid, which goes on in an event loop: that which asked first, or a thread of its own."""

    @pytest.fixture
    def provider(self, server):
        account = Account(server.admins)
        provider = Managed(account)
        yield provider
        provider.stop()
        account.close()

    def renewals(self, server):
        return server.admins[0].info("commandstats")["cmdstat_auth"]["calls"]

    @pytest.mark.parametrize("first", ["thread", "task"])
    def test_renews_the_login_of_all_that_stands(self, server, provider, settings, first):
        """Also after the loop has ended in which it was asked for the first time."""
        server.point(settings, provider, max_connections=1)

        if first == "task":
            asyncio.run(lock("name").alocked())
        lock("name").locked()
        before = self.renewals(server)
        [connection] = server.logins()

        def is_renewed():
            lock("name").locked()
            return self.renewals(server) >= before + 3

        eventually(is_renewed)
        assert [*server.logins()] == [connection]

    def test_streams_to_tasks(self, server, provider, settings):
        server.point(settings, provider, max_connections=1)

        async def work():
            await lock("name").alocked()
            before = self.renewals(server)
            [connection] = server.logins()
            while self.renewals(server) < before + 3:
                await lock("name").alocked()
                await asyncio.sleep(0.01)
            assert [*server.logins()] == [connection]

        asyncio.run(asyncio.wait_for(work(), PATIENCE))

    def test_that_awaits_its_callbacks_is_served_too(self, server, provider, settings):
        """As where another client of redis-py has asked it in its loop before."""
        server.point(settings, provider, max_connections=1)

        async def work():
            await provider.get_credentials_async()
            await asyncio.to_thread(lock("name").locked)
            before = self.renewals(server)
            while self.renewals(server) < before + 3:
                await asyncio.to_thread(lock("name").locked)
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(work(), PATIENCE))


class Slow(CredentialProvider):
    """Has no answer until it may."""

    def __init__(self):
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def get_credentials(self):
        self.asked.set()
        assert self.may_answer.wait(2 * PATIENCE)
        return ("default", "")


class TestAProviderThatFails:
    def test_is_named(self, store, settings, calls):
        class Failing(CredentialProvider):
            def get_credentials(self):
                raise RuntimeError("no service")

        backend = store.point(settings, Failing(), socket_connect_timeout=1.0)

        def named():
            """On a busy machine, there may not be enough time to ask it, or who knows where the server is."""
            with pytest.raises(LockBackendError) as caught:
                calls(lock("name", wait=0)).acquire()
            assert not caught.value.is_final
            return "RuntimeError: no service" in str(caught.value) and caught.value

        for _ in range(3):
            error = eventually(named)
            where = "DISTRIBUTED_LOCKS['default']['OPTIONS']['credential_provider']"
            assert f"no user and password came from the credential provider, see {where}" in str(error)
            assert backend.outages() == [], "the server is not to blame"

    @pytest.mark.parametrize("said", [None, "password", (), ("user", "password", "more")])
    def test_by_what_it_says(self, server, settings, calls, said):
        class Odd(CredentialProvider):
            def get_credentials(self):
                return said

        server.point(settings, Odd())
        with pytest.raises(LockBackendError, match=r"it gives \(user, password\) or \(password,\), and not") as caught:
            calls(lock("name", wait=0)).acquire()
        assert "more" not in str(caught.value)

    def test_by_silence_costs_the_timeout_of_a_connection(self, store, settings, calls, monkeypatch):
        monkeypatch.setattr(Timing, "handshake", PATIENCE)  # that the threads of a quorum have to say so
        provider = Slow()
        others = {} if store.is_quorum else {"socket_timeout": 0.3, "failover_timeout": 0.3}
        backend = store.point(settings, provider, socket_connect_timeout=0.3, **others)
        for _ in range(3):
            with pytest.raises(LockBackendError, match="it gave no answer within 0.[1-3] s"):
                calls(lock("name", wait=0)).acquire()
        assert not provider.may_answer.is_set()
        assert len([thread for thread in threading.enumerate() if thread.name == "distlock-credentials"]) == 1
        assert backend.outages() == []
        provider.may_answer.set()

    def test_stops_no_event_loop(self, server, settings):
        provider = Slow()
        server.point(settings, provider)

        async def work():
            task = asyncio.create_task(lock("name").alocked())
            await aeventually(provider.asked.is_set)
            provider.may_answer.set()  # for which the loop has to run
            return await task

        assert asyncio.run(work()) is False

    def test_of_which_others_wait_is_asked_once(self, server, settings):
        provider = Slow()
        backend = server.point(settings, provider)
        with ThreadPoolExecutor(10) as threads:
            looks = [threads.submit(backend.look, ["name"]) for _ in range(10)]
            eventually(provider.asked.is_set)
            provider.may_answer.set()
            assert [look.result(PATIENCE) for look in looks] == [[[]]] * 10

    def test_is_asked_again_after_an_interrupt(self):
        """At any point, also where it is unknown whether a thread will ask."""

        class Quick(CredentialProvider):
            def get_credentials(self):
                return ("password",)

        asked = {}

        def ask(name):
            asked[name] = credentials = Credentials.of(Quick())
            assert credentials.login(PATIENCE).get_credentials() == ("password",)

        files = "backends/redis/credentials.py", "utils/shared_answer.py", "utils/threads.py"
        points = dict(at_each_point(ask, *files))
        assert len(points) >= 10
        for credentials in asked.values():
            assert credentials.login(PATIENCE).get_credentials() == ("password",)

    def test_that_others_have_asked_before_is_asked_anew_by_whom_it_misled(self):
        provider, answers = Slow(), []

        class Twice(CredentialProvider):
            def get_credentials(self):
                answers.append(f"answer {len(answers)}")
                said = answers[-1]
                if len(answers) == 1:
                    provider.get_credentials()
                return (said,)

        credentials = Credentials.of(Twice())
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(credentials.login, PATIENCE)
            eventually(provider.asked.is_set)
            assert credentials.login(PATIENCE, anew=True).get_credentials() == ("answer 1",)
            provider.may_answer.set()
            assert first.result().get_credentials() == ("answer 0",)

    def test_to_stream_is_told_in_the_log(self, server, settings, caplog):
        provider = Pushing("default", "")
        server.point(settings, provider)
        provider.on_failure(RuntimeError("no service"))
        assert "The credential provider Pushing of locks streams no new token: no service" in caplog.text


class TestAServerThatForgets:
    @pytest.mark.parametrize("kind", ["server", "cluster", "quorum"])
    def test_who_is_connected_is_asked_again_on_a_new_connection(self, settings, calls, kind):
        """Once, with what the provider says then."""
        with ExitStack() as stack:
            servers = [stack.enter_context(Scripted()) for _ in range(3 if kind == "quorum" else 1)]
            urls = [server.url.replace(":pw@", "") for server in servers]
            entry = {
                "server": {"BACKEND": REDIS, "LOCATION": urls[0]},
                "cluster": {"BACKEND": REDIS_CLUSTER, "LOCATION": urls[0]},
                "quorum": {"BACKEND": REDLOCK, "LOCATION": urls},
            }[kind]
            provider = Pushing("user", "first")
            backend = Store(entry, []).point(settings, provider)
            warm_up(calls)
            provider.login = "user", "second"
            logins = []

            def answer(words):
                if words[0] == b"AUTH":
                    logins.append(words[1:])
                elif words[0] == b"EVALSHA" and not logins:
                    return "NOAUTH Authentication required."
                return None

            for server in servers:
                server.answer = answer
            warm_up(calls)
            assert {*map(tuple, logins)} == {(b"user", b"second")}
            assert backend.outages() == []
            locks.close()

    @pytest.mark.parametrize("refusal", ["WRONGPASS invalid", "NOPERM this user may not run the 'auth' command"])
    def test_a_token_that_it_does_not_take_is_told_on_a_new_connection(self, settings, calls, refusal):
        with Scripted() as server:
            provider = Pushing("user", "first")
            store = Store({"BACKEND": REDIS, "LOCATION": server.url.replace(":pw@", "")}, [])
            store.point(settings, provider, **store.patience)
            warm_up(calls)
            provider.login = "user", "second"
            provider.push(*provider.login)
            logins = []

            def answer(words):
                if words[0] == b"AUTH":
                    logins.append(words[2])
                    return refusal if len(logins) == 1 else None
                return None

            server.answer = answer
            warm_up(calls)
            assert logins == [b"second", b"second"]
            locks.close()

    def test_again_and_again_is_told(self, settings, calls):
        with Scripted() as server:
            entry = {"BACKEND": REDIS, "LOCATION": server.url.replace(":pw@", "")}
            Store(entry, []).point(settings, Pushing("user", "password"))
            server.fail("NOAUTH Authentication required.", on=[b"EVALSHA"])
            with pytest.raises(LockBackendError, match="the server refused the user or password; correct .*provider"):
                calls(lock("name", wait=PATIENCE)).acquire()
            assert server.seen.count(b"EVALSHA") == 2
            locks.close()
