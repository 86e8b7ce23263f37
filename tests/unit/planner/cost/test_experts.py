"""What buffers of fixed size and the stash add to a stage, and the factors that are recommended."""

import json
from pathlib import Path

import pytest
from jobs import make_job

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.paged_stash.pages import recommended_factor
from nemo_rl_offload.planner.cost.experts import ExpertBuffers, Skew, recorded_skew
from nemo_rl_offload.planner.plan import make_plan
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.report.tables import summary_lines
from nemo_rl_offload.planner.simulate.stages import Stage, build_stages
from nemo_rl_offload.specs.offload_modules import SUPPORTED_MODULES

MOE = "Qwen/Qwen3-30B-A3B"
ROWS, HIDDEN, FFN, NUM_LAYERS = 4096 * 8, 2048, 768, 48
BALANCED_BYTES = ROWS * (HIDDEN + 3 * FFN) * 2
"""Of one layer and microbatch: the experts' tokens, activation input and output, bfloat16."""


def stage(buffers: ExpertBuffers) -> Stage:
    return build_stages(make_job(MOE, expert_buffers=buffers), SUPPORTED_MODULES)[0]


def saved_bytes(built: Stage) -> int:
    return built.kept_bytes() + sum(each.saved_bytes * each.live_at_peak for each in built.records())


def test_without_a_factor_nothing_changes() -> None:
    assert stage(ExpertBuffers()) == stage(ExpertBuffers(None, has_stash=False, device_factor=3.0))


def test_a_capacity_multiplies_what_experts_save() -> None:
    extra = saved_bytes(stage(ExpertBuffers(1.5))) - saved_bytes(stage(ExpertBuffers()))
    assert extra == pytest.approx(0.5 * BALANCED_BYTES * NUM_LAYERS, rel=1e-6)
    assert "experts' buffers" not in stage(ExpertBuffers(1.5)).static_bytes


def test_a_stash_keeps_pages_and_one_set_of_buffers() -> None:
    built = stage(ExpertBuffers(2.0, has_stash=True, device_factor=1.1, host_factor=0.25))
    extra = saved_bytes(built) - saved_bytes(stage(ExpertBuffers()))
    assert extra == pytest.approx(0.1 * BALANCED_BYTES * NUM_LAYERS, rel=1e-6)
    assert built.static_bytes["experts' buffers"] == pytest.approx(2 * BALANCED_BYTES, rel=1e-6)
    assert built.stash_host_bytes == pytest.approx(0.25 * BALANCED_BYTES * NUM_LAYERS, rel=1e-6)
    assert not {"expert_fc1", "moe_act", "expert_fc2"} & {each.module for each in built.records() if each.saved_bytes}


def test_negative_factors_follow_the_most_seen() -> None:
    skew = Skew(1.6, 1.2)
    seen = stage(ExpertBuffers(2.0, has_stash=True, device_factor=-1.0, skew=skew))
    assert saved_bytes(seen) == saved_bytes(stage(ExpertBuffers(2.0, has_stash=True, device_factor=1.2)))


@pytest.mark.parametrize(("needed", "expected"), [(1.0, 1.05), (1.2, 1.3), (1.33, 1.4), (2.0, 2.1)])
def test_recommended_factor(needed: float, expected: float) -> None:
    assert recommended_factor(needed) == pytest.approx(expected)


@pytest.mark.slow
def test_a_plan_recommends_factors_for_a_skew() -> None:
    plan = make_plan(
        make_job(MOE, expert_buffers=ExpertBuffers(2.0, has_stash=True, host_factor=0.5, skew=Skew(1.5, 1.2)))
    )
    factors = {"moe_expert_rank_capacity_factor": 1.6, "moe_paged_stash_buffer_size_factor_cuda": 1.3}
    data = plan_data(plan)
    assert data["recommended_factors"] == factors
    assert data["host"]["stash_per_rank_bytes"] > 0
    words = "\n".join(summary_lines(plan))
    assert "moe_expert_rank_capacity_factor: 1.6; moe_paged_stash_buffer_size_factor_cuda: 1.3" in words
    assert "of pinned pages per rank" in words


def test_factors_from_a_recorded_run(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    stash = {"needed_capacity_factor": 1.4, "needed_stash_factor": 1.1}
    file.write_text(json.dumps({"paged_stash": stash}))
    assert recorded_skew(file) == Skew(1.4, 1.1)
    file.write_text(json.dumps({"paged_stash": stash | {"needed_stash_factor": None}}))
    assert recorded_skew(file) == Skew(1.4, 1.4)
    file.write_text(json.dumps({"paged_stash": None}))
    with pytest.raises(ConfigError, match="had no moe_expert_rank_capacity_factor"):
        recorded_skew(file)
    for damaged in ("3", "{}", json.dumps({"paged_stash": {}}), ""):
        file.write_text(damaged)
        with pytest.raises(ConfigError, match=r"no summary\.json of a finished run"):
            recorded_skew(file)
    with pytest.raises(ConfigError, match=r"no summary\.json of a finished run"):
        recorded_skew(tmp_path / "elsewhere" / "summary.json")
