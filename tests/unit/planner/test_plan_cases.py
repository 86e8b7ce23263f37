"""No plan contradicts itself, and what is planted is found."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import plan_cases
import pytest
from jobs import make_job
from plan_cases import CFG, Case, Planned, run_cases

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner import plan as plan_module
from nemo_rl_offload.planner.job import Job, Recompute
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.report import tables
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.search import choice as choice_module
from nemo_rl_offload.planner.search import frontier as frontier_module
from nemo_rl_offload.planner.search.suggestions import suggest
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, Trials
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak, run_stages, run_steady_state
from nemo_rl_offload.planner.simulate.stages import build_stages
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

SMALL, LATENT = "Qwen/Qwen2.5-1.5B", "deepseek-ai/DeepSeek-V3"
SAMPLE = (14, 15)


@pytest.mark.slow
def test_no_plan_contradicts_itself() -> None:
    wrong, _ = run_cases(SAMPLE)
    assert wrong == []


@pytest.mark.sampled
@pytest.mark.slow
def test_ten_plans_do_not_contradict_themselves() -> None:
    wrong, seen = run_cases(range(7, 17))
    assert wrong == []
    assert min(seen[name] for name in ("fits", "does not fit", "auto", "recomputes", "changes")) > 0


LOGITS = "policy.megatron_cfg.use_fused_linear_logprobs=false"


def command(memory: str, *overrides: str) -> Case:
    """`plan` of the small model on an H200."""
    words = ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=8", LOGITS, *overrides)
    return Case("sft.yaml", ("--gpu", "h200", "--gpus-per-node", "8", "--memory", memory), words)


def planned(case: Case) -> tuple[Case, Planned]:
    return case, case.plan()


def kinds(faults: Iterator[str]) -> set[str]:
    return {fault.partition(":")[0] for fault in faults}


def test_recomputation_as_configured_is_said_of_every_row_and_that_it_is_not_needed() -> None:
    """`sft.yaml` recomputes mlp_act: the row with nothing offloaded had it unsaid, at the same peak."""
    found = command("100GiB").plan()
    rows = [line for line in found.text.splitlines() if line.startswith(("nothing offloaded:", "chosen for"))]
    assert [line.partition("; ")[2] for line in rows] == ["recomputes mlp_act"] * 2
    without = command("100GiB", f"{CFG}.recompute_granularity=null").plan().data["outcomes"]["nothing_offloaded"]
    said = found.data["without_recomputation"]
    assert said == without
    assert f"fits without recomputation too: nothing offloaded, peak {said['peak_bytes'] / 2**30:.1f} GiB" in found.text
    assert found.data["outcomes"]["chosen"]["peak_bytes"] < said["peak_bytes"]
    assert "without recomputation too" not in command("50GiB").plan().text


def test_a_frontier_recomputes_nothing_in_vain() -> None:
    """`layernorm` gives up nothing of a dense layer."""
    job = make_job(SMALL, num_layers=4)
    trials = Trials(job)
    choice = trials.try_modules(Recompute(modules=frozenset({"layernorm", "mlp_act"})), ())
    points = frontier_module.frontier(job, choice, choice, trials)
    assert [point.recompute.modules for point in points] == [{"mlp_act"}, set()]


def test_what_nothing_moves_takes_is_told_as_one() -> None:
    """Of whole modules, of `auto` and of none: a layer that is recomputed has not let go of what it keeps."""
    job = make_job("Qwen/Qwen3-30B-A3B", num_layers=4)
    job = replace(job, shape=replace(job.shape, layers_with_experts=(True, True, False, False), vocab_size=1024))
    job = replace(job, recompute=Recompute(modules=frozenset({"moe"})), device=replace(job.device, memory_gib=1000.0))
    peaks = {
        Trials(job).try_modules(job.recompute, ()).peak_bytes,
        Trials(job).try_auto(job.recompute, choice_module.run_auto).peak_bytes,
        highest_peak(run_steady_state(job, ())),
    }
    assert len(peaks) == 1


def worst(job: Job, trials: Trials) -> ChoiceAsConfig:
    """A choice that is not the best of what was tried."""
    return max(trials.whole, key=lambda each: each.order(job))


def by_layers(job: Job, baseline: SimulatedStep, trials: Trials) -> ChoiceAsConfig:
    """What no configuration says: recomputation of single layers."""
    way, guide = choice_module._guide(job, baseline, trials)
    return ChoiceAsConfig(guide, (), way.recompute, is_auto=True)


def everything(points: object, *_: object) -> list[ChoiceAsConfig]:
    """A frontier with rows that others beat."""
    return list(points)  # type: ignore[call-overload]


def any_change(job: Job, _fits: object, *others: Any) -> tuple[str, ...]:
    """Suggest every change as one that would do."""
    return suggest(job, lambda _job: True, *others[:-1], lambda _job: [])


PLANTED: dict[str, tuple[object, str, object, str, str]] = {
    "not the best": (choice_module, "best_tried", worst, "20GiB", "minimum"),
    "not the fastest": (choice_module, "best_tried", worst, "50GiB", "choice"),
    "choices by layers": (plan_module, "choose", by_layers, "66GiB", "rows"),
    "beaten rows": (frontier_module, "_falling", everything, "50GiB", "choice"),
    "changes that do not do": (plan_module, "suggest", any_change, "8GiB", "changes"),
    "sizes that look alike": (tables, "gib", lambda size, _=1: f"{size / 2**30:.1f} GiB", "SHORT", "text"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if each[-1] == "text" else [pytest.mark.slow]) for name, each in PLANTED.items()],
)
def test_what_is_planted_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, attribute, fault, memory, kind = PLANTED[name]
    checks: dict[str, Callable[[Case, Planned], Iterator[str]]] = {
        "minimum": lambda _, found: plan_cases._minimum(found),
        "choice": lambda _, found: plan_cases._choice(found),
        "text": lambda _, found: plan_cases._text(found),
        "rows": plan_cases._rows_can_be_asked_for,
        "changes": plan_cases._changes_do,
    }
    if memory == "SHORT":
        least = command("20GiB").plan().data["outcomes"]["chosen"]["peak_bytes"]
        memory = f"{least / 2**20 - 10:.3f}MiB"
    case = command(memory)
    assert not list(checks[kind](*planned(case)))
    monkeypatch.setattr(place, attribute, fault)
    assert kinds(checks[kind](*planned(case))) == {kind}


def test_layers_that_count_twice_are_found() -> None:
    """A choice by layers computes a part of what a layer's module saves again, and keeps another."""
    job = make_job(LATENT, num_layers=4, layout=ParallelLayout(64, expert=32), min_elements=1)
    plan = make_plan(replace(job, device=replace(job.device, memory_gib=1000.0)))
    assert not list(plan_cases._counts(Planned(plan_data(plan), "")))
    stages = build_stages(plan.job, ("core_attn",), ("mla_up_proj",))
    actions = [[Action.RECOMPUTE if group and group.recomputed_by else Action.KEEP for group in stages[0].groups()]]
    mixed = ChoiceAsConfig(run_stages(plan.job, stages, actions), (), plan.job.recompute)
    (fault,) = plan_cases._counts(Planned(plan_data(replace(plan, choice=mixed)), ""))
    assert fault == "counts: core_attn of stage 0: stays 5, recomputed 5 of 5"


