from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import SENSIBLE, make_job

from nemo_rl_offload.offload.solver import Action, GroupRecord, Link, MemoryBudget, Solution, solve
from nemo_rl_offload.planner.cost.storages import Numbers
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.plan import JobPlan, make_plan
from nemo_rl_offload.planner.search import choice as search_module
from nemo_rl_offload.planner.search.candidates import candidates
from nemo_rl_offload.planner.search.choice import ways
from nemo_rl_offload.planner.search.suggestions import least_shortfall
from nemo_rl_offload.planner.search.to_config import choice_to_config, excess_bytes
from nemo_rl_offload.planner.simulate import stages as stages_module
from nemo_rl_offload.planner.simulate.pipeline_schedule import live_passes, pipeline_schedule
from nemo_rl_offload.planner.simulate.simulated_step import (
    highest_peak,
    module_rows,
    run_stages,
    run_steady_state,
    run_whole_modules,
)
from nemo_rl_offload.planner.simulate.simulator import Transfers, simulate
from nemo_rl_offload.planner.simulate.stages import build_stages, job_link, job_schedule, live_at_peak
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

GIB = 1 << 30
MOE, LATENT = "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"


def check_plan(plan: JobPlan) -> None:
    """What holds for every plan."""
    job = plan.job
    assert plan.shortfall_bytes == max(0, highest_peak(plan.chosen) - job.budget_bytes)
    if not plan.shortfall_bytes:
        assert highest_peak(plan.written.step) <= job.budget_bytes or plan.keys["offload_modules"] == "auto"
        assert plan.suggestions == ()
    assert highest_peak(plan.chosen) <= highest_peak(plan.baseline)
    for rank in range(job.layout.pipeline):
        assert plan.chosen.host_bytes(rank) <= job.host_budget_bytes
    assert plan.chosen.step_ms >= plan.baseline.step_ms * (1 - 1e-9)
    assert plan.baseline.step_ms > 0
    written = plan.written.step
    if not excess_bytes(job, written):
        assert plan.chosen.step_ms <= written.step_ms + 1e-3
    points = plan.frontier
    if plan.job.native_engine and highest_peak(plan.baseline) > job.budget_bytes:
        for each in (plan.chosen, written):
            known = (highest_peak(each), round(each.step_ms, 3))
            assert any(point.peak_bytes <= known[0] and point.step_ms <= known[1] for point in points)
    assert len(points) <= 6
    assert [point.peak_bytes for point in points] == sorted({point.peak_bytes for point in points})
    times = [point.step_ms for point in points]
    assert times == sorted(times, reverse=True)
    beaten = [more.peak_bytes for less, more in pairwise(points) if less.step_ms == more.step_ms]
    assert set(beaten) <= {highest_peak(plan.chosen)}, "the choice alone may take as long as a point with less memory"


