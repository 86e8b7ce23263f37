from collections import deque
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload.overlap import MOST_WAITED, Visit, fit_overlap


def keyed(*visits: Visit) -> list[Visit]:
    """Each with its number for a key."""
    return [visit._replace(key=number) for number, visit in enumerate(visits)]


def test_a_group_moves_only_when_it_can_be_let_go_at_one_boundary_and_fetched_at_a_later_one() -> None:
    boundaries = [0.0, 10.0, 20.0, 30.0, 40.0]
    early, late = Visit(0, 40, 5, 5), Visit(10, 30, 5, 5)  # copied out at 5, and at 15
    assert fit_overlap(keyed(early, late), boundaries) == {0}  # late would have to start back at 25
    assert fit_overlap(keyed(late._replace(out_ms=1, in_ms=1, reached_ms=41)), boundaries) == {0}
    busy = keyed(early._replace(out_ms=25), late._replace(reached_ms=44))  # the link is busy until 25, then until 30
    assert fit_overlap(busy, [*boundaries, 44.0]) == {1}  # what stays does not use the link


def test_what_cannot_come_back_behind_another_is_not_worth_moving() -> None:
    """Either has the time alone; the second is wanted first, and the link is not done with it when the first has to
    start. Groups of different forwards do not come back at the same time."""
    boundaries = [float(ms) for ms in range(101)]
    first = Visit(0.0, 100.0, 1.0, 50.0)
    second = Visit(1.0, 60.0, 1.0, 50.0)
    assert fit_overlap(keyed(second), boundaries) == {0}
    assert fit_overlap(keyed(first, second), boundaries) == {0}
    assert fit_overlap(keyed(first, second._replace(forward=1)), boundaries) == {0, 1}


def layers(number: int, forward_ms: float, out_ms: float, num_forwards: int = 1) -> tuple[list[Visit], list[float]]:
    """Visits of equal layers whose backward takes twice as long, and the boundaries."""
    visits, boundaries, pass_ms = [], [], 3 * number * forward_ms
    for forward in range(num_forwards):
        for layer in range(number):
            committed = forward * pass_ms + forward_ms * (layer + 1)
            reached = forward * pass_ms + number * forward_ms + 2 * forward_ms * (number - 1 - layer)
            visits.append(Visit(committed, reached, out_ms, out_ms, forward, layer))
            boundaries += [committed, reached]
    return visits, sorted(boundaries)


def waited_ms(visits: list[Visit], moving: set[object], bound_ms: float) -> float:
    """How long compute waits, by a queue of milliseconds, where these keys move."""
    queued_ms = waited = last = 0.0
    for visit in visits:
        queued_ms = max(0.0, queued_ms - (visit.committed_ms - last))
        last = visit.committed_ms
        if visit.key in moving:
            queued_ms += visit.out_ms
            waited += max(0.0, queued_ms - bound_ms)
            queued_ms = min(queued_ms, bound_ms)
    return waited


@pytest.mark.parametrize("num_forwards", [1, 3])
def test_where_the_link_is_slower_than_the_forward_what_moves_is_spread(num_forwards: int) -> None:
    """A layer computes for 4 ms and its copy takes 16. Without a bound the first nine of 28 layers leave."""
    visits, boundaries = layers(28, 4.0, 16.0, num_forwards)
    assert fit_overlap(visits, boundaries) == set(range(9))
    moving = fit_overlap(visits, boundaries, 32.0)
    assert {0, 1} < moving < set(range(28))
    gaps = [after - before for before, after in zip(sorted(moving)[3:], sorted(moving)[4:], strict=False)]
    assert set(gaps) <= {3, 4, 5}
    span_ms = boundaries[-1] - boundaries[0]
    assert waited_ms(visits, moving, 32.0) <= MOST_WAITED * span_ms
    assert waited_ms(visits, set(range(9)), 32.0) > 0.2 * span_ms


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_forward_in_which_the_device_waited_for_the_host_decides_nothing(late: int) -> None:
    """One of three takes three times as long, as the first of a step does: by its times alone, more would move."""
    steady, _ = layers(28, 4.0, 16.0)
    slow, _ = layers(28, 12.0, 16.0)
    visits, boundaries, start = [], [], 0.0
    for forward in range(3):
        own = [
            visit._replace(
                committed_ms=start + visit.committed_ms, reached_ms=start + visit.reached_ms, forward=forward
            )
            for visit in (slow if forward == late else steady)
        ]
        visits += own
        boundaries += [ms for visit in own for ms in (visit.committed_ms, visit.reached_ms)]
        start = max(boundaries)
    boundaries.sort()
    moving = fit_overlap(visits, boundaries, 32.0)
    assert len(fit_overlap([visit for visit in visits if visit.forward == late], boundaries, 32.0)) > 2 * len(moving)
    assert waited_ms([visit for visit in visits if visit.forward == late], moving, 32.0) == 0
    assert waited_ms(visits, moving, 32.0) <= MOST_WAITED * (boundaries[-1] - boundaries[0])


