"""How names are written in the tree, and in which order places stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_distlock.backends.zookeeper.names import SHARDS, Line, Place, Tree, decode, encode, in_order, shard_of

TOKEN = "0123456789abcdef0123456789"
OTHER = "f" * 26

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)


def is_accepted(path: str) -> bool:
    """PathUtils.validatePath() of ZooKeeper, which looks at units of UTF-16."""
    encoded = path.encode("utf-16-be")
    units = [int.from_bytes(encoded[start : start + 2], "big") for start in range(0, len(encoded), 2)]
    parts = path[1:].split("/")
    return (
        path.startswith("/")
        and all(part not in ("", ".", "..") for part in parts)
        and not any(
            unit <= 0x1F or 0x7F <= unit <= 0x9F or 0xD800 <= unit <= 0xF8FF or 0xFFF0 <= unit <= 0xFFFF
            for unit in units
        )
    )


@given(names)
def test_each_name_comes_back(name):
    assert decode(encode(name)) == name


@given(names)
def test_each_path_is_accepted(name):
    tree = Tree("/shop")
    for path in (tree.new_place(name, TOKEN) + "0000000000", tree.rest(name), tree.run(name)):
        assert is_accepted(path)
        assert path.count("/") == tree.run("x").count("/") + ("locks" in path.split("/")[2])


@given(names, names)
def test_different_names_have_different_nodes(one, other):
    if one != other:
        assert encode(one) != encode(other)
        place = f"{encode(one)}~{TOKEN}-0000000001"
        assert not Line.of(other, [place, f"{encode(one)}~rest"]).places
        assert not Line.of(other, [f"{encode(one)}~rest"]).rests


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("order:1", "order:1"),
        ("a b", "a b"),
        ("größe", "größe"),
        ("a/b", "a%2Fb"),
        ("50%", "50%25"),
        ("home~1", "home%7E1"),
        (".", "."),
        ("nul\0", "nul%00"),
        ("\ue000", "%EE%80%80"),
        ("🔒", "%F0%9F%94%92"),
    ],
)
def test_names_stay_readable(name, written):
    assert encode(name) == written


def test_keys_are_spread_over_all_shards():
    assert {shard_of(f"order:{number}") for number in range(100 * SHARDS)} == set(range(SHARDS))
    assert len(Tree("").shards) == SHARDS
    assert Tree("").shard("order:1") in Tree("").shards


def place(number: int, token: str = TOKEN, key: str = "name") -> Place:
    return Place(f"{key}~{token}-{number:010d}", key, token, number)


def test_a_place_is_what_zookeeper_makes_of_its_name():
    path = Tree("/shop").new_place("a~b", TOKEN)
    assert Place.of(path.rpartition("/")[2] + "0000000042") == Place(f"a%7Eb~{TOKEN}-0000000042", "a%7Eb", TOKEN, 42)
    assert Place.of(f"name~{TOKEN}--2147483648").number == -(2**31)


@pytest.mark.parametrize("node", ["name", "name~rest", f"name~{TOKEN}", f"name~{TOKEN}-", "name~x-0000000001"])
def test_other_nodes_are_no_places(node):
    assert Place.of(node) is None


def test_places_stand_in_the_order_of_their_numbers():
    assert in_order([place(7), place(3), place(11)]) == [place(3), place(7), place(11)]


def test_the_counter_of_a_node_goes_over_its_end():
    """It is a signed number of 32 bits."""
    old, new = place(2**31 - 2), place(-(2**31))
    assert in_order([new, old, place(2**31 - 1), place(-(2**31) + 5)]) == [
        old, place(2**31 - 1), new, place(-(2**31) + 5),
    ]  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**20), unique=True, min_size=1, max_size=9))
def test_places_are_in_order_wherever_the_counter_stands(begin, distances):
    def signed(number):
        return (number + 2**31) % 2**32 - 2**31

    wanted = [place(signed(begin + distance)) for distance in sorted(distances)]
    assert in_order(reversed(wanted)) == wanted


def test_a_line_has_the_places_of_its_own_name():
    nodes = [
        place(5).node, place(2, OTHER).node, place(1, key="name2").node, "name~rest", "other~rest", "strange",
    ]  # fmt: skip
    line = Line.of("name", nodes)
    assert line.places == [place(2, OTHER), place(5)]
    assert line.first == place(2, OTHER)
    assert line.before(place(5)) == place(2, OTHER)
    assert line.of_token(TOKEN) == [place(5)]
    assert line.rests
    assert Line.of("free", nodes) == Line([], rests=False)
    assert Line.of("free", nodes).first is None
