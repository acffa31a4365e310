"""What a proxy of a managed service reads in a Lua script, and what it could refuse there.

Such a proxy reads the text of a script, or each call that it makes, and refuses what it cannot tell the node of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WITHOUT_KEYS = {"TIME", "PUBLISH", "SPUBLISH", "PUBSUB"}  # a channel is no key
OF_KEYS_ALONE = {"EXISTS", "DEL"}
OTHERS = {
    "GET", "GETRANGE", "PEXPIRE", "PEXPIREAT", "PTTL", "SET", "SETRANGE",
    "ZADD", "ZCARD", "ZRANGE", "ZRANK", "ZREM", "ZREMRANGEBYSCORE", "ZSCORE",
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
    wrong += [f"KEYS{rest}" for rest in re.findall(r"\bKEYS\b(?!\[\d+\])(.{0,10})", code)]
    wrong += [f"KEYS[{index}]" for index in re.findall(r"KEYS\[(\d+)\]", code) if not 1 <= int(index) <= declared]
    for command, *arguments in calls_in(code):
        verb = command.strip("'")
        if command != f"'{verb.upper()}'" or verb not in WITHOUT_KEYS | OF_KEYS_ALONE | OTHERS:
            wrong.append(command)
        keys = [] if verb in WITHOUT_KEYS else arguments if verb in OF_KEYS_ALONE else arguments[:1]
        wrong += [f"{verb} {key}" for key in keys if not re.fullmatch(r"KEYS\[\d+\]", key)]
    return wrong
