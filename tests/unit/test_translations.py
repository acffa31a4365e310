"""The translations: each catalogue has what the package says, whole, and with the placeholders of the source."""

from __future__ import annotations

import json
import re
import string
import sys
from collections import Counter
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from babel.messages import Message
from babel.messages.mofile import read_mo
from django.core.management import call_command, load_command_class
from django.test import RequestFactory
from django.utils import translation
from django.utils.translation import to_language

from django_distlock import distributed_lock, lock
from django_distlock.decorators.answers import BUSY, respond
from django_distlock.testing import held_elsewhere
from tests.support.catalogues import LOCALES, catalogue, in_source, path_of
from tests.support.programs import ROOT

LANGUAGES = [to_language(locale) for locale in LOCALES]


def placeholders(text: str) -> Counter[str]:
    """Those of ``%`` and of ``str.format``. Raises ValueError for one that is broken."""
    if "%" in text and re.search(r"%\(", text):
        named = re.findall(r"%\(\w+\)[dsr]", text)
        if len(named) != text.count("%"):
            raise ValueError(f"a % begins no placeholder: {text}")
        return Counter(named)
    return Counter(f"{{{field}}}" for _, field, _, _ in string.Formatter().parse(text) if field is not None)


def forms(message: Message) -> list[str]:
    return [*message.string] if message.pluralizable else [message.string]


def differs(message: Message) -> bool:
    """Whether a form has other placeholders than the source. A form for one may leave out the count, as the source."""
    ids = [*message.id] if message.pluralizable else [message.id]
    allowed = [placeholders(text) for text in ids]
    return any(placeholders(form) not in allowed[-1:] + allowed[: len(forms(message)) > 1] for form in forms(message))


@pytest.fixture(scope="module")
def said() -> set[object]:
    """What the package says, with its contexts."""
    return {(message.context, message.id) for message in in_source() if message.id}


@pytest.mark.parametrize("locale", LOCALES)
def test_a_catalogue_has_what_the_source_says_and_no_more(locale: str, said: set[object]) -> None:
    """``make messages`` brings in what is new, and takes out what is stale."""
    assert {(message.context, message.id) for message in catalogue(locale) if message.id} == said
    assert not catalogue(locale).obsolete


@pytest.mark.parametrize("locale", LOCALES)
def test_every_string_is_translated(locale: str) -> None:
    found = catalogue(locale)
    for message in found:
        if message.id:
            assert all(form.strip() for form in forms(message)), message.id
            assert not message.fuzzy, message.id
            assert len(forms(message)) == (found.num_plurals if message.pluralizable else 1), message.id


@pytest.mark.parametrize("locale", LOCALES)
def test_placeholders_are_those_of_the_source(locale: str) -> None:
    assert [message.id for message in catalogue(locale) if message.id and differs(message)] == []


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("%(name)s is free", "frei"),
        ("%(name)s is free", "%(nam)s ist frei"),
        ("%(name)s is free", "%(name)d ist frei"),
        ("longest {time}", "am längsten {zeit}"),
        ("longest {time}", "am längsten time"),
        (("%(count)d lock", "%(count)d locks"), ("%(count)d Sperre", "Sperren")),
    ],
)
def test_other_placeholders_are_found(source: str, translated: str) -> None:
    assert differs(Message(source, translated))