HUNDREDS = ("Qwen/Qwen3-235B-A22B", LATENT)
"""Layouts of so many stages and microbatches that a plan takes seconds."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in HUNDREDS else []) for name in SENSIBLE]
)
def test_every_model_of_the_catalogue_can_be_planned(name: str) -> None:
    plan = make_plan(make_job(name))
    check_plan(plan)
    assert plan.shortfall_bytes == 0 or plan.suggestions


@given(
    st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"]),
    st.floats(12, 40),
    st.sampled_from([ParallelLayout(8), ParallelLayout(8, pipeline=2), ParallelLayout(16, pipeline=4, virtual=3)]),
    st.integers(1, 3),
)
@settings(max_examples=6, deadline=None)
def test_plans_meet_their_budgets(name: str, memory_gib: float, layout: ParallelLayout, micro_batch: int) -> None:
    expert = 8 if "A3B" in name and layout.pipeline == 1 else 1
    job = make_job(name, num_layers=12, layout=replace(layout, expert=expert), memory_bytes=int(memory_gib * GIB))
    check_plan(make_plan(replace(job, micro_batch=micro_batch, sequence=2048)))


def test_nothing_is_offloaded_where_all_fits() -> None:
    plan = make_plan(make_job("Qwen/Qwen2.5-1.5B"))
    assert plan.keys == {"fine_grained_activation_offloading": False, "offload_modules": []}
    assert plan.chosen.actions == plan.baseline.actions


def test_no_stage_is_cut_and_no_choice_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[Hashable] = Counter()

    def cut(job: Job, modules: tuple[str, ...], may_recompute: frozenset[str]) -> object:
        asked[job, modules, may_recompute] += 1
        return builder(job, modules, may_recompute)

    def choose_counted(groups: tuple[GroupRecord, ...], budget: MemoryBudget, link: Link) -> Solution:
        asked[groups, budget, link] += 1
        return solve(groups, budget, link)

    builder = stages_module._Builder
    monkeypatch.setattr(stages_module, "_Builder", cut)
    monkeypatch.setattr(search_module, "solve", choose_counted)
    job = make_job("Qwen/Qwen3-30B-A3B", num_layers=11, layout=ParallelLayout(8, expert=8), memory_bytes=20 * GIB)
    plan = make_plan(replace(job, sequence=3072))
    assert plan.frontier
    assert len(asked) > 20
    assert set(asked.values()) == {1}


def test_a_smaller_budget_takes_more_time() -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", num_layers=10, micro_batch=2)
    most = highest_peak(make_plan(job).baseline)
    plans = [make_plan(replace(job, memory_bytes=most - less * GIB // 4)) for less in (1, 3, 5)]
    for plan in plans:
        check_plan(plan)
        assert plan.shortfall_bytes == 0
    assert plans[0].keys["offload_modules"]
    times = [round(plan.chosen.step_ms, 6) for plan in plans]
    assert round(plans[0].baseline.step_ms, 6) <= times[0] <= times[1] <= times[2] < 1.1 * times[0]


@pytest.mark.slow
def test_what_cannot_fit_says_how_much_and_what_would_do() -> None:
    job = make_job("meta-llama/Llama-3.1-70B", layout=ParallelLayout(64, tensor=4, pipeline=2, sequence_parallel=True))
    job = replace(job, memory_bytes=40 * GIB)
    plan = make_plan(job)
    assert plan.shortfall_bytes == pytest.approx(least_shortfall(job), rel=0.2)
    assert "policy.megatron_cfg.pipeline_model_parallel_size=8" in plan.suggestions
    assert make_plan(replace(job, layout=replace(job.layout, pipeline=8), num_microbatches=32)).shortfall_bytes == 0


@pytest.mark.slow
def test_logits_that_do_not_fit_whole_are_proposed_in_pieces() -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", sequence=1024, micro_batch=16, memory_bytes=40 * GIB)
    assert make_plan(job).suggestions[:2] == (
        "policy.megatron_cfg.use_fused_linear_logprobs=true",
        "policy.logprob_chunk_size=128",
    )
    assert make_plan(replace(job, makes_logits=False)).shortfall_bytes == 0
    in_pieces = replace(job, logprob_chunk_size=128)
    assert make_plan(in_pieces).shortfall_bytes == 0
    assert not any(
        "logprob_chunk_size" in change for change in make_plan(replace(in_pieces, memory_bytes=20 * GIB)).suggestions
    )


def test_the_host_budget_is_kept() -> None:
    job = make_job("Qwen/Qwen3-8B", num_layers=10, micro_batch=2)
    job = replace(job, memory_bytes=highest_peak(make_plan(job).baseline) - 2 * GIB)
    free = make_plan(job)
    assert free.shortfall_bytes == 0
    tight = make_plan(replace(job, host_budget=free.chosen.host_bytes(0) // 2))
    check_plan(tight)
    assert tight.chosen.host_bytes(0) <= free.chosen.host_bytes(0) // 2


def test_full_recomputation_keeps_layer_inputs_alone() -> None:
    job = make_job("Qwen/Qwen3-8B", layout=ParallelLayout(8))
    recomputed = replace(job, recompute=Recompute(method="uniform"))
    outcomes = []
    for each in (job, recomputed):
        stages = build_stages(each, ())
        outcomes.append(run_stages(each, stages, [[Action.KEEP] * len(stages[0].records())]))
    inputs = 36 * 4096 * 4096 * 2
    assert outcomes[1].times[0].peak_bytes == inputs + 2 * 4096 * 4096 * 2
    assert "recomputation" in outcomes[1].stages[0].static_bytes
    assert outcomes[1].step_ms == pytest.approx(outcomes[0].step_ms * 4 / 3, rel=0.05)
    block = build_stages(replace(job, recompute=Recompute(method="block", num_layers=10)), candidates(job))[0]
    assert [part.module for part in block.chunks[0]].count("recomputed_layer") == 10


def test_the_inputs_of_recomputed_layers_can_be_offloaded() -> None:
    job = replace(make_job("Qwen/Qwen3-8B", layout=ParallelLayout(8)), recompute=Recompute(method="uniform"))
    kept, offloaded = run_whole_modules(job, ()), run_whole_modules(job, ("attn_norm",))
    one_input = 4096 * 4096 * 2
    assert offloaded.host_bytes(0) == 36 * one_input
    assert kept.peak_bytes(0) - offloaded.peak_bytes(0) >= 25 * one_input, "but for copies on their way"
    assert run_whole_modules(job, ("core_attn", "mlp_norm")).host_bytes(0) == 0
    assert run_whole_modules(replace(job, min_elements=1 << 40), ("attn_norm",)).host_bytes(0) == 0
    groups = replace(job, recompute=Recompute(method="uniform", num_layers=4))
    assert run_whole_modules(groups, ("attn_norm",)).host_bytes(0) == 9 * one_input
    narrow = replace(job, numbers=Numbers(2, "blockwise"))  # whose checkpoints are Transformer Engine's
    assert run_whole_modules(narrow, ("attn_norm",)).host_bytes(0) == 0


@pytest.mark.parametrize(
    ("name", "module", "share"),
    [
        ("Qwen/Qwen3-30B-A3B", "moe", 1.0),
        ("Qwen/Qwen3-30B-A3B", "moe_act", 0.2),
        ("Qwen/Qwen3-30B-A3B", "layernorm", 0.2),
        ("Qwen/Qwen3-8B", "mlp", 1.0),
        ("Qwen/Qwen3-8B", "mlp_fc1", 0.67),
        ("Qwen/Qwen3-8B", "mlp_act", 0.05),
        ("Qwen/Qwen3-8B", "core_attn", 1.0),
    ],
)
def test_configured_recomputation_takes_time_and_gives_memory(name: str, module: str, share: float) -> None:
    outcomes = []
    for modules in (frozenset[str](), frozenset([module])):
        job = make_job(name, layout=ParallelLayout(8), recompute=Recompute(modules=modules))
        stages = build_stages(job, ())
        outcomes.append(run_stages(job, stages, [[Action.KEEP] * len(stages[0].records())]))
    plain, recomputed = outcomes
    added_ms = recomputed.step_ms - plain.step_ms
    assert 0 < added_ms < share * plain.step_ms / 3
    assert (recomputed.times[0].peak_bytes < plain.times[0].peak_bytes) == (module != "core_attn")


def test_configured_modules_are_predicted_as_they_are() -> None:
    job = make_job("Qwen/Qwen3-8B", offload_modules=("core_attn", "attn_proj"), native_engine=False)
    plan = make_plan(job)
    assert plan.configured is not None
    rows = {row.module: row for row in module_rows(plan.configured, 0)}
    assert set(rows) == {"core_attn", "attn_proj"}
    assert all(len(row.places[Action.OFFLOAD]) == row.num_layers == 36 for row in rows.values())
    assert plan.configured.host_bytes(0) == sum(row.offloaded_bytes for row in rows.values())


def test_what_is_written_is_predicted_as_the_engine_does_it() -> None:
    """It keeps what has no time to leave and come back: less time, and more memory, than if all moved."""
    layout = ParallelLayout(8, tensor=4, sequence_parallel=True)
    job = make_job("Qwen/Qwen2.5-7B", layout=layout, sequence=16384, num_microbatches=4)
    job = replace(job, device=replace(job.device, memory_gib=38.0))
    plan = make_plan(job)
    written = replace(job, recompute=plan.written.recompute)
    whole = run_whole_modules(written, plan.written.offload_modules)
    assert plan.written.step == run_steady_state(written, plan.written.offload_modules)
    assert plan.written.step.step_ms < whole.step_ms
    assert highest_peak(whole) < highest_peak(plan.written.step) <= job.budget_bytes


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("native_engine", [True, False])
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", MOE, LATENT])
def test_less_memory_recomputes_more_and_never_costs_more_than_recomputing_all(name: str, native_engine: bool) -> None:
    """At the memory of full recomputation, a choice takes no longer than that; what is given up first is cheap."""
    layout = (
        ParallelLayout(16, expert=8)
        if name == MOE
        else ParallelLayout(64, expert=16)
        if name == LATENT
        else ParallelLayout(8)
    )
    job = make_job(name, num_layers=8, layout=layout, sequence=8192, native_engine=native_engine)
    job = replace(job, recomputes_mlp_parts=native_engine, device=replace(job.device, memory_gib=1000.0))
    full = make_plan(replace(job, recompute=Recompute(method="uniform"))).baseline
    most = highest_peak(make_plan(job).baseline)
    found = []
    for share in (0.9, 0.5, 0.2, 0.0):
        memory_bytes = highest_peak(full) + round(share * (most - highest_peak(full)))
        plan = make_plan(replace(job, memory_bytes=memory_bytes))
        check_plan(plan)
        assert plan.shortfall_bytes == 0
        found.append(plan)
    times = [(plan.chosen if native_engine else plan.written.step).step_ms for plan in found]
    assert all(more <= 1.01 * less for more, less in pairwise(times)), "but for a search that is not exhaustive"
    assert times[-1] <= full.step_ms * (1 + 1e-9)
    assert times[0] < 1.03 * found[0].baseline.step_ms
    for plan in found:
        written = plan.written.step
        assert (
            plan.keys["offload_modules"] == "auto" or written.step_ms < 1.03 * plan.chosen.step_ms or not native_engine
        )


def test_recomputed_mlps_take_the_place_of_copies_that_the_link_has_no_time_for() -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", sequence=16384, memory_bytes=48 * GIB, logprob_chunk_size=1024)
    plan = make_plan(job)
    check_plan(plan)
    assert {"mlp_act", "mlp_fc1"} & plan.chosen_job.recompute.modules
    assert plan.keys["recompute_granularity"] == "selective"
    without = min(
        (run_steady_state(job, modules) for modules in (candidates(job), ("mlp_act",), ("mlp_fc1", "mlp_act"))),
        key=lambda outcome: outcome.step_ms if highest_peak(outcome) <= job.budget_bytes else float("inf"),
    )
    assert plan.chosen.step_ms < without.step_ms or highest_peak(without) > job.budget_bytes


def test_configured_recomputation_is_never_less_than_before() -> None:
    given = Recompute(modules=frozenset({"mlp_act", "mlp_fc1"}), num_counted_layers=3)
    job = make_job("Qwen/Qwen2.5-7B", num_layers=8, layout=ParallelLayout(8), sequence=8192, recompute=given)
    counts = [way.recompute.num_counted_layers for way in ways(job)]
    assert counts == [3, 4, 6, 7, None, None]
    assert [way.recompute.method for way in ways(job)] == [None] * 5 + ["uniform"]
    plain = [way.recompute.modules for way in ways(replace(job, recompute=Recompute()))]
    assert plain[:3] == [set(), {"mlp_act"}, {"mlp_act", "mlp_fc1"}]
    theirs = list(ways(replace(job, recompute=Recompute(), native_engine=False, recomputes_mlp_parts=False)))
    assert [(way.recompute.modules, way.recompute.num_counted_layers) for way in theirs[1:3]] == [
        ({"mlp"}, 2),
        ({"mlp"}, 3),
    ]
    block = list(ways(replace(job, recompute=Recompute(method="block", num_layers=2))))
    assert [way.recompute.num_layers for way in block[:-1]] == [2, 3, 4, 6, 7]
    assert block[-1].recompute == Recompute(method="uniform")
    assert len(list(ways(block[-1]))) == 1


@pytest.mark.parametrize(
    ("name", "recomputed", "module", "remains"),
    [
        (LATENT, "mla_up_proj", "core_attn", False),
        (LATENT, "layernorm", "qkv_linear", False),
        (MOE, "layernorm", "qkv_linear", True),
        (MOE, "moe_act", "expert_fc2", False),
    ],
)
def test_whole_modules_do_not_save_what_recomputation_discards(
    name: str, recomputed: str, module: str, remains: bool
) -> None:
    """`check` refuses the two together; one layer of a choice may offload what another discards."""
    layout = ParallelLayout(64, expert=16) if name == LATENT else ParallelLayout(16, expert=8)
    job = make_job(name, num_layers=4, layout=layout, recompute=Recompute(modules=frozenset({recomputed})))
    job = replace(job, device=replace(job.device, memory_gib=1000.0))
    stages = build_stages(job, candidates(job))
    records = stages[0].records()
    actions = [[Action.OFFLOAD if r.can_offload and r.module == module else Action.KEEP for r in records]]
    written = choice_to_config(replace(job, memory_bytes=1 << 30), run_stages(job, stages, actions))
    assert recomputed in written.recompute.modules
    assert remains or module not in written.offload_modules


def test_live_microbatches_of_chunks() -> None:
    """PP 4, VPP 2: the first stage holds 11 chunks' worth, seven of them of its first chunk."""
    passes = pipeline_schedule(4, 8, 2)[0]
    assert live_at_peak(passes, [1, 1]) == (7, 4)
    assert sum(live_at_peak(passes, [1, 1])) == max(live_passes(passes))


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_long_step_is_extended_from_a_short_one(virtual: int) -> None:
    """The extended time is that of a simulation in full."""
    layout = ParallelLayout(16, pipeline=4, virtual=virtual)
    job = make_job("meta-llama/Llama-3.1-8B", layout=layout, num_microbatches=40)
    stages = build_stages(job, candidates(job))
    actions = [[Action.OFFLOAD if r.can_offload else Action.KEEP for r in stage.records()] for stage in stages]
    extended = run_stages(job, stages, actions).step_ms
    segments = [stage.segments(chosen) for stage, chosen in zip(stages, actions, strict=True)]
    whole = simulate(job_schedule(job, 40), segments, Transfers(job_link(job))).step_ms
    assert extended == pytest.approx(whole, rel=0.01 * virtual)


