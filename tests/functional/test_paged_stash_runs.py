"""Whole runs of a small model with experts from the command line, with the stash alone and beside offloading."""

import json
from pathlib import Path

import pytest
from example_runs import run_example
from models import write_model

pytestmark = pytest.mark.slow

M = "policy.megatron_cfg"
STASH = (
    f"{M}.transformer_impl=torch",
    f"{M}.moe_paged_stash=true",
    f"{M}.moe_expert_rank_capacity_factor=1.25",
    f"{M}.scheduler.lr_warmup_iters=1",
)
OFFLOAD = (f"{M}.fine_grained_activation_offloading=true", f"{M}.offload_modules=[core_attn,attn_norm,mlp_norm]")
PLAIN = (f"{M}.fine_grained_activation_offloading=false",)
SMALL = {
    "sft": ("policy.train_global_batch_size=8", "policy.train_micro_batch_size=4", "data.train.size=64"),
    "grpo": (
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=8",
        "grpo.num_prompts_per_step=2",
        "data.validation.size=16",
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("algorithm", SMALL)
@pytest.mark.parametrize("beside", [PLAIN, OFFLOAD], ids=["alone", "offload"])
def test_a_run(algorithm: str, beside: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_model("qwen3_moe", tmp_path / "model", vocab_size=264)
    overrides = (
        f"policy.model_name={folder}",
        f"policy.tokenizer.name={folder}",
        f"{algorithm}.max_num_steps=3",
        f"{algorithm}.max_val_samples=8",
        "checkpointing.enabled=false",
        *SMALL[algorithm],
        *STASH,
        *beside,
    )
    done = run_example(algorithm, tmp_path / "run", *overrides)
    assert done.returncode == 0, done.stderr
    stash = json.loads(done.stdout)["paged_stash"]
    assert (stash["steps"], stash["overflows"], stash["over_budget"]) == (3, 0, 0)
    assert stash["device_bytes"] >= stash["peak_bytes"] > 0
    assert stash["needed_capacity_factor"] == 1.0, "one rank gets all rows"
    records = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    assert [each["metrics"]["paged_stash/reruns"] for each in records if each["prefix"] == "train"] == [0.0] * 3
    if beside == OFFLOAD:
        per_module = json.loads(done.stdout)["offload"]["per_module"]
        assert all(per_module[name]["bytes_out"] > 0 for name in ("core_attn", "attn_norm", "mlp_norm"))
