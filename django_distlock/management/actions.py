"""Actions of a command, such as ``list`` and ``show`` of ``manage.py locks``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _SubParsersAction
from difflib import get_close_matches
from typing import Any


class AnyWord(dict[str, ArgumentParser]):
    """The parsers of the actions, for argparse. Every word is a valid choice, because it may be a prefix."""

    def __contains__(self, word: object) -> bool:
        return True


class Actions(_SubParsersAction):  # type: ignore[type-arg]
    """The actions of the command. Another word is the prefix for ``list``, unless it looks like a misspelt action."""

    def add_parser(self, name: str, **kwargs: Any) -> ArgumentParser:
        parser: ArgumentParser = super().add_parser(name, **kwargs)
        self.choices = AnyWord({**self.choices, name: parser})
        return parser

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        first, actions = values[0], list(self.choices)
        if first not in actions:
            if meant := get_close_matches(first, actions, n=1, cutoff=0.8):
                parser.error(f"There is no action {first!r}: say {meant[0]}, or list {first} for names that begin so.")
            values = ["list", *values]
        super().__call__(parser, namespace, values, option_string)