def test_auto_is_the_choice_where_it_keeps_what_it_is_told_and_lists_are_not_as_good() -> None:
    """Within 2 % lists are as good, unless `auto` is configured, whose row is shown. It is told whole MiB."""
    job = make_job(SMALL, num_layers=4)
    listed = Trials(job).try_modules(Recompute(), ("core_attn",))
    job = replace(job, memory_bytes=listed.peak_bytes + 1000)
    for share, peak_bytes, is_configured, is_chosen in (
        (0.97, job.auto_budget_bytes, False, True),
        (0.99, job.auto_budget_bytes, False, False),
        (0.99, job.auto_budget_bytes, True, True),
        (0.97, job.auto_budget_bytes + 1, True, False),
    ):
        trials = Trials(job)
        trials.try_modules(Recompute(), ("core_attn",))
        times = replace(listed.step.times[0], peak_bytes=peak_bytes - sum(listed.step.stages[0].static_bytes.values()))
        step = replace(listed.step, step_ms=share * listed.step.step_ms, times=(times,))
        trials.try_auto(Recompute(), lambda _, step=step: step)
        assert choice_module.best_tried(replace(job, is_auto=is_configured), trials).is_auto == is_chosen


def test_what_takes_the_least_memory_lists_what_the_model_has() -> None:
    job = make_job("Qwen/Qwen3-30B-A3B", num_layers=2, memory_bytes=200 << 30)
    listed, *_ = choice_module._try_least(job, Trials(job))
    assert not {"shared_experts", "mlp_fc1"} & set(listed.offload_modules)
