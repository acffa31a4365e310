"""Commands that speak the language of the project."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.utils.translation import gettext, override


class TranslatedCommand(BaseCommand):
    """Shows ``help``, which is English in the source, in the language of the project.

    If the encoding of the terminal or pipe lacks characters of that language, the whole command is in English.
    """

    def run_from_argv(self, argv: list[str]) -> None:
        with nullcontext() if self._can_be_written() else override(None):
            super().run_from_argv(argv)

    def _can_be_written(self) -> bool:
        try:
            gettext(self.help).encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            return False
        return True

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.description = gettext(self.help)
        return parser
