"""The reference's own rules."""

import pytest

from nemo_rl_offload.paged_stash.pages import Pages


def test_pages_of_the_device_go_first_and_come_back_in_order() -> None:
    pages = Pages(4, 3, 2)
    first, second = pages.stash(5), pages.stash(9)
    assert (first, second) == ([0, 1], [2, 3, 4])
    assert pages.num_spilled == 2
    pages.restore(second)
    pages.restore(first)
    assert (pages.device.free(), pages.host.free()) == ([2, 0, 1], [3, 4])
    pages.check([])


def test_all_or_nothing() -> None:
    pages = Pages(4, 2, 1)
    held = pages.stash(8)
    assert pages.stash(5) == []
    assert (pages.overflowed, pages.peak, pages.num_used) == (True, 4, 2)
    assert pages.stash(4) == [2]
    pages.check([held, [2]])


@pytest.mark.parametrize("records", [[[0]], [[0, 1], [1]], []])
def test_a_page_lost_or_held_twice_is_found(records: list[list[int]]) -> None:
    pages = Pages(4, 2, 0)
    pages.stash(8)
    with pytest.raises(AssertionError, match="lost, or held twice"):
        pages.check(records)
