"""What commands print."""

from __future__ import annotations

import io

from django.core.management import CommandError, call_command


def said_by(*arguments: str) -> str:
    """What any command prints, or why it refuses."""
    out = io.StringIO()
    try:
        call_command(*arguments, stdout=out, stderr=out, no_color=True)
    except CommandError as error:
        out.write(str(error))
    return out.getvalue()


def said(*arguments, code=0, command="locks", **options):
    """What it prints; it must end with that code."""
    out = io.StringIO()
    try:
        call_command(command, *arguments, stdout=out, no_color=True, **options)
        ended = 0
    except CommandError as error:
        ended = error.returncode
        out.write(f"\n{error}")
    assert ended == code, out.getvalue()
    return out.getvalue()
