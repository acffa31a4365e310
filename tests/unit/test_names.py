"""S13: equal names are one lock, different values never meet, and what cannot name a lock says why."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from functools import partial

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import QueryDict
from hypothesis import assume, example, given
from hypothesis import strategies as st

from django_distlock import InvalidLockName, LockInfo, assert_locked, distributed_lock, lock, locks
from django_distlock.exceptions import UnusableLockName
from django_distlock.names import LONGEST_VERBATIM, OWN, check_name, own_name, parse, render, stored_name

text = st.text(st.characters(exclude_categories=["Cs"]))
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=600)
names = texts.filter(lambda name: not name.startswith(OWN))
literals = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def templates(draw):
    """A template of one to four fields with any text around them."""
    count = draw(st.integers(1, 4))
    parts = [draw(literals) for _ in range(count + 1)]
    return "{}".join(part.replace("{", "{{").replace("}", "}}") for part in parts), count


class TestAnyTemplate:
    @given(templates(), st.data())
    def test_different_values_give_different_names(self, template, data):
        template, count = template
        try:
            parse(template)
        except InvalidLockName:
            assume(False)
        values = st.tuples(*[st.one_of(text, st.sampled_from(["", "a", "a:b", "1-2", "%3A"]))] * count)
        one, other = data.draw(values), data.draw(values)
        assume(render_or_none(template, one) and render_or_none(template, other))
        assert (render(template, one) == render(template, other)) == (one == other)

    @given(text, text)
    @example("0" * 190, "")
    def test_a_value_cannot_reach_another_field_or_lock(self, first, second):
        rendered = render("order:{}:item:{}", (first, second))
        is_cut = len(rendered) > LONGEST_VERBATIM  # and keeps its beginning
        assert rendered.count(":") <= 3 if is_cut else rendered.count(":") == 3
        assert "{" not in rendered
        assert "}" not in rendered

    @given(names)
    def test_a_name_is_stable_and_bounded(self, name):
        assert check_name(name) == check_name(name)
        assert len(check_name(name)) <= 225

    @given(names, names)
    def test_equal_names_are_one_lock_and_others_are_not(self, one, other):
        assert (check_name(one) == check_name(other)) == (one == other)


def render_or_none(template, values):
    try:
        return render(template, values)
    except InvalidLockName:
        return None  # an empty name


class TestRendering:
    @pytest.mark.parametrize(
        ("template", "values", "name"),
        [
            ("plain", (), "plain"),
            ("with { braces } but no values", (), "with { braces } but no values"),
            ("order:{}", (42,), "order:42"),
            ("order:{0}", (42,), "order:42"),
            ("{1}:{0}", ("a", "b"), "b:a"),
            ("order:{}", ("a:b%{c}",), "order:a%3Ab%25%7Bc%7D"),
            ("{{literal}}:{}", (1,), "{literal}:1"),
            ("{}-{}", ("1-2", "3"), "1%2D2-3"),
            ("{}x%{}", ("1x:", "25"), "1%78%3Ax%25"),
            ("doc:{}:{}", ("6ba7b810-9dad", 3), "doc:6ba7b810-9dad:3"),
            ("day:{}", ("ä b",), "day:ä b"),
            ("{0.year}", (type("Date", (), {"year": 2026})(),), "2026"),
            ("{0[id]}", ({"id": 7},), "7"),
        ],
    )
    def test_examples(self, template, values, name):
        assert render(template, values) == name

    def test_a_value_and_its_text_name_the_same_lock(self):
        assert render("order:{}", (42,)) == render("order:{}", ("42",))

    def test_a_long_name_keeps_its_beginning_and_becomes_longer_than_any_verbatim_one(self):
        short, long = "n" * 200, "n" * 201
        assert check_name(short) == short
        assert check_name(long).startswith("n" * 160 + "~")
        assert len(check_name(long)) > 200
        assert check_name(check_name(long)) != check_name(long)
        assert check_name(long) != check_name(long + "n")


def test_equal_dicts_name_one_lock_whatever_the_order_of_their_keys():
    def name(filters):
        return render("report:{}", (filters,))

    one, other = {"a": 1, "b": [{"c": 2, "d": 3}], 4: None}, {4: None, "b": [{"d": 3, "c": 2}], "a": 1}
    assert one == other
    assert name(one) == name(other)
    assert name((one,)) == name((other,))
    assert name({"a": 1, "b": 2}) != name({"a": 2, "b": 1})
    assert name([1, 2]) != name([2, 1])


def test_equal_dicts_of_other_classes_name_one_lock_but_for_those_that_are_in_an_order():
    class Own(dict):
        pass

    row = namedtuple("row", "filters")
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    for kind in (Own, Counter, partial(defaultdict, int), lambda found: row(found), lambda found: [Own(found)]):
        assert render("report:{}", (kind(one),)) == render("report:{}", (kind(other),))
        assert render("report:{}", (kind(one),)) != render("report:{}", (kind({"a": 1, "b": 3}),))
    assert render("report:{}", (OrderedDict(one),)) != render("report:{}", (OrderedDict(other),))
    tags = [render("report:{}", (QueryDict(text),)) for text in ("tag=1&tag=2", "tag=2", "tag=1&tag=2")]
    assert tags[0] == tags[2] != tags[1]


class TestFieldsThatNothingFills:
    """One lock for all is not what was meant."""

    @pytest.mark.parametrize(
        "name",
        [
            "order:{}",
            "{0}",
            "{0.pk}",
            "order:{id}",
            "{order.pk}",
            "{args[0]}",
            "{id!r}",
            "{id:05d}",
            '{"a": 1}:{id}',
            "[{id}]",
            "[" * 5000 + "{}",
        ],
    )
    def test_are_refused(self, name):
        escaped = name.replace("{", "{{").replace("}", "}}")
        for ask in (lock, assert_locked, lambda _: distributed_lock(name=escaped)(len)):
            with pytest.raises(InvalidLockName, match=r"no value for it.*f-string"):
                ask(name)

    @pytest.mark.parametrize(
        "name",
        [
            *('{"a": 1}', '{"a": {}, "b": [{}]}', "[{}]", "report:[{}]", '{"a": "}", "b": "{id}"}'),
            *("{1, 2}", "a { b } c", "{'id': 5}", "}{", "{", "{:}", "{0a}"),
        ],
    )
    def test_other_braces_are_text(self, name):
        assert lock(name).name == check_name(name)

    def test_what_was_taken_by_such_a_name_is_found_by_what_shows_it(self, locmem_locks):
        @distributed_lock(name=lambda: "order:{id}")
        def hold():
            [info] = locmem_locks.held()
            assert lock(info).name == "order:{id}"
            assert lock(info).locked()

        hold()

    def test_a_lock_that_is_shown_is_that_of_its_alias(self, settings, locmem_locks):
        settings.DISTRIBUTED_LOCKS = dict.fromkeys(("default", "other"), settings.DISTRIBUTED_LOCKS["default"])
        name = "n" * 300
        with lock(name, using="other") as lease:
            [info] = locks["other"].held()
            handle = lock(info, wait=0)
            assert (handle.name, handle.using) == (lease.name, "other")
            assert handle.locked()

    @pytest.mark.parametrize("value", ["x", "x" * 300])
    def test_locks_of_the_package_are_shown_and_not_taken(self, value):
        with pytest.raises(UnusableLockName, match=r"begins with 'django_distlock\.'"):
            lock(LockInfo(own_name("run:{}", value), "default", None, 1, 1.0))

    @pytest.mark.parametrize(("values", "options"), [((5,), {}), ((), {"using": "nope"})])
    def test_what_is_shown_takes_no_values_and_no_other_backend(self, values, options):
        with pytest.raises(TypeError, match="takes neither values nor another using"):
            lock(LockInfo("name", "default", None, 1, 1.0), *values, **options)


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("", "is empty. Give it a name"),
            ("x" * 10_001, "is too long: 10,001 characters, at most 10,000 are accepted. It begins with 'xxx"),
            (42, "is a str, not int. Write it out"),
            (None, "is a str, not NoneType"),
            (b"name", "is a str, not bytes"),
            ("\ud800", "cannot be written as UTF-8"),
            ("django_distlock.done:1:nightly", "begins with 'django_distlock.', as those of the locks by which"),
        ],
    )
    def test_what_is_no_name(self, name, message):
        with pytest.raises(InvalidLockName) as caught:
            check_name(name)
        assert message in str(caught.value)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize(
        ("template", "values", "message"),
        [
            ("{}{}", ("a", "b"), "has adjacent fields"),
            ("x{a}{b}", ("a", "b"), "has adjacent fields"),
            ("{}3{}", (1, 2), "separates fields by '3' alone, which values may contain. Separate them by \":\""),
            ("{}%{}", (1, 2), "separates fields by '%' alone"),
            ("tags:{}", ({"a", "b"},), "was given a set for '0', whose text has another order in each process"),
            ("tags:{}", (["x", {"a", "b"}],), "was given a set for '0'"),
            ("tags:{}", ({"tags": frozenset({"a", "b"})},), "was given a set for '0'"),
            ("tags:{}", (OrderedDict(tags={"a", "b"}),), "was given a set for '0'"),
            ("tags:{}", ({("x", frozenset({"a", "b"})): 1},), "was given a set for '0'"),
            ("{}", ([object()],), "whose text is an address in memory"),
            ("orders:{}", ([User(pk=1)],), "was given a model instance for '0'"),
            ("order:{order_id}", (1,), "asks for 'order_id'; lock() fills fields by position"),
            ("order:{}", (1, 2), "has 1 field(s) and was given 2 value(s)"),
            ("{}:{}", (1,), "has 2 field(s) and was given 1 value(s)"),
            ("order", (1,), "has 0 field(s) and was given 1 value(s)"),
            ("{:>10}", (1,), "formats the field"),
            ("{!r}", (1,), "formats the field"),
            ("{", (1,), "cannot be read: "),
            ("{0.nothing}", (1,), "asks for '0.nothing', which cannot be read: AttributeError"),
            ("{0[nothing]}", ({},), "asks for '0[nothing]', which cannot be read: KeyError"),
            ("{0.}", (1,), "asks for '0.', which cannot be read: ValueError: Empty attribute"),
            ("{}", (object(),), "whose text is an address in memory"),
            ("{0.upper}", ("x",), "was given something to call for '0.upper'"),
            ("{}", (print,), "was given something to call for '0'"),
            ("order:{}", (User(pk=1),), "was given a model instance for '0'; its text may change"),
            ("user:{0.pk}", (User(),), "was given an object of auth.user for '0.pk' that is not saved and has no"),
            ("user:{0.id}", (User(),), "All such objects would share one lock. Save it first."),
        ],
    )
    def test_what_cannot_name_a_lock(self, template, values, message):
        with pytest.raises(InvalidLockName) as caught:
            render(template, values)
        assert message in str(caught.value)
        assert repr(template) in str(caught.value)

    def test_none_is_taken_and_asked_about_once_for_each_template(self, caplog):
        form = type("Form", (), {"_meta": object(), "pk": None})()
        told = (
            "was given None for {!r}, so that it is one lock for all that have none, such as objects that are not saved"
        )
        for template, value, field in (
            ("of none:{}", None, "0"),
            ("of nobody:{0.last_login}", User(pk=1), "0.last_login"),
            ("of nothing:{0.pk}", AnonymousUser(), "0.pk"),
            ("of no model:{0.pk}", form, "0.pk"),
        ):
            caplog.clear()
            assert {render(template, (value,)) for _ in range(2)} == {f"{template.partition(':')[0]}:None"}
            [message] = caplog.messages
            assert message.startswith(f"The template {template!r} {told.format(field)}")

    def test_no_value_makes_the_name_of_a_lock_that_lists_leave_out(self):
        for template, value in (("{}", "django_distlock.x"), ("{}.{}", "django_distlock"), ("{}:edit", f"{OWN}done")):
            values = (value, "x")[: template.count("{}")]
            with pytest.raises(InvalidLockName, match="begins with 'django_distlock.'"):
                render(template, values)
        assert render("{}", ("django_distlock",)) == "django_distlock"

    def test_operators_name_the_locks_of_this_package(self):
        own = own_name("done:{}:{}", "2f.0e", "order:1")
        assert own == "django_distlock.done:2f.0e:order%3A1"
        assert stored_name(own) == own

    def test_a_template_that_is_no_text(self):
        with pytest.raises(InvalidLockName, match="is a str, not int"):
            render(5, (1,))

    def test_the_key_of_a_model_instance_is_fine(self):
        assert render("user:{0.pk}", (User(pk=1),)) == "user:1"


@pytest.mark.parametrize("between", ["x", "\u0663", "-"])
def test_what_stands_between_two_fields_is_escaped_in_values_also_if_it_is_a_letter_or_a_digit(between):
    template = f"order:{{}}{between}{{}}"
    assert render(template, (f"1{between}2", "3")) != render(template, ("1", f"2{between}3"))
    assert render(template, (12, "3")) == f"order:12{between}3"
