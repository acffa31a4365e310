"""The Lua scripts name each command and each key in the call itself, as the proxies of managed services demand."""

from __future__ import annotations

import pytest

from django_distlock.backends.redis import operations
from django_distlock.backends.redlock import messages
from tests.support.lua_calls import calls_in, code_of, wrong_calls

SCRIPTS = {
    f"{backend} {name}": getattr(module, name)
    for backend, module in (("redis", operations), ("redlock", messages))
    for name in ("ACQUIRE", "RELEASE", "RENEW", "RENEW_SLOT", "CLAIM_RUN", "EARS")
    if hasattr(module, name)
} | {"redis ACQUIRE_ALL": operations.acquire_all_script(4)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_call_names_its_command_and_its_keys(name):
    script = SCRIPTS[name]
    keys, text = script.keys, script.text.decode()
    assert len([*calls_in(code_of(text))]) == code_of(text).count("redis.")
    assert not wrong_calls(text, keys)
    assert f"KEYS[{keys}]" in text or name == "redis EARS"  # whose key only says to which node it goes


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("redis.call('GET', KEYS[1])", []),
        ("redis.call('SET', KEYS[1], string.format('%d', a, (b)), 'PX', 1) -- redis.call(verb)", []),
        ("redis.call('EXISTS', KEYS[1], KEYS[2])", []),
        ("redis.call('EXISTS', KEYS[1], QUEUE)", ["EXISTS QUEUE"]),
        ("redis.call('get', KEYS[1])", ["'get'"]),
        ("redis.call(verb, KEYS[1])", ["verb"]),
        ("redis.call('GET', LEASE)", ["GET LEASE"]),
        ("redis.call('GET', 'lock:' .. ARGV[1])", ["GET 'lock:' .. ARGV[1]"]),
        ("redis.call('GET', KEYS[3])", ["KEYS[3]"]),
        ("redis.call('GET', unpack(KEYS))", ["KEYS))", "GET unpack(KEYS)"]),
        ("local call = redis.call", ["redis.call is no call"]),
        ("redis.call('CONFIG', 'GET')", ["'CONFIG'", "CONFIG 'GET'"]),
    ],
)
def test_what_is_wrong(text, wrong):
    assert wrong_calls(text, 2) == wrong
