"""The Redis backend behind a proxy that refuses what managed services refuse by their documentation."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from django_distlock import LockBackendError, lock, locks
from django_distlock.testing.contract import LockBackendContract
from django_distlock.testing.runs_contract import RunsContract
from tests.support.programs import ROOT
from tests.support.stores import REDIS
from tests.support.strict_proxy import COMMANDS, REFUSALS, StrictProxy
from tests.support.tools import eventually, renewer_of

FORMER_SCRIPTS = ROOT / "tests" / "support" / "former_scripts"


@pytest.fixture
def strict_proxy(valkey, store, tmp_path_factory):
    with StrictProxy(valkey.socket, tmp_path_factory.mktemp("p")) as proxy:
        yield proxy


@pytest.fixture
def strict_locks(strict_proxy, settings):
    """``locks["default"]`` behind it. All keys lie in one slot."""
    settings.DISTRIBUTED_LOCKS = {
        "default": {"BACKEND": REDIS, "LOCATION": strict_proxy.url, "KEY_PREFIX": "{lock}"},
    }
    backend = locks["default"]
    renewer = renewer_of(backend)
    yield backend
    eventually(lambda: not renewer.is_cleaning)
    locks.close()


class TestContract(LockBackendContract, RunsContract):
    @pytest.fixture
    def backend(self, strict_locks, strict_proxy):
        yield strict_locks
        assert not [why for why in strict_proxy.refused if "CLIENT SETINFO" not in why]  # redis-py's own


def test_keys_in_several_slots_are_told_of(valkey_cluster, settings, calls):
    """By a server that would have to know all of them."""
    valkey_cluster.flush()
    settings.DISTRIBUTED_LOCKS = {"default": {"BACKEND": REDIS, "LOCATION": valkey_cluster.urls[0]}}
    with pytest.raises(LockBackendError, match=r"proxy before one, write .*\['KEY_PREFIX'\] in braces, '{lock}'"):
        calls(lock("name")).acquire()
    locks.close()


class TestProxy:
    @pytest.fixture
    def client(self, strict_proxy):
        with redis.Redis(unix_socket_path=str(strict_proxy.socket)) as client:
            yield client

    @pytest.mark.parametrize(
        ("text", "keys"),
        [
            # As scripts of this package were once: keys and commands in variables
            ("local LEASE = KEYS[1] return redis.call('GET', LEASE)", ["a"]),
            ("local verb = 'SPUBLISH' return redis.call(verb, 'channel', 'text')", ["a"]),
            ("return redis.call('GET', 'lock:' .. ARGV[1])", ["a"]),
            ("return redis.call('GET', KEYS[2])", ["a"]),
            ("return redis.call('CONFIG', 'GET', '*')", ["a"]),
            ("return 1", []),
            ("return redis.call('EXISTS', KEYS[1], KEYS[2])", ["a", "b"]),
        ],
    )
    def test_scripts_are_refused(self, client, text, keys):
        with pytest.raises(ResponseError):
            client.eval(text, len(keys), *keys)
        sha = client.script_load(text)
        with pytest.raises(ResponseError, match="^(Alibaba Cloud|Amazon|Dragonfly)"):
            client.evalsha(sha, len(keys), *keys)

    @pytest.mark.parametrize("path", sorted(FORMER_SCRIPTS.glob("*.lua")), ids=lambda path: path.stem)
    def test_scripts_that_keep_keys_in_variables_are_refused(self, client, path):
        """Those of commit b3cd76a, before this package wrote each key into the call."""
        sha = client.script_load(path.read_text())
        keys = [f"{{lock}}{number}" for number in range(4)]
        with pytest.raises(ResponseError, match="^Alibaba Cloud Tair: bad Lua script: "):
            client.evalsha(sha, 4, *keys, *["1"] * 8)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_commands_are_refused(self, client, command):
        with pytest.raises(ResponseError, match=f"does not know {command}"):
            client.execute_command(*command.split(), "argument")

    def test_the_rest_passes_in_its_order(self, client):
        with client.pipeline(transaction=False) as pipeline:
            pipeline.set("{a}1", "x").mget("{a}1", "b").config_get("*").mget("{a}1", "{a}2")
            replies = pipeline.execute(raise_on_error=False)
        assert [replies[0], replies[3]] == [True, [b"x", None]]
        assert ["same slot" in str(replies[1]), "CONFIG" in str(replies[2])] == [True, True]

    def test_scripts_of_others_are_unknown(self, client, store):
        sha = store.script_load("return redis.call('GET', KEYS[1])")
        with pytest.raises(redis.exceptions.NoScriptError):
            client.evalsha(sha, 1, "a")

    def test_each_refusal_has_its_page(self):
        """Which is linked where users are told that the service is emulated."""
        told = (ROOT / "docs/topologies/managed.md").read_text(encoding="utf-8")
        emulated = " ".join(line for line in told.splitlines() if "| emulated" in line)
        for line in REFUSALS:
            assert line["documented"] in emulated, line
            assert {*line} in ({"service", "commands", "documented"}, {"service", "rule", "documented"})
            assert line["documented"].startswith("https://")
