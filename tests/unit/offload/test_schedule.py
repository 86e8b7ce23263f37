"""The arithmetic of reload times against a search over all start times."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload.schedule import Need, Visit, latest_starts_ms, num_due, worth_moving

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
    for position in range(len(starts)):
        later = [*starts[:position], starts[position] + 1, *starts[position + 1 :]]
        assert not meets_deadlines(needs, later)


@settings(deadline=None)
@given(NEEDS, st.integers(0, 30))
def test_due_are_those_that_the_next_boundary_is_too_late_for(needs: list[Need], boundary_ms: int) -> None:
    late = [start < boundary_ms for start in latest_starts_ms(needs)]
    assert num_due(latest_starts_ms(needs), boundary_ms) == sum(late)
    assert late == sorted(late, reverse=True)


def test_a_group_moves_only_when_it_can_be_let_go_at_one_boundary_and_fetched_at_a_later_one() -> None:
    boundaries = [0.0, 10.0, 20.0, 30.0, 40.0]
    early, late = Visit(0, 40, 5, 5), Visit(10, 30, 5, 5)  # copied out at 5, and at 15
    assert worth_moving([early, late], boundaries) == [True, False]  # late would have to start back at 25
    assert worth_moving([late._replace(out_ms=1, in_ms=1, reached_ms=41)], boundaries) == [True]
    busy = [early._replace(out_ms=25), late._replace(reached_ms=44)]  # the link is busy until 25, then until 30
    assert worth_moving(busy, [*boundaries, 44.0]) == [False, True]  # what stays does not use the link


def test_what_cannot_come_back_behind_another_is_not_worth_moving() -> None:
    """Either has the time alone; the second is wanted first, and the link is not done with it when the first has to
    start. Groups of different forwards do not come back at the same time."""
    boundaries = [float(ms) for ms in range(101)]
    first = Visit(0.0, 100.0, 1.0, 50.0)
    second = Visit(1.0, 60.0, 1.0, 50.0)
    assert worth_moving([second], boundaries) == [True]
    assert worth_moving([first, second], boundaries) == [True, False]
    assert worth_moving([first, second._replace(forward=1)], boundaries) == [True, True]
