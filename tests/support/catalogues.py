"""The catalogues of translations in ``django_distlock/locale``; ``make messages`` brings them up to date.

With Babel in the place of GNU gettext, because every environment of development can have it.
"""

from __future__ import annotations

from pathlib import Path

from babel.messages import Catalog
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

from tests.support.programs import ROOT

PACKAGE = ROOT / "django_distlock"
LOCALES = sorted(path.name for path in (PACKAGE / "locale").iterdir())
# As Django's makemessages knows them
KEYWORDS = {
    **dict.fromkeys(("_", "gettext", "gettext_lazy", "gettext_noop"), None),
    **dict.fromkeys(("ngettext", "ngettext_lazy"), (1, 2)),
    **dict.fromkeys(("pgettext", "pgettext_lazy"), ((1, "c"), 2)),
    "npgettext": ((1, "c"), 2, 3),
}


def path_of(locale: str, kind: str) -> Path:
    """``kind``: po or mo."""
    return PACKAGE / "locale" / locale / "LC_MESSAGES" / f"django.{kind}"


def in_source() -> Catalog:
    """What the package says, without translations."""
    found = Catalog(domain="django")
    for file, _, message, comments, context in extract_from_dir(
        PACKAGE, [("**.py", "python")], keywords=KEYWORDS, comment_tags=("Translators:",), strip_comment_tags=True
    ):
        found.add(message, locations=[(f"django_distlock/{file}", 0)], auto_comments=comments, context=context)
    return found


def catalogue(locale: str) -> Catalog:
    with path_of(locale, "po").open("rb") as file:
        return read_po(file, locale, domain="django")


def update(locale: str) -> int:
    """Bring new strings in, take stale ones out, and compile. Returns how many are not translated."""
    known = catalogue(locale)
    known.update(in_source(), no_fuzzy_matching=True, update_header_comment=False, update_creation_date=False)
    with path_of(locale, "po").open("wb") as file:
        write_po(file, known, width=120, ignore_obsolete=True, include_lineno=False)
    with path_of(locale, "mo").open("wb") as file:
        write_mo(file, known)
    return sum(not all(message.string if message.pluralizable else [message.string]) for message in known if message.id)


if __name__ == "__main__":
    for one in LOCALES:
        print(f"{one}: {update(one)} not translated")
