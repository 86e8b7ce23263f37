"""E3: steps of different sizes, and what is said of their memory."""

import pytest
from rollouts import draw, figures, largest, slab_bytes


def test_steps_are_the_same_for_a_seed_and_packed_within_the_longest() -> None:
    rollouts = draw(60, 4096, seed=1)
    assert rollouts == draw(60, 4096, seed=1)
    assert rollouts != draw(60, 4096, seed=2)
    for rollout in rollouts:
        starts = [sum(rollout.split.sizes[:number]) for number in range(len(rollout.split.sizes))]
        packs = [rollout.lengths[at : at + n] for at, n in zip(starts, rollout.split.sizes, strict=True)]
        assert sum(map(len, packs)) == len(rollout.lengths)
        assert all(sum(pack) <= width <= 4096 for pack, width in zip(packs, rollout.split.widths, strict=True))


def test_lengths_have_a_long_tail_and_microbatch_counts_differ() -> None:
    rollouts = draw(300, 4096, seed=1)
    lengths = sorted(length for rollout in rollouts for length in rollout.lengths)
    median, mean = lengths[len(lengths) // 2], sum(lengths) / len(lengths)
    assert 1.4 < mean / median < 1.8
    assert lengths[-1] == 4096
    assert len({len(rollout.split.sizes) for rollout in rollouts}) >= 5


def test_the_largest_step_has_the_widest_microbatch() -> None:
    rollouts = draw(50, 4096, seed=3)
    number = largest(rollouts)
    assert max(rollouts[number].split.widths) == max(max(each.split.widths) for each in rollouts)


@pytest.mark.parametrize(("capacity_mib", "slab_mib"), [(0, 16), (256, 16), (1024, 64), (1500, 64), (40_000, 1024)])
def test_one_slab_is_about_a_sixteenth(capacity_mib: int, slab_mib: int) -> None:
    assert slab_bytes(capacity_mib << 20) == slab_mib << 20


def test_figures_hold_the_run_against_the_largest_step_alone() -> None:
    mib = 1 << 20
    alone = [{"peak_allocated_bytes": 1000, "peak_host_bytes": 200 * mib, "host_capacity_bytes": 216 * mib}]
    steps = [
        {"ms": 10.0, "peak_allocated_bytes": 800, "host_capacity_bytes": 200 * mib},
        {"ms": 30.0, "peak_allocated_bytes": 1010, "host_capacity_bytes": 226 * mib},
    ]
    found = figures({"alone": alone, "steps": steps})
    assert found["peak_over_largest_steps_own"] == pytest.approx(1.01)
    assert found["host_less_a_slab_over_largest_steps_own"] == pytest.approx(210 / 200)
    assert found["total_ms"] == 40.0


def test_figures_of_an_engine_that_does_not_count_take_its_capacity() -> None:
    found = figures(
        {
            "alone": [{"peak_allocated_bytes": 10, "host_capacity_bytes": 32 << 20}],
            "steps": [{"ms": 1.0, "peak_allocated_bytes": 10, "host_capacity_bytes": 600 << 20}],
        }
    )
    assert found["host_less_a_slab_over_largest_steps_own"] == pytest.approx((600 - 32) / 32)
