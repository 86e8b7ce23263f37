"""The arithmetic of reload times against a search over all start times."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload.schedule import Need, latest_starts_ms

NEEDS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=6).map(
    lambda pairs: [Need(float(due), float(copy)) for due, copy in sorted(pairs)]
)


def meets_deadlines(needs: list[Need], starts: list[float]) -> bool:
    ends = [start + need.copy_ms for start, need in zip(starts, needs, strict=True)]
    on_time = all(end <= need.due_ms for end, need in zip(ends, needs, strict=True))
    return on_time and all(end <= start for end, (_, start) in zip(ends, pairwise(starts), strict=False))


@settings(deadline=None)
@given(NEEDS)
def test_latest_starts_meet_every_deadline_and_none_can_be_later(needs: list[Need]) -> None:
    starts = latest_starts_ms(needs)
    assert meets_deadlines(needs, starts)
    assert starts == sorted(starts)
    for position in range(len(starts)):
        later = [*starts[:position], starts[position] + 1, *starts[position + 1 :]]
        assert not meets_deadlines(needs, later)