def test_a_bound_above_what_is_ever_under_way_changes_nothing() -> None:
    visits, boundaries = layers(28, 4.0, 16.0)
    assert fit_overlap(visits, boundaries, 28 * 16.0) == fit_overlap(visits, boundaries)


def in_turn(
    forwards: Sequence[tuple[float, float]], number: int, forward_ms: float, out_ms: float, num_ahead: int = 1
) -> tuple[list[Visit], list[float]]:
    """Forwards of equal layers, each (times the compute, times the bytes), of which `num_ahead` wait for backward."""
    visits: list[Visit] = []
    boundaries: list[float] = []
    ahead: deque[tuple[int, int]] = deque()  # positions of forwards whose backward is to come
    now = 0.0

    def backward() -> None:
        nonlocal now
        first, last = ahead.popleft()
        slower = forwards[visits[first].forward][0]  # type: ignore[index]
        for position in range(last - 1, first - 1, -1):
            visits[position] = visits[position]._replace(reached_ms=now)
            boundaries.append(now)
            now += 2 * forward_ms * slower

    for forward, (slower, larger) in enumerate(forwards):
        first = len(visits)
        for layer in range(number):
            now += forward_ms * slower
            visits.append(Visit(now, inf, out_ms * larger, out_ms * larger, forward, layer))
            boundaries.append(now)
        ahead.append((first, len(visits)))
        if len(ahead) == num_ahead:
            backward()
    while ahead:
        backward()
    return visits, sorted(boundaries)


@pytest.mark.parametrize("num_ahead", [1, 2, 4])
@pytest.mark.parametrize(
    "forwards",
    [
        [(1, 1), (1, 1), (1, 1), (0.25, 0.25)],  # lengths differ
        [(0.25, 0.25), (1, 1), (1, 1), (1, 1)],
        [(1, 1), (1, 1), (1, 1), (0.06, 0.25)],  # and attention's time with their square
        [(3, 1), (1, 1), (1, 1), (1, 1)],  # the device waits for the host
        [(1, 1), (1, 1), (3, 1), (1, 1)],
    ],
)
def test_no_forward_makes_compute_wait_for_what_others_had_the_time_for(
    forwards: list[tuple[float, float]], num_ahead: int
) -> None:
    visits, boundaries = in_turn(forwards, 28, 4.0, 16.0, num_ahead)
    moving = fit_overlap(visits, boundaries, 32.0)
    span_ms = boundaries[-1] - boundaries[0]
    assert waited_ms(visits, moving, 32.0) <= MOST_WAITED * span_ms + 1e-6
    assert waited_ms(visits, fit_overlap(visits, boundaries), 32.0) > 0.1 * span_ms
    assert len(moving) >= 4  # the link has time for seven of 28, and for less in a short forward behind others


def test_chunks_of_a_model_share_the_link() -> None:
    """One microbatch goes through four chunks before its backward. Each chunk's keys are its own."""
    visits, boundaries = layers(28, 4.0, 16.0)
    chunks = [visit._replace(forward=visit.key // 7) for visit in visits]  # type: ignore[operator]
    moving = fit_overlap(chunks, boundaries, 32.0)
    assert waited_ms(chunks, moving, 32.0) <= MOST_WAITED * (boundaries[-1] - boundaries[0])
    assert len(moving) >= 6


def test_a_key_that_comes_twice_in_a_forward_moves_or_stays_as_one() -> None:
    visits, boundaries = layers(28, 4.0, 16.0)
    pairs = [visit._replace(key=visit.key // 2) for visit in visits]  # type: ignore[operator]
    moving = fit_overlap(pairs, boundaries, 32.0)
    assert waited_ms(pairs, moving, 32.0) <= MOST_WAITED * (boundaries[-1] - boundaries[0])
    assert 2 <= len(moving) <= 7


@given(
    forwards=st.lists(st.tuples(st.floats(0.3, 4.0), st.floats(0.1, 3.0)), min_size=1, max_size=5),
    number=st.integers(2, 20),
    out_ms=st.floats(0.1, 60.0),
    factor=st.floats(1.0, 4.0),
    num_ahead=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_compute_waits_no_longer_than_it_may(
    forwards: list[tuple[float, float]], number: int, out_ms: float, factor: float, num_ahead: int
) -> None:
    """For a bound that holds two of the largest, as the engine's does, or more."""
    visits, boundaries = in_turn(forwards, number, 4.0, out_ms, num_ahead)
    bound_ms = 2 * factor * max(visit.out_ms for visit in visits)
    moving = fit_overlap(visits, boundaries, bound_ms)
    assert waited_ms(visits, moving, bound_ms) <= MOST_WAITED * (boundaries[-1] - boundaries[0]) + 1e-6
