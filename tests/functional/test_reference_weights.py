"""A pass of the reference says what the start weights said, bit for bit, and leaves the trained ones as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import rank_work
from ranks import Ranks

DDP = "distributed_data_parallel_config"
DISTRIBUTED = "optimizer.use_distributed_optimizer=true"
OVERLAP = (DISTRIBUTED, f"{DDP}.overlap_grad_reduce=true", f"{DDP}.overlap_param_gather=true")
TRAINS = ("optimizer.lr=1.0e-2", "scheduler.lr_warmup_iters=0")
BIASES = "model_overrides={moe_router_bias_update_rate: 1.0}"
PIECES = (0, 1 << 40)
"""With the trained weights on the host meanwhile, and on the device."""


def check(results: list[dict[str, bool]]) -> None:
    assert results == [{"start": True, "kept": True, "trained": True}] * len(results)


@pytest.mark.usefixtures("any_device_process_group")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", ()),
        ("qwen2", (DISTRIBUTED, ".precision=bfloat16")),
        ("deepseek_v3", (DISTRIBUTED, BIASES)),
    ],
    ids=["tied, float32", "one buffer, bfloat16", "experts with biases"],
)
def test_a_pass_of_the_reference(
    family: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rank_work.write(family, tmp_path, num_hidden_layers=2)
    monkeypatch.setattr("rank_work._leave_groups", lambda: None)
    monkeypatch.setattr("nemo_rl_offload.offload.waiting_weights.PIECE_BYTES", 1 << 12)
    check([rank_work.pass_of_reference(folder, (*TRAINS, *overrides), PIECES)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", OVERLAP),
        ("qwen2", (*OVERLAP, ".precision=bfloat16")),
        ("qwen2", ("tensor_model_parallel_size=2", "sequence_parallel=true")),
        ("qwen2", ("pipeline_model_parallel_size=2",)),
        ("qwen3_moe", (DISTRIBUTED, "expert_tensor_parallel_size=2")),
    ],
    ids=[
        *("overlapped gathers", "overlapped gathers, bfloat16", "tensor parallel", "pipeline of tied embeddings"),
        "shared experts' widths",
    ],
)
def test_a_pass_of_the_reference_on_two_ranks(
    family: str, overrides: tuple[str, ...], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    folder = rank_work.write(family, tmp_path)
    check(ranks(2).run("pass_of_reference", folder, (*TRAINS, *overrides), PIECES))