@pytest.mark.parametrize("sequence", [1024, 2048])
@pytest.mark.parametrize("transformer_engine", [False, True])
def test_offloading_is_never_faster_than_nothing(sequence: int, transformer_engine: bool) -> None:
    """It was, by 7 %: the simulated part ended behind a wait for copies, where a stage catches up."""
    changes = {"num_microbatches": 128, "sequence": sequence, "transformer_engine": transformer_engine}
    layout = ParallelLayout(8, pipeline=2)
    job = make_job("Qwen/Qwen2.5-1.5B", "b200-180gb", 8, layout=layout, makes_logits=False, **changes)
    modules = ("qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act")
    nothing, offloaded = (run_steady_state(job, each).step_ms for each in ((), modules))
    assert offloaded >= nothing * (1 - 1e-9)


def test_layers_recomputed_at_a_time_are_no_more_than_a_chunk_has() -> None:
    """Megatron-Core cuts the number off there."""
    recomputed = [Recompute(method="uniform", num_layers=number) for number in (10, 20, 80)]
    outcomes = [run_whole_modules(make_job("meta-llama/Llama-3.1-70B", recompute=each), ()) for each in recomputed]
    peaks = [[outcome.peak_bytes(rank) for rank in range(4)] for outcome in outcomes]
    assert peaks[0] == peaks[1] == peaks[2]


