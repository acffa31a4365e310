"""What ``manage.py locks`` prints."""

from __future__ import annotations

import io

from django.core.management import CommandError, call_command


def said(*arguments, code=0, **options):
    """What the command prints; it must end with that code."""
    out = io.StringIO()
    try:
        call_command("locks", *arguments, stdout=out, no_color=True, **options)
        ended = 0
    except CommandError as error:
        ended = error.returncode
        out.write(f"\n{error}")
    assert ended == code, out.getvalue()
    return out.getvalue()
