"""Stamps of the runs of beat, as text and as they change."""

from __future__ import annotations

import pytest

from django_distlock.runs import LastRun, UnsentRun

CLAIMED = LastRun(1705305600.551894, "web-1", 1705305660.0, "token", 0, (UnsentRun(1705305600.5, "token"),))


@pytest.mark.parametrize("stamp", [LastRun(1.5), LastRun(1.5, "h", None, "t"), CLAIMED, CLAIMED.changed(())])
def test_a_stamp_is_read_as_it_was_written(stamp):
    assert LastRun.from_text(stamp.to_text()) == stamp
    assert LastRun.from_text(stamp.to_text().encode()) == stamp


def test_a_stamp_of_an_entry_that_is_sent_at_most_once_has_four_parts():
    assert LastRun(1.5, "h", None, "t").to_text() == '1 [1.5,"t",null,"h"]'


def test_a_change_moves_the_stamp_and_not_the_run():
    changed = CLAIMED
    for _ in range(100):
        before, changed = changed, changed.changed(())
        assert changed.at > before.at
        assert changed.token != before.token
        assert changed.ran_at == CLAIMED.ran_at == CLAIMED.at


@pytest.mark.parametrize(
    "more",
    ["1", "1,2", "-1,[]", "1.5,[]", "0,{}", "0,[[1.0]]", '0,[["1.0","t"]]', '0,[[-1,"t"]]', "0,[[1.0,2]]", "0,[],0"],
)
def test_another_text_is_refused(more):
    with pytest.raises(ValueError, match="not a stamp"):
        LastRun.from_text(f'1 [1.5,"t",null,"h",{more}]')
