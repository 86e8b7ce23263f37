import pytest
from event_simulation import brute_force_step_ms
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload.overlap import MIN_BOUND_BYTES
from nemo_rl_offload.offload.solver import Link
from nemo_rl_offload.planner.simulate.pipeline_schedule import live_passes, pipeline_schedule
from nemo_rl_offload.planner.simulate.simulator import Segment, Segments, Transfers, simulate

FREE = Transfers(Link(1e30, 1e30))


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, Segments, Transfers]:
    num_stages, num_chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)]))
    num_microbatches = draw(st.integers(1, 3)) * num_stages if num_chunks > 1 else draw(st.integers(1, 6))
    segment = st.builds(Segment, st.integers(1, 6), st.integers(1, 9), st.integers(0, 5), st.integers(0, 4))
    chunk = st.lists(segment, min_size=1, max_size=4)
    segments = [[draw(chunk) for _ in range(num_chunks)] for _ in range(num_stages)]
    cap = st.sampled_from([1, 3, 6, 10**6])
    rate = st.sampled_from([1.0, 0.5, 0.25])
    transfers = Transfers(Link(draw(rate), draw(rate)), draw(cap), draw(cap), draw(st.integers(0, 3)))
    return num_stages, num_microbatches, num_chunks, segments, transfers


@given(steps())
@settings(max_examples=150, deadline=None)
def test_step_time_is_that_of_a_brute_force_simulation(step: tuple[int, int, int, Segments, Transfers]) -> None:
    num_stages, num_microbatches, num_chunks, segments, transfers = step
    schedule = pipeline_schedule(num_stages, num_microbatches, num_chunks)
    expected = brute_force_step_ms(schedule, segments, transfers)
    assert simulate(schedule, segments, transfers).step_ms == pytest.approx(expected, abs=1e-6)


@given(steps())
@settings(max_examples=60, deadline=None)
def test_memory_is_within_its_bounds(step: tuple[int, int, int, Segments, Transfers]) -> None:
    num_stages, num_microbatches, num_chunks, segments, transfers = step
    schedule = pipeline_schedule(num_stages, num_microbatches, num_chunks)
    timeline = simulate(schedule, segments, transfers)
    for rank, times in enumerate(timeline.stages):
        flat = [segment for chunk in segments[rank] for segment in chunk]
        offloaded = num_microbatches * sum(segment.offloaded_bytes for segment in flat)
        everything = offloaded + num_microbatches * sum(segment.kept_bytes for segment in flat)
        assert times.peak_host_bytes <= offloaded
        assert max(s.kept_bytes + s.offloaded_bytes for s in flat) <= times.peak_bytes <= everything
        assert (times.peak_host_bytes > 0) == (offloaded > 0)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_live_microbatches_under_1f1b(num_stages: int, num_microbatches: int) -> None:
    schedule = pipeline_schedule(num_stages, num_microbatches)
    for stage, passes in enumerate(schedule):
        assert max(live_passes(passes)) == min(num_stages - stage, num_microbatches)
        assert live_passes(passes)[-1] == 0
        assert sorted(passes) == sorted(set(passes))
        assert len(passes) == 2 * num_microbatches


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_live_passes_under_interleaving(num_stages: int, num_chunks: int) -> None:
    """Narayanan et al. 2021: the first stage holds p (v - 1) + 2 (p - 1) + 1 parts of the model's chunks."""
    schedule = pipeline_schedule(num_stages, 2 * num_stages, num_chunks)
    for stage, passes in enumerate(schedule):
        assert max(live_passes(passes)) == num_stages * (num_chunks - 1) + 2 * (num_stages - stage - 1) + 1
        assert len(set(passes)) == len(passes) == 4 * num_stages * num_chunks


def test_a_pipeline_without_copies_has_the_bubble_of_the_textbook() -> None:
    """(p - 1) (f + b) beside m (f + b); a v-th of it with interleaving."""
    for num_chunks in (1, 2):
        segments = [[[Segment(2 / num_chunks, 4 / num_chunks)]] * num_chunks] * 4
        step_ms = simulate(pipeline_schedule(4, 8, num_chunks), segments, FREE).step_ms
        assert step_ms == pytest.approx(6 * (8 + 3 / num_chunks))


