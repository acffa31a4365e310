"""A proxy that refuses what managed services refuse, all of them at once, as managed_services.toml says."""

from __future__ import annotations

import asyncio
import hashlib
import re
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from django_distlock.backends.redis.keys import slot_of
from django_distlock.backends.redis.scripts import pack
from tests.support.lua_calls import wrong_calls
from tests.support.proxy import Passage, Proxy, Stream

REFUSALS = tomllib.loads(Path(__file__).with_name("managed_services.toml").read_text())["refusals"]
COMMANDS = {command: line["service"] for line in REFUSALS for command in line.get("commands", ())}
PUBLISH = re.compile(r"redis\.call\('S?PUBLISH', [^()]*\)")
OF_KEYS_ALONE = {"DEL", "EXISTS", "MGET", "TOUCH", "UNLINK"}

wrong_in = lru_cache(wrong_calls)


def service_with(rule: str) -> str:
    services: list[str] = [line["service"] for line in REFUSALS if line.get("rule") == rule]
    return services[0]


class StrictProxy(Proxy):
    """``refused``: what it answered with an error. It knows only the scripts that were loaded through it.

    ``publishes``: what scripts have in the place of a call of PUBLISH, ``{}``, such as ``({} and 0)``, which delivers
    the message and counts nobody. To be set before scripts are loaded.
    """

    def __init__(self, server: Path, folder: Path) -> None:
        super().__init__(server, folder)
        self.refused: list[str] = []
        self.publishes = ""
        self._scripts: dict[str, str] = {}

    def _passage(self, client: Stream, server: Stream) -> Passage:
        return StrictPassage(self, client, server)

    def passed(self, command: Sequence[bytes]) -> bytes:
        """What the server is sent in the place of the command: if it is refused, one that is answered so."""
        words = [part.decode(errors="replace") for part in command]
        verb = " ".join(words[:2] if words[0].upper() in ("SCRIPT", "CLIENT", "ACL", "CLUSTER") else words[:1]).upper()
        if verb in ("EVAL", "SCRIPT LOAD"):
            text = words[1 if verb == "EVAL" else 2]
            self._scripts[digest(text)] = text
        if verb == "EVALSHA" and words[1] not in self._scripts:
            return error_reply("NOSCRIPT No matching script.")
        if why := self._refusal(verb, words):
            self.refused.append(why)
            return error_reply(f"ERR {why}")
        if self.publishes and verb == "SCRIPT LOAD":
            return pack(*command[:2], self._published(words[2]))
        if self.publishes and verb == "EVALSHA":
            return pack(command[0], digest(self._published(self._scripts[words[1]])), *command[2:])
        return pack(*command)

    def _refusal(self, verb: str, words: Sequence[str]) -> str:
        if service := COMMANDS.get(verb) or COMMANDS.get(verb.split()[0]):
            return f"{service} does not know {verb}"
        keys: Sequence[str] = words[1:] if verb in OF_KEYS_ALONE else ()
        if verb in ("EVAL", "EVALSHA"):
            text, count = words[1] if verb == "EVAL" else self._scripts[words[1]], int(words[2])
            if count <= 0:
                return f"{service_with('scripts have keys')}: the number of keys can't be negative or zero"
            if wrong := wrong_in(text, count):
                return f"{service_with('keys are KEYS[n]')}: bad Lua script: {wrong[0]}"
            keys = words[3 : 3 + count]
        if len({slot_of(key) for key in keys}) > 1:
            return f"{service_with('one slot')}: keys of {verb} must be in the same slot"
        return ""

    def _published(self, script: str) -> str:
        return PUBLISH.sub(lambda call: self.publishes.format(call.group()), script)


class StrictPassage(Passage):
    """One connection, read command by command."""

    proxy: StrictProxy

    async def requests(self) -> None:
        reader, writer = self.client[0], self.server[1]
        while True:
            count = await self._number(reader)
            command = [await reader.readexactly(await self._number(reader) + 2) for _ in range(count)]
            writer.write(self.proxy.passed([part[:-2] for part in command]))

    @staticmethod
    async def _number(reader: asyncio.StreamReader) -> int:
        """How many parts a command has, or bytes a part."""
        return int((await reader.readuntil(b"\r\n"))[1:])


def digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def error_reply(text: str) -> bytes:
    """A command that the server answers with this error, in its turn."""
    return pack("EVAL", "return redis.error_reply(ARGV[1])", 0, text)
