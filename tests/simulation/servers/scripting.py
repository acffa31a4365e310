"""Lua scripts, executed by the real Lua, with the errors that a server words."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type  # type: ignore[import-untyped]

from .commands import CONTAINERS, SPECS
from .resp import ServerError, Status

# As eval.c has it: an error becomes a table that knows its line.
_PRELUDE = """
return function(described)
  local function place()
    local level = 3
    local at = debug.getinfo(level, 'Sl')
    while at and at.source ~= '@user_script' do
      level = level + 1
      at = debug.getinfo(level, 'Sl')
    end
    return at and at.currentline
  end
  local function handler(err)
    local line = place()
    if type(err) == 'userdata' then err = described(err, line) end
    if type(err) ~= 'table' then err = {err = 'ERR ' .. tostring(err)} end
    err.line = line
    return err
  end
  local function make(text, modules)
    local globals = setmetatable(modules, {__index = function(_, name)
      local found = _G[name]
      if found == nil then error("Script attempted to access nonexistent global variable '" .. name .. "'", 2) end
      return found
    end})
    local chunk, problem = loadstring('return function(KEYS, ARGV, redis) ' .. text .. '\\nend', '@user_script')
    if not chunk then return problem end
    return setfenv(chunk, globals)()
  end
  local function run(script, keys, arguments, redis)
    local is_done, value = xpcall(function() return script(keys, arguments, redis) end, handler)
    return is_done, value
  end
  return {make = make, run = run}
end
"""

lua = LuaRuntime(unpack_returned_tuples=False, encoding="latin-1")


class _InLua(Exception):
    """An error of a library of Lua."""


def _described(error: Exception, line: int | None) -> Any:
    """As Lua has it in its place."""
    if isinstance(error, ServerError):
        return lua.table_from({"err": str(error)})
    if isinstance(error, _InLua):
        return lua.table_from({"err": f"ERR user_script:{line}: {error}"})
    return lua.table_from({"failure": error})  # of the model itself


def _decode(text: str) -> Any:
    try:
        return _as_lua(json.loads(text.encode("latin-1")), is_json=True)
    except ValueError as error:
        raise _InLua(f"Expected value but found invalid token at character {getattr(error, 'pos', 0) + 1}") from error


_null = object()
_lua = lua.execute(_PRELUDE)(_described)


@cache
def compiled(text: str) -> Any:
    """The function of a script. Raises ServerError."""
    made = _lua.make(text, lua.table_from({"cjson": lua.table_from({"decode": _decode, "null": _null})}))
    if isinstance(made, str):
        raise ServerError(f"ERR Error compiling script (new function): {made}")
    return made


class Scripts:
    """``call(name, *arguments)`` executes a command; its ServerErrors become errors of Lua."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._redis = lua.table_from({"call": self._execute, "pcall": self._try})

    def run(self, text: str, keys: list[str], arguments: list[str]) -> Any:
        """The reply, with texts as bytes. Raises ServerError."""
        is_done, value = _lua.run(compiled(text), lua.table(*keys), lua.table(*arguments), self._redis)
        if not is_done and (failure := value["failure"]) is not None:
            raise failure
        if not is_done:
            raise ServerError(_worded(value))
        return _as_reply(value)

    def _try(self, *words: Any) -> Any:
        try:
            return self._execute(*words)
        except ServerError as error:
            return lua.table_from({"err": str(error)})

    def _execute(self, *words: Any) -> Any:
        if not words:
            raise ServerError("ERR Please specify at least one argument for this call")
        name, *arguments = map(_as_argument, words)
        name = name.lower()
        if name in CONTAINERS and arguments:
            name, arguments = f"{name}|{arguments[0].lower()}", arguments[1:]
        if (spec := SPECS.get(name)) is None:
            raise ServerError("ERR Unknown command called from script")
        if not spec.allows(len(words)):
            raise ServerError("ERR Wrong number of args calling command from script")
        if "noscript" in spec.flags:
            raise ServerError("ERR This Valkey command is not allowed from script")
        return _as_lua(self._call(name, *arguments))


def _worded(error: Any) -> str:
    text = error["err"]
    return f"{text} script: on @user_script:{error['line']}." if error["line"] else str(text)


def _as_argument(value: Any) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _as_lua(value: Any, *, is_json: bool = False) -> Any:
    match value:
        case None:
            return _null if is_json else False
        case Status():
            return lua.table_from({"ok": str(value)})
        case float() if not is_json:
            return f"{value:.17g}"
        case str() if is_json:
            return value.encode().decode("latin-1")
        case list() | tuple():
            return lua.table_from([_as_lua(part, is_json=is_json) for part in value])
        case dict():
            return lua.table_from({key: _as_lua(part, is_json=is_json) for key, part in value.items()})
    return value


def _as_reply(value: Any) -> Any:
    match value:
        case None | False:
            return None
        case True:
            return 1
        case int() | float():
            return int(value)
        case str():
            return value.encode("latin-1")
    if lua_type(value) != "table":
        return None
    if (text := value["err"]) is not None:
        raise ServerError(text)
    if (text := value["ok"]) is not None:
        return Status(text)
    replies: list[Any] = []
    while (part := value[len(replies) + 1]) is not None:
        replies.append(_as_reply(part))
    return replies
