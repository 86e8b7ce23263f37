"""What the engine leaves on the device of a list of modules."""

from dataclasses import replace

import pytest
from jobs import make_job

from nemo_rl_offload.offload.solver import Action, Link
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.simulate.simulated_step import (
    highest_peak,
    run_stages,
    run_steady_state,
    run_whole_modules,
)
from nemo_rl_offload.planner.simulate.stages import Part, Stage, StorageGroup, build_stages, job_link, job_schedule
from nemo_rl_offload.planner.simulate.steady_state import steady_state_actions
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import GIB

MODULES = ("mlp_fc1", "mlp_act")


def job(gb_per_s: float, **changes: object) -> Job:
    found = make_job("Qwen/Qwen2.5-7B", num_layers=8, layout=ParallelLayout(1), num_microbatches=2, **changes)
    return replace(found, device=replace(found.device, link_out_gb_per_s=gb_per_s, link_in_gb_per_s=gb_per_s))


def stage(num_layers: int) -> Stage:
    """Layers of 10 ms forward and 20 ms backward that save 100 bytes at their end."""
    group = StorageGroup("mlp_act", 100, can_offload=True, recomputed_by=None, recompute_ms=None)
    parts = tuple(Part(layer, "mlp_act", 10.0, 20.0, groups=(group,)) for layer in range(num_layers))
    return Stage(0, (range(num_layers),), (parts,), {}, (1,))


def test_groups_stay_that_cannot_be_let_go_at_one_boundary_and_fetched_at_a_later_one() -> None:
    """Layer k ends at 10 (k + 1), backward comes to it at 40 + 20 (3 - k): boundaries at 10, 20, 30, 40, 60, 80, 100.

    A copy of 15 ms of layer 0 is out at 25, let go at 30, and has to start back at 85. That of layer 1 is out at 40,
    let go then, and starts back at 60; layer 2's is out at 55 and would have to start back at 45.
    """
    passes = job_schedule(job(1.0), 1)
    keep, offload = Action.KEEP, Action.OFFLOAD
    for link, found in (
        (Link(100 / 15, 100 / 15), [offload, offload, keep, keep]),
        (Link(100 / 45, 100 / 45), [keep] * 4),
        (Link(1e9, 1e9), [offload, offload, offload, keep]),
    ):
        assert steady_state_actions([stage(4)], passes, link, lets_wait=False) == [found]


def test_over_a_fast_link_only_the_end_of_a_forward_stays_and_over_a_slow_one_all() -> None:
    whole = run_whole_modules(job(1e6), MODULES)
    fast, slow = run_steady_state(job(1e6), MODULES), run_steady_state(job(0.01), MODULES)
    kept = [
        record.layer
        for record, action in zip(fast.stages[0].records(), fast.actions[0], strict=True)
        if record.can_offload and action is Action.KEEP
    ]
    assert kept == [7]
    assert fast.host_bytes(0) < whole.host_bytes(0)
    assert slow.host_bytes(0) == 0


def test_what_stays_saves_time_and_costs_memory() -> None:
    whole, listed = run_whole_modules(job(20.0), MODULES), run_steady_state(job(20.0), MODULES)
    assert 0 < listed.host_bytes(0) < whole.host_bytes(0)
    assert listed.step_ms < whole.step_ms
    assert listed.peak_bytes(0) > whole.peak_bytes(0)


def test_what_compute_would_wait_for_stays_while_the_device_has_room() -> None:
    modules = ("qkv_linear", "core_attn", "attn_proj", *MODULES)
    packs = make_job("Qwen/Qwen2.5-1.5B", "h200", layout=ParallelLayout(1), num_microbatches=4, sequence=16_384)
    nothing, listed = run_steady_state(packs, ()), run_steady_state(packs, modules)
    assert listed.step_ms <= 1.021 * nothing.step_ms
    assert listed.peak_bytes(0) < 0.92 * nothing.peak_bytes(0)
    full = run_steady_state(replace(packs, device=replace(packs.device, memory_gib=40.0)), modules)
    assert full.peak_bytes(0) < listed.peak_bytes(0)
    assert full.step_ms > 1.1 * nothing.step_ms


