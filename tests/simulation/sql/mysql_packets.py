"""The bytes of the protocol of MySQL and MariaDB, from the side of the server."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

from .tables import Rows

VERSION = "5.5.5-10.11.19-MariaDB"  # as it says so in the handshake; the rest of the words, too, are of this version
CAPABILITIES = 0x0200 | 0x8000 | 0x2000 | 0x0008 | 0x0002 | 0x80000 | 0x0001  # protocol 4.1, FOUND_ROWS, no TLS
AUTOCOMMIT = 2
LONGLONG, VAR_STRING = 8, 253
BINARY, UTF8 = 63, 45
QUIT, QUERY, PING = 1, 3, 14

LITERAL = re.compile(rb"(_binary|\bX)?'((?:[^'\\]|\\.|'')*)'", re.DOTALL)
ESCAPES = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"Z": b"\x1a", b"t": b"\t", b"b": b"\b"}


def packet(number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number % 256]) + payload


def next_packet(buffer: bytes) -> tuple[bytes, bytes] | None:
    """The payload and what comes after it; None: it has not come whole yet."""
    end = 4 + int.from_bytes(buffer[:3], "little")
    return (buffer[4:end], buffer[end:]) if len(buffer) >= max(4, end) else None


def handshake(number: int) -> bytes:
    salt = b"s" * 20
    return packet(
        0,
        b"\x0a" + VERSION.encode() + b"\0" + struct.pack("<I", number) + salt[:8] + b"\0"
        + struct.pack("<HBHHB", CAPABILITIES & 0xFFFF, UTF8, AUTOCOMMIT, CAPABILITIES >> 16, 21)
        + b"\0" * 10 + salt[8:] + b"\0mysql_native_password\0",
    )  # fmt: skip


def ok(number: int, count: int = 0, status: int = AUTOCOMMIT) -> bytes:
    return packet(number, b"\0" + _length(count) + b"\0" + struct.pack("<HH", status, 0))


def failure(number: int, code: int, state: str, text: str) -> bytes:
    """Before the handshake it has no SQLSTATE."""
    return packet(number, b"\xff" + struct.pack("<H", code) + f"{f'#{state}' if number else ''}{text}".encode())


def result(rows: Rows) -> bytes:
    """What answers a query."""
    end = b"\xfe" + struct.pack("<HH", 0, AUTOCOMMIT)
    kinds = [_kind([row[index] for row in rows.rows]) for index in range(len(rows.columns))]
    columns = [_column(name, *kind) for name, kind in zip(rows.columns, kinds, strict=True)]
    values = [b"".join(map(_value, row)) for row in rows.rows]
    payloads = [_length(len(columns)), *columns, end, *values, end]
    return b"".join(packet(number, payload) for number, payload in enumerate(payloads, 1))


def statement(text: bytes) -> tuple[str, list[Any]]:
    """The statement as it was before the driver put the values into it, and the values: bytes, texts and numbers."""
    parameters: list[Any] = []

    def found(literal: re.Match[bytes]) -> bytes:
        if literal[1] == b"X":
            parameters.append(bytes.fromhex(literal[2].decode()))
            return b"%s"
        value = re.sub(rb"\\(.)", lambda one: ESCAPES.get(one[1], one[1]), literal[2], flags=re.DOTALL)
        parameters.append(value if literal[1] else value.decode())
        return b"%s"

    return LITERAL.sub(found, text).decode(), parameters


def _kind(values: Sequence[Any]) -> tuple[int, int]:
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, int) for value in known):
        return LONGLONG, BINARY
    return VAR_STRING, BINARY if any(isinstance(value, bytes) for value in known) else UTF8


def _column(name: str, kind: int, charset: int) -> bytes:
    names = b"".join(map(_text, (b"def", b"", b"", b"", name.encode(), b"")))
    return names + b"\x0c" + struct.pack("<HIBHB", charset, 1024, kind, 0, 0) + b"\0\0"


def _value(value: Any) -> bytes:
    if value is None:
        return b"\xfb"
    return _text(value if isinstance(value, bytes) else str(value).encode())


def _text(value: bytes) -> bytes:
    return _length(len(value)) + value


def _length(number: int) -> bytes:
    if number < 251:
        return bytes([number])
    return b"\xfc" + struct.pack("<H", number) if number < 65536 else b"\xfd" + number.to_bytes(3, "little")