@pytest.mark.parametrize("text", ["% (name)s ist frei, %(name)s", "%(name) ist frei", "am längsten {time"])
def test_broken_placeholders_are_found(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        placeholders(text)


@pytest.mark.parametrize("locale", LOCALES)
def test_what_is_compiled_is_what_is_written(locale: str) -> None:
    with path_of(locale, "mo").open("rb") as file:
        compiled = read_mo(file)
    written = catalogue(locale)
    ids = [(message.id, message.context) for message in written if message.id]
    assert len(compiled) == len(ids)
    for one, context in ids:
        assert forms(compiled.get(one, context)) == forms(written.get(one, context)), one


def test_django_translates_as_the_plural_forms_of_a_catalogue_say() -> None:
    for language, said in (("de", ["1 Eintrag", "2 Einträge"]), ("zh-hans", ["1 个条目", "2 个条目"])):
        with translation.override(language):
            counts = [translation.ngettext("%(count)d entry", "%(count)d entries", n) % {"count": n} for n in (1, 2)]
        assert counts == said


# HTTP


@distributed_lock("order")
def view(request):
    raise AssertionError("the lock is busy")


@distributed_lock("order", on_busy=respond(detail="In use."))
def own_words(request):
    raise AssertionError("the lock is busy")


def answered(called, accepted: str, language: str | None) -> str:
    with translation.override(language), held_elsewhere("order"):
        return called(RequestFactory().get("/", headers={"Accept": accepted})).content.decode()


@pytest.mark.usefixtures("local_locks")
class TestAnswers:
    def test_people_read_their_language(self) -> None:
        page = answered(view, "text/html", "zh-hans")
        assert "<p>正在处理中" in page
        assert '<html lang="zh-hans">' in page
        assert answered(view, "text/plain", "de").startswith("Das wird bereits bearbeitet.")
        assert '<html lang="en">' in answered(view, "text/html", None)

    def test_programs_read_english(self) -> None:
        assert json.loads(answered(view, "application/json", "de"))["detail"] == BUSY

    @pytest.mark.parametrize("accepted", ["text/html", "text/plain", "application/json"])
    def test_the_words_of_a_project_are_left_as_they_are(self, accepted: str) -> None:
        assert "In use." in answered(own_words, accepted, "de")


# Commands


def printed(*words: str, language: str) -> str:
    out = StringIO()
    with translation.override(language):
        call_command(*words, stdout=out, no_color=True)
    return out.getvalue()


@pytest.mark.usefixtures("local_locks")
class TestCommands:
    def test_tables_are_in_the_language(self) -> None:
        with held_elsewhere("order:1"):
            for language, heading, count in (("de", "NAME", "1 gehalten"), ("zh-hans", "名称", "持有 1")):
                lines = printed("locks", language=language).splitlines()
                assert lines[0].split()[0] == heading
                assert lines[-1] == count
            assert "Fencing-Nummer" in printed("locks", "show", "order:1", language="de")
            assert "无人等待。" in printed("locks", "explain", "order:1", language="zh-hans")

    @pytest.mark.parametrize("command", [["list"], ["show", "order:1"], ["explain", "order:1"]])
    def test_json_is_english(self, command: list[str]) -> None:
        with held_elsewhere("order:1"):
            printed_words = {
                language: re.sub(r"[\d.]+", "0", printed("locks", *command, "--json", language=language))
                for language in ("en", *LANGUAGES)
            }
        assert {*printed_words.values()} == {printed_words["en"]}

    @pytest.mark.parametrize("name", ["locks", "runlocked", "beat_runs"])
    @pytest.mark.parametrize("language", LANGUAGES)
    def test_help_is_in_the_language(self, name: str, language: str) -> None:
        command = load_command_class("django_distlock", name)
        with translation.override(language):
            text = command.create_parser("manage.py", name).format_help()
            assert translation.gettext(command.help)[:10] in text
        assert command.help[:10] not in text

    @pytest.mark.parametrize(("encoding", "heading"), [("utf-8", "名称"), ("gbk", "名称"), ("latin-1", "NAME")])
    def test_a_terminal_that_cannot_write_the_language_reads_english(
        self, encoding: str, heading: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = TextIOWrapper(BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", terminal)
        with translation.override("zh-hans"), held_elsewhere("order:1"):
            load_command_class("django_distlock", "locks").run_from_argv(["manage.py", "locks", "--no-color"])
        terminal.seek(0)
        assert terminal.read().split()[0] == heading


# Nothing of this is paid for by who takes a lock


@pytest.mark.usefixtures("local_locks")
def test_a_lock_translates_nothing() -> None:
    code: set[str] = set()
    with lock("warm"):
        pass
    sys.setprofile(lambda frame, *_: code.add(frame.f_code.co_filename))
    try:
        with lock("order:{}", 1):
            pass
    finally:
        sys.setprofile(None)
    assert any(file.endswith("core/acquire.py") for file in code)
    assert not [file for file in code if "translation" in Path(file).parts]


# README


def code_of(readme: str) -> list[str]:
    """Of its blocks, without comments, which are in its language."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", (ROOT / readme).read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(r" *#.*", "", block) for block in blocks]


def test_the_chinese_readme_has_the_code_of_the_english_one() -> None:
    assert code_of("README.md")
    assert code_of("README.zh-hans.md") == code_of("README.md")


def test_each_readme_links_the_other_and_the_same_pages() -> None:
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-hans.md"))
    assert "README.zh-hans.md" in english
    assert "README.md" in chinese
    links = [{*re.findall(r"\]\((docs/[\w./-]+)", text)} for text in (english, chinese)]
    assert links[0] == links[1]
