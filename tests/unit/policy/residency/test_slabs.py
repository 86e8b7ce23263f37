"""Where an optimizer's tensors lie: every element once, in slabs that are full, in buckets that cover them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.policy.residency.slabs import ALIGNMENT, choose, cut, pack


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5000), st.integers(9, 13))
def test_every_element_is_in_one_bucket(lengths: list[int], bucket: int, log_slab: int) -> None:
    places, slabs = pack(lengths, 1 << log_slab)
    taken: dict[tuple[int, int], int] = {}
    for number, (place, length) in enumerate(zip(places, lengths, strict=True)):
        assert place.start % ALIGNMENT == 0
        for position in (place.start, place.start + length - 1):
            assert position < slabs[place.slab]
        taken |= {(place.slab, place.start + each): number for each in range(length)}
    assert len(taken) == sum(lengths), "no two share a place"
    found: dict[tuple[int, int], int] = {}
    ends = dict.fromkeys(range(len(slabs)), 0)
    for each in cut(places, lengths, slabs, bucket):
        assert each.start == ends[each.slab]
        assert 0 < each.end - each.start <= max(bucket, ALIGNMENT)
        ends[each.slab] = each.end
        for number, start, offset, num in each.segments:
            assert offset + num <= each.end - each.start
            assert places[number].start + start == each.start + offset
            assert start % ALIGNMENT == 0
            found |= {(each.slab, each.start + offset + index): number for index in range(num)}
    assert list(ends.values()) == slabs
    assert found == taken


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=20), st.integers(9, 14))
def test_slabs_are_filled_before_there_are_more(lengths: list[int], log_slab: int) -> None:
    _, slabs = pack(lengths, 1 << log_slab)
    capacity = max(1 << log_slab, 1 << (-(-max(lengths) // ALIGNMENT) * ALIGNMENT - 1).bit_length())
    assert max(slabs) <= capacity
    assert all(one + other > capacity for number, one in enumerate(slabs) for other in slabs[:number])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=20), st.floats(0, 1))
def test_a_share_is_met_but_for_less_than_the_smallest_that_stays(sizes: list[int], share: float) -> None:
    chosen = choose(sizes, share)
    assert chosen == sorted(set(chosen))
    wanted, gone = round(share * sum(sizes)), sum(sizes[number] for number in chosen)
    assert gone <= wanted
    stays = [size for number, size in enumerate(sizes) if number not in chosen]
    assert not stays or wanted - gone < min(stays)


def test_all_and_none() -> None:
    assert choose([3, 1, 2], 1.0) == [0, 1, 2]
    assert choose([3, 1, 2], 0.0) == []
    assert pack([]) == ([], [])
    assert list(cut([], [], [], 7)) == []
