"""Gradients that are freed between steps leave losses, gradients and weights as they are, bit for bit."""

from pathlib import Path

import pytest
import rank_work
import torch
from models import same_tensors, take_step, weights_of

from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.policy.residency.gradients import free_gradients, restore_gradients

TRAINS = ("optimizer.lr=1.0e-2", "scheduler.lr_warmup_iters=0")


def gradient_bytes(model: MegatronModel) -> int:
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


@pytest.mark.usefixtures("any_device_process_group")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", ("optimizer.use_distributed_optimizer=true", ".precision=bfloat16")),
        ("qwen3_moe", ("distributed_data_parallel_config.grad_reduce_in_fp32=false", ".precision=bfloat16")),
    ],
)
def test_a_model_trains_alike_with_and_without(
    family: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rank_work._leave_groups", lambda: None)
    folder = rank_work.write(family, tmp_path, num_hidden_layers=2)
    outcomes = []
    for frees in (False, True):
        model, _ = rank_work._build(folder, (*TRAINS, *overrides))
        whole, metrics, gradients = gradient_bytes(model), [], []
        for step in range(3):
            if frees:
                free_gradients(model)
                free_gradients(model)
                assert gradient_bytes(model) == 0
                assert all(weight.grad is None for weight in rank_work._parameters(model))
                restore_gradients(model)
                assert gradient_bytes(model) == whole > 0
            metrics.append(take_step(model, step))
            gradients.append([weight.main_grad.clone() for weight in rank_work._parameters(model)])
        outcomes.append((metrics, gradients, weights_of(model)))
    (metrics, gradients, weights), (other_metrics, other_gradients, other_weights) = outcomes
    assert metrics == other_metrics
    for one, other in zip(gradients, other_gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert same_tensors(weights, other_weights)
