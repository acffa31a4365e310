"""The Lua scripts name each command and each key in the call itself, as the proxies of managed services demand.

Such a proxy reads the text of a script, or each call that it makes, and refuses what it cannot tell the node of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from django_distlock.backends.redis import operations
from django_distlock.backends.redlock import messages

SCRIPTS = {
    f"{backend} {name}": getattr(module, name)
    for backend, module in (("redis", operations), ("redlock", messages))
    for name in ("ACQUIRE", "RELEASE", "RENEW", "CLAIM_RUN")
    if hasattr(module, name)
}
WITHOUT_KEYS = {"TIME", "PUBLISH", "SPUBLISH"}  # a channel is no key
OF_KEYS_ALONE = {"EXISTS", "DEL"}
OTHERS = {
    "GET", "GETRANGE", "PEXPIRE", "PTTL", "SET", "SETRANGE",
    "ZADD", "ZRANGE", "ZRANK", "ZREM", "ZREMRANGEBYSCORE", "ZSCORE",
}  # fmt: skip


def code_of(text: str) -> str:
    """Without comments."""
    return re.sub(r"--[^\n]*", "", text)


def calls_in(code: str) -> Iterator[list[str]]:
    """The arguments of each call of a command, as they stand there."""
    for found in re.finditer(r"redis\.p?call\(", code):
        words, word, depth, quoted = [], "", 0, False
        for character in code[found.end() :]:
            if not quoted and character == ")" and depth == 0:
                break
            quoted ^= character == "'"
            depth += (not quoted) * ((character == "(") - (character == ")"))
            if character == "," and depth == 0 and not quoted:
                words.append(word.strip())
                word = ""
            else:
                word += character
        yield [*words, word.strip()]


def wrong_calls(text: str, declared: int) -> list[str]:
    """What a proxy could refuse."""
    code = code_of(text)
    wrong = [f"redis.{verb} is no call" for verb in re.findall(r"redis\.(\w+)(?!\w|\()", code)]
    wrong += [f"KEYS{rest}" for rest in re.findall(r"\bKEYS\b(?!\[\d\])(.{0,10})", code)]
    wrong += [f"KEYS[{index}]" for index in re.findall(r"KEYS\[(\d)\]", code) if not 1 <= int(index) <= declared]
    for command, *arguments in calls_in(code):
        verb = command.strip("'")
        if command != f"'{verb.upper()}'" or verb not in WITHOUT_KEYS | OF_KEYS_ALONE | OTHERS:
            wrong.append(command)
        keys = [] if verb in WITHOUT_KEYS else arguments if verb in OF_KEYS_ALONE else arguments[:1]
        wrong += [f"{verb} {key}" for key in keys if not re.fullmatch(r"KEYS\[\d\]", key)]
    return wrong


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_call_names_its_command_and_its_keys(name):
    script = SCRIPTS[name]
    keys = int(script.head.split(b"\r\n")[-2])
    text = script.text.decode()
    assert len([*calls_in(code_of(text))]) == code_of(text).count("redis.")
    assert not wrong_calls(text, keys)
    assert f"KEYS[{keys}]" in text


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
