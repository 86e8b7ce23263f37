"""Each experiment's small form runs on a CPU, and says what a result on a device would say."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from example_runs import run_python

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = pytest.mark.slow


def run(folder: Path, script: str, *options: str) -> list[dict[str, Any]]:
    """The results that a script wrote."""
    done = run_python(f"benchmarks/{script}.py", "--out", str(folder), *options)
    print(done.stderr[-3000:])
    assert done.returncode == 0
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.sampled
def test_e1_changes_no_bit(tmp_path: Path) -> None:
    results = run(tmp_path, "deepseek_layers", "--layers", "1", "--rounds", "1", "--inflight", "1", "1.5")
    assert [result["max_inflight_bytes"] for result in results] == [3 << 29, 1 << 30]
    for result in results:
        assert result["bit_identical"]
        assert result["figures"]["offloaded_bytes_alive_at_the_peak"] > 0
        assert result["figures"]["step_ms_copies"] > 0
        assert result["per_module"].keys() == set(result["modules"])


@pytest.mark.sampled
def test_e2_compares_variants_that_change_no_bit(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "dense_rl", "--rounds", "1")
    variants = {each["name"]: each for each in result["variants"]}
    assert len(variants) == len(result["variants"])
    assert len([name for name in variants if name.startswith("ours: auto")]) == 12
    assert len([name for name in variants if name.startswith("ours: auto") and "recomputed" in name]) == 7
    ran = {name: each for name, each in variants.items() if each["error"] is None}
    assert {"nothing", "recompute: full", "recompute: mlp", "recompute: core_attn", "save_on_cpu"} <= ran.keys()
    assert all(each["bit_identical"] and each["medians"]["ms"] > 0 for each in ran.values())
    listed = [each for name, each in ran.items() if name.startswith("ours") and "auto" not in name]
    assert len(listed) == 6
    assert all(each["medians"]["bytes_out"] > 0 for each in listed)
    assert variants["ours: all"]["medians"]["bytes_out"] > variants["ours: full recompute"]["medians"]["bytes_out"]


@pytest.mark.sampled
def test_e2_takes_the_variants_that_are_named_and_other_algorithms(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "dense_rl", "--algorithm", "sft", "--variant", "ours: norms", "--rounds", "1")
    assert [each["name"] for each in result["variants"]] == ["nothing", "ours: norms"]
    assert all(each["bit_identical"] for each in result["variants"])


@pytest.mark.sampled
def test_e2_runs_what_plan_chooses_for_another_result(tmp_path: Path) -> None:
    earlier = PROJECT_ROOT / "benchmarks/results/nvidia-h200/dense_grpo_8192_torch.json"
    options = ("--variant", "ours: norms", "--rounds", "1", "--planned", str(earlier))
    (result,) = run(tmp_path, "dense_rl", *options)
    planned = result["variants"][2:]
    assert [each["name"] for each in planned] == ["ours: plan for recompute: mlp", "ours: plan for recompute: full"]
    for each in planned:
        assert each["bit_identical"]
        assert each["medians"]["bytes_out"] > 0
        assert each["keys"]["offload_modules"] == each["offload_modules"]


@pytest.mark.sampled
def test_e3_takes_the_same_steps_with_and_without(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "rl_reality", "--steps", "4", "--layers", "1")
    plain, ours = result["variants"]
    assert (plain["name"], ours["name"]) == ("nothing", "ours: all")
    assert len({len(rollout["widths"]) for rollout in result["rollouts"]}) > 1
    for entry in (plain, ours):
        assert entry["error"] is None
        assert entry["bit_identical"]
        assert entry["figures"]["num_steps"] == 4
    assert ours["figures"]["largest_steps_own_host_bytes"] > 0


@pytest.mark.sampled
def test_e4_tries_sequences_with_the_optimizer_on_the_host(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "reach", "--optimizer", "host", "--tries", '[["recompute: full", 32], ["ours: all", 64]]')
    assert result["experiment"] == "whole_model"
    assert result["figures"]["longest_sequence"] == {"recompute: full": 32, "ours: all": 64}


@pytest.mark.sampled
def test_e4_ends_where_a_cpu_is_taken_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "first")
    (result,) = run(tmp_path, "reach", "--variant", "recompute: full")
    assert result["sequence"]["recompute: full"]["error"] is None
    tried = result["sequence"]["recompute: full"]["tried"]
    assert {size for size, sample in tried.items() if "out_of_memory" not in sample} == {"64", "96"}, tried
    assert result["figures"]["longest_sequence"] == {"recompute: full": 96}
    assert result["compared"]["sequence"] == 96
    assert result["figures"]["time_per_token"] > 0
    monkeypatch.setenv("BENCH_COMMIT", "second")
    (again,) = run(tmp_path, "reach", "--variant", "recompute: full")
    assert again["sequence"] == result["sequence"], "what is known is not tried again"
    measured_at = {sample["commit"] for sample in [*tried.values(), again["compared"]]}
    assert (again["commit"], measured_at) == ("second", {"first"})


@pytest.mark.sampled
def test_a_profile_has_traces_and_lanes(tmp_path: Path) -> None:
    (result,) = run(tmp_path, "profile_step", "--layers", "1")
    assert [step["name"] for step in result["steps"]] == ["nothing", "ours: core_attn"]
    assert all(step["figures"]["host_ms"] > 0 for step in result["steps"])
    assert all((tmp_path / f"profile_{label}.trace.json.gz").stat().st_size > 0 for label in ("without", "with"))


@pytest.mark.sampled
def test_grpo_beside_trl_needs_no_trl_for_ours(tmp_path: Path) -> None:
    theirs = ["TRL float32", "TRL LoRA"] if find_spec("trl") else []
    (result,) = run(tmp_path, "beside_trl", "--attempt", "ours", *theirs)
    ours, *others = result["attempts"]
    assert (ours["side"], ours["error"]) == ("ours", None)
    assert ours["medians"].keys() >= {"timing/generation_s", "timing/logprobs_s", "timing/train_s", "timing/step_s"}
    assert ours["memory"]["peak_host_bytes"] > 0
    assert len(others) == len(theirs)
    for other in others:
        assert other["error"] is None
        assert other["medians"].keys() <= ours["medians"].keys()
        parts = [other["medians"][f"timing/{name}_s"] for name in ("generation", "logprobs", "train")]
        assert all(seconds > 0 for seconds in parts)
        assert other["mean_response_tokens"] == pytest.approx(8, abs=1), "random weights end no response"