def test_a_stage_lets_compute_wait_where_it_has_no_room_and_others_do_not() -> None:
    """As engines decide, each for its own device. The last stage has the head."""
    modules = ("qkv_linear", "core_attn", "attn_proj", *MODULES)
    four = make_job("Qwen/Qwen2.5-1.5B", layout=ParallelLayout(4, pipeline=4), num_microbatches=16, sequence=16_384)
    four = replace(four, device=replace(four.device, memory_gib=45.0))
    stages, schedule, link = build_stages(four, modules), job_schedule(four, 16), job_link(four)
    spread, waiting = (steady_state_actions(stages, schedule, link, lets_wait=lets_wait) for lets_wait in (False, True))
    all_spread = run_stages(four, stages, spread)
    assert [all_spread.peak_bytes(rank) <= 45 * GIB for rank in range(4)] == [True, True, True, False]
    assert spread[0] != waiting[0]
    assert spread[3] != waiting[3]
    found = run_steady_state(four, modules)
    assert [list(actions) for actions in found.actions] == [*spread[:3], waiting[3]]


def test_megatrons_engine_moves_all() -> None:
    theirs = job(20.0, native_engine=False)
    assert run_steady_state(theirs, MODULES).actions == run_whole_modules(theirs, MODULES).actions


@pytest.mark.parametrize("layout", [ParallelLayout(4, pipeline=4), ParallelLayout(2, pipeline=2, virtual=2)])
def test_in_a_pipeline_only_the_last_stage_has_no_time_for_its_end(layout: ParallelLayout) -> None:
    one = replace(job(1e6), layout=layout, num_microbatches=8)
    stages = build_stages(one, MODULES)
    *others, last = steady_state_actions(stages, job_schedule(one, 8), Link(1e12, 1e12), lets_wait=False)
    can = [[record.can_offload for record in stage.records()] for stage in stages]
    for row, own in zip(others, can[:-1], strict=True):
        assert row.count(Action.OFFLOAD) == sum(own) > 0
    assert last.count(Action.OFFLOAD) < sum(can[-1])


def test_a_plan_predicts_the_configured_list_as_the_engine_does_it() -> None:
    configured = make_plan(job(20.0, offload_modules=MODULES)).configured
    assert configured is not None
    assert configured.actions == run_steady_state(job(20.0), MODULES).actions


@pytest.mark.parametrize("native_engine", [True, False])
def test_a_share_of_the_groups_is_the_earliest_of_each_forward(native_engine: bool) -> None:
    one = replace(job(1e6, native_engine=native_engine), layout=ParallelLayout(2, pipeline=2, virtual=2))
    whole, half, none = (run_steady_state(one, MODULES, fraction) for fraction in (1.0, 0.5, 0.0))
    for rank, stage in enumerate(whole.stages):
        taken = 0
        for parts in stage.chunks:
            size = sum(len(part.groups or (None,)) for part in parts)
            every, earliest = (outcome.actions[rank][taken : taken + size] for outcome in (whole, half))
            taken += size
            moving = [index for index, action in enumerate(every) if action is Action.OFFLOAD]
            kept = len(moving) // 2
            assert kept >= 1
            found = [index for index, action in enumerate(earliest) if action is Action.OFFLOAD]
            assert found == moving[: len(moving) - kept]
        assert taken == len(whole.actions[rank])
        assert whole.host_bytes(rank) > half.host_bytes(rank) > none.host_bytes(rank) == 0


def test_a_plan_follows_the_configured_share_and_chooses_without_it() -> None:
    full = job(20.0, offload_modules=MODULES, offload_fraction=0.5)
    plan = make_plan(replace(full, memory_bytes=int(0.95 * highest_peak(make_plan(full).baseline))))
    assert plan.configured is not None
    assert plan.configured.actions == run_steady_state(job(20.0), MODULES, 0.5).actions
    assert plan.keys["offload_modules"]
    assert plan.keys["activation_offload_fraction"] == 1.0
    assert plan.keys["delta_offload_bytes_across_pp_ranks"] == 0
