from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.offload.solver import Action, GroupRecord, Link, MemoryBudget, predict, solve

MB = 1_000_000
TOLERANCE = 0.02

times = st.floats(0, 5, allow_subnormal=False)


@st.composite
def groups_of(draw: st.DrawFn, max_size: int) -> list[GroupRecord]:
    live = draw(st.one_of(st.just(st.just(3)), st.just(st.integers(0, 6))))
    scale = draw(st.sampled_from([1.0, 0.1, 0.01]))
    one = st.builds(
        lambda size, forward, backward, recompute, copies, can: GroupRecord(
            "m", 0, size * MB, forward * scale, backward * scale, recompute, copies, can
        ),
        st.integers(0, 300),
        times,
        times,
        st.none() | times,
        live,
        st.sampled_from([True, True, True, False]),
    )
    return draw(st.lists(one, min_size=1, max_size=max_size))


@st.composite
def problems(draw: st.DrawFn, max_size: int) -> tuple[list[GroupRecord], MemoryBudget, Link]:
    groups = draw(groups_of(max_size))
    total = sum(group.saved_bytes * group.live_at_peak for group in groups)
    fixed = draw(st.integers(0, 100)) * MB
    peak = fixed + int(total * draw(st.floats(0, 1.1)))
    host = draw(st.none() | st.floats(0, 1).map(lambda share: int(total * share)))
    link = Link(draw(st.sampled_from([5e6, 2e7, 5e7, 5e8])), draw(st.sampled_from([5e6, 5e7])))
    return groups, MemoryBudget(peak, fixed, host), link


def exhaustive(groups: list[GroupRecord], budget: MemoryBudget, link: Link) -> tuple[int, float]:
    """Return the least shortfall in bytes and the least step time with it, from the lanes of every possible choice."""
    options = [
        [0] + [1] * group.can_offload + ([] if group.recompute_ms is None else [2])
        for group in groups
    ]  # fmt: skip
    codes: Any = np.array(list(product(*options)), dtype=np.int8).T
    now, out_free = np.zeros(codes.shape[1]), np.zeros(codes.shape[1])
    peak, host = np.full(codes.shape[1], budget.fixed_bytes), np.zeros(codes.shape[1])
    for group, code in zip(groups, codes, strict=True):
        now = now + group.forward_ms
        out_free = np.where(code == 1, np.maximum(out_free, now) + group.saved_bytes / link.out_bytes_per_ms, out_free)
        peak = peak + np.where(code == 0, group.saved_bytes * group.live_at_peak, 0)
        host = host + np.where(code == 1, group.saved_bytes * group.live_at_peak, 0)
    now = np.maximum(now, out_free)
    in_free = now
    for group, code in zip(reversed(groups), reversed(codes), strict=True):
        in_free = np.where(code == 1, in_free + group.saved_bytes / link.in_bytes_per_ms, in_free)
        now = np.where(code == 1, np.maximum(now, in_free), now)
        now = now + group.backward_ms + np.where(code == 2, group.recompute_ms or 0.0, 0.0)
    shortfall = np.maximum(peak - budget.peak_bytes, 0)
    allowed = host <= (np.inf if budget.host_bytes is None else budget.host_bytes)
    least = shortfall[allowed].min()
    return int(least), float(now[allowed & (shortfall == least)].min())


def check_against_exhaustive(groups: list[GroupRecord], budget: MemoryBudget, link: Link) -> None:
    plan = solve(groups, budget, link)
    shortfall, step_ms = exhaustive(groups, budget, link)
    assert plan.shortfall_bytes == shortfall
    assert step_ms * (1 - 1e-9) - 1e-9 <= plan.step_ms <= step_ms * (1 + TOLERANCE) + 1e-9
    assert budget.host_bytes is None or plan.host_bytes <= budget.host_bytes


@given(problems(7))
@settings(max_examples=150, deadline=None)
def test_no_choice_is_better(problem: tuple[list[GroupRecord], MemoryBudget, Link]) -> None:
    check_against_exhaustive(*problem)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_no_choice_of_twelve_groups_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = [
        GroupRecord(
            "m",
            layer,
            int(random.integers(1, 300)) * MB,
            float(random.random() * 3),
            float(random.random() * 6),
            float(random.random() * 3),
            int(random.integers(1, 5)),
        )
        for layer in range(12)
    ]
    total = sum(group.saved_bytes * group.live_at_peak for group in groups)
    host = [None, int(total * 0.4)][seed % 2]
    check_against_exhaustive(groups, MemoryBudget(int(total * 0.1 * (seed + 2)), 0, host), Link(3e7, 5e7))