def test_peak_counts_live_microbatches() -> None:
    segments = [[[Segment(1, 2, kept_bytes=10)]] for _ in range(4)]
    timeline = simulate(pipeline_schedule(4, 8), segments, FREE)
    assert [times.peak_bytes for times in timeline.stages] == [40, 30, 20, 10]


def test_copies_by_hand() -> None:
    """Copies out take 2-4 and 4-6; copies in, reversed, 6-8 (needed at 3) and 8-10 (needed at 11)."""
    segments = [[[Segment(2, 5, offloaded_bytes=2), Segment(1, 3, offloaded_bytes=2)]]]
    timeline = simulate(pipeline_schedule(1, 1), segments, Transfers(Link(1, 1)))
    assert timeline.step_ms == 3 + 5 + 3 + 5
    times = timeline.stages[0]
    assert times.waits_in_ms == [[0, 5]]
    assert times.exposed_ms == 5
    assert (times.peak_bytes, times.peak_host_bytes) == (4, 4)


def test_a_cap_on_copies_out_makes_compute_wait() -> None:
    segments = [[[Segment(1, 9, offloaded_bytes=3), Segment(1, 9, offloaded_bytes=3), Segment(9, 9)]]]
    capped = simulate(pipeline_schedule(1, 1), segments, Transfers(Link(1, 1), max_inflight_bytes=3))
    assert capped.stages[0].waits_out_ms == [[0, 2, 0]]
    assert simulate(pipeline_schedule(1, 1), segments, Transfers(Link(1, 1))).stages[0].exposed_ms == 0


def test_without_a_bound_two_of_the_largest_copies_may_be_on_their_way() -> None:
    """As the engine does it: with 1 GiB, compute would wait for each of these copies of 3 GiB before it goes on."""
    copy = Segment(1, 9, offloaded_bytes=3 * MIN_BOUND_BYTES)
    segments, link = [[[copy, copy, Segment(99, 9)]]], Link(MIN_BOUND_BYTES, MIN_BOUND_BYTES)
    passes = pipeline_schedule(1, 1)
    assert simulate(passes, segments, Transfers(link)).stages[0].waits_out_ms == [[0, 0, 0]]
    bounded = simulate(passes, segments, Transfers(link, max_inflight_bytes=MIN_BOUND_BYTES))
    assert bounded.stages[0].waits_out_ms == [[3, 3, 0]]
    small = Segment(1, 9, offloaded_bytes=MIN_BOUND_BYTES // 4)
    many = simulate(passes, [[[small] * 5 + [Segment(99, 9)]]], Transfers(Link(MIN_BOUND_BYTES / 100, MIN_BOUND_BYTES)))
    assert many.stages[0].waits_out_ms == [[0, 0, 0, 0, 25 - 4, 0]], "up to 1 GiB"


def test_late_copies_in_take_no_memory_early() -> None:
    """Reloading could begin at 4; by the time it must, the last segment has been given back."""
    last = Segment(1, 1, kept_bytes=5)
    segments = [[[Segment(1, 1, offloaded_bytes=3), Segment(9, 9, offloaded_bytes=1), last]]]
    times = simulate(pipeline_schedule(1, 1), segments, Transfers(Link(1, 1))).stages[0]
    assert times.peak_bytes == 1 + 5
    assert times.exposed_ms == 0


def test_what_was_copied_out_stays_until_the_engine_can_look() -> None:
    """The copy ends at 4, and nothing else is offloaded whose forward ends or whose backward starts before its own."""
    segments = [[[Segment(1, 1, offloaded_bytes=3), Segment(9, 9), Segment(1, 1, kept_bytes=5)]]]
    times = simulate(pipeline_schedule(1, 1), segments, Transfers(Link(1, 1))).stages[0]
    assert times.peak_bytes == 3 + 5