def test_multi_token_prediction_is_recomputed_with_whole_layers() -> None:
    """As another layer, but for its projection's inputs; a block of layers leaves it as it is."""
    layers = (Recompute(), Recompute(method="uniform"), Recompute(method="block", num_layers=2))
    with_mtp = [make_job(LATENT, num_layers=2, layout=ParallelLayout(16, expert=16), recompute=each) for each in layers]
    without = [replace(job, shape=replace(job.shape, num_mtp_layers=0)) for job in with_mtp]
    extra = [
        run_whole_modules(job, ()).stages[0].kept_bytes() - run_whole_modules(other, ()).stages[0].kept_bytes()
        for job, other in zip(with_mtp, without, strict=True)
    ]
    assert extra[1] == 2 * 4096 * 7168 * 2
    assert extra[0] == extra[2] > 10 * extra[1]


@pytest.mark.slow
def test_rows_count_layers_and_waits_once() -> None:
    """A module of a layer may have several groups, of which some move; a layer's wait is that of one module."""
    job = make_job(
        LATENT, "h200-141gb", layout=ParallelLayout(256, pipeline=8, expert=32, num_layers_first=6, num_layers_last=7)
    )
    outcome = make_plan(job).chosen
    for rank, stage in enumerate(outcome.stages):
        rows = module_rows(outcome, rank)
        num_layers = sum(map(len, stage.layers)) + (job.shape.num_mtp_layers if rank == 7 else 0)
        assert all(row.num_layers <= num_layers for row in rows)
        assert sum(row.exposed_ms for row in rows) == pytest.approx(outcome.times[rank].exposed_ms)


@pytest.mark.parametrize("num_mtp", [0, 1])
@pytest.mark.parametrize("method", [None, "uniform", "block"])
@pytest.mark.parametrize("stages", ["Etttt|", "Et|t|tt|"])
def test_a_last_stage_without_layers_of_its_own(stages: str, method: str | None, num_mtp: int) -> None:
    """It has the loss, and the layers for further tokens where there are any."""
    virtual = (stages.count("|") + 1) // 2
    layout = ParallelLayout(2, pipeline=2, virtual=virtual, stages=f"{stages}{'m' * num_mtp}L")
    job = make_job(LATENT, num_layers=4, layout=layout, recompute=Recompute(method=method))
    outcome = run_whole_modules(replace(job, shape=replace(job.shape, num_mtp_layers=num_mtp)), ())
    assert sum(len(chunk) for stage in outcome.stages for chunk in stage.layers) == 4
    assert len(outcome.stages[1].layers[-1]) == 0
    assert outcome.stages[1].kept_bytes() > 0