@given(problems(60))
@settings(max_examples=60, deadline=None)
def test_a_plan_keeps_its_budgets_and_says_what_is_lacking(
    problem: tuple[list[GroupRecord], MemoryBudget, Link],
) -> None:
    groups, budget, link = problem
    plan = solve(groups, budget, link)
    chosen = list(zip(groups, plan.actions, strict=True))
    kept = sum(group.saved_bytes * group.live_at_peak for group, action in chosen if action is Action.KEEP)
    moved = sum(group.saved_bytes * group.live_at_peak for group, action in chosen if action is Action.OFFLOAD)
    assert plan.peak_bytes == budget.fixed_bytes + kept
    assert plan.host_bytes == moved <= (moved if budget.host_bytes is None else budget.host_bytes)
    assert plan.shortfall_bytes == max(0, plan.peak_bytes - budget.peak_bytes)
    assert all(group.can_offload for group, action in chosen if action is Action.OFFLOAD)
    assert all(group.recompute_ms is not None for group, action in chosen if action is Action.RECOMPUTE)
    if plan.shortfall_bytes and budget.host_bytes is None:
        assert not [g for g, a in chosen if a is Action.KEEP and g.saved_bytes * g.live_at_peak and g.can_offload]


def layers(num_layers: int) -> list[GroupRecord]:
    """A transformer whose copies take less than its computation; what `expert_fc2` saves can be recomputed."""
    sizes = {"attn_norm": (59, 0.3), "core_attn": (200, 6.0), "mlp_norm": (59, 0.3), "expert_fc1": (470, 12.0)}
    return [
        GroupRecord(module, layer, size * MB, forward, 2 * forward, None, 4)
        for layer in range(num_layers)
        for module, (size, forward) in sizes.items()
    ]


def test_nothing_is_done_where_everything_fits() -> None:
    groups = layers(3)
    plan = solve(groups, MemoryBudget(10**12), Link(5e7, 5e7))
    assert set(plan.actions) == {Action.KEEP}
    assert plan.exposed_ms == 0
    assert plan.step_ms == pytest.approx(3 * 18.6 * 3)


def test_the_last_groups_stay_because_their_copies_would_show() -> None:
    groups = layers(4)
    total = sum(group.saved_bytes * group.live_at_peak for group in groups)
    plan = solve(groups, MemoryBudget(total * 7 // 10), Link(5e7, 5e7))
    assert plan.shortfall_bytes == 0
    assert plan.exposed_ms == 0
    assert plan.actions[-1] is Action.KEEP
    assert Action.OFFLOAD in plan.actions


def test_a_slow_link_makes_recomputation_the_better_choice() -> None:
    groups = [GroupRecord("moe_act", layer, 100 * MB, 1.0, 2.0, 0.5, 1) for layer in range(4)]
    budget = MemoryBudget(200 * MB)
    assert solve(groups, budget, Link(1e5, 1e5)).actions.count(Action.RECOMPUTE) == 2
    assert solve(groups, budget, Link(1e9, 1e9)).actions.count(Action.OFFLOAD) == 2


def test_a_group_that_is_not_alive_at_the_peak_is_left_alone() -> None:
    groups = [GroupRecord("a", 0, MB, 1, 1, None, 0), GroupRecord("b", 0, MB, 1, 1, None, 2)]
    assert solve(groups, MemoryBudget(0), Link(1e6, 1e6)).actions == (Action.KEEP, Action.OFFLOAD)


def test_prediction_of_a_choice_by_hand() -> None:
    """Copies of 2 ms each: the second leaves at 3 and has left at 5, one after forward ends; it is back at 7."""
    groups = [GroupRecord("a", 0, 2 * MB, 2, 5, None, 1), GroupRecord("b", 0, 2 * MB, 1, 2, None, 3)]
    plan = predict(groups, [Action.KEEP, Action.OFFLOAD], MemoryBudget(3 * MB, 2 * MB), Link(1e6, 1e6))
    assert (plan.exposed_ms, plan.step_ms) == (4, 14)
    assert (plan.peak_bytes, plan.host_bytes, plan.shortfall_bytes) == (4 * MB, 6 * MB, MB)


def test_no_groups() -> None:
    plan = solve([], MemoryBudget(5, 8), Link(1, 1))
    assert (plan.actions, plan.peak_bytes, plan.shortfall_bytes) == ((), 8, 3)
