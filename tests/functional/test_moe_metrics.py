"""The experts' balancing losses that a training step reports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from tests.functional.models import MICRO_BATCH_SIZE, make_batch, make_policy, write_model

pytestmark = pytest.mark.usefixtures("megatron_process_group")

BALANCED = ("moe_router_load_balancing_type=aux_loss", "moe_aux_loss_coeff=0.01", "moe_per_layer_logging=true")


def build(folder: Path, *overrides: str, **shape: Any) -> MegatronModel:
    policy = make_policy("optimizer.lr=0", "optimizer.min_lr=0", *overrides)
    return build_model(policy, write_model("qwen3_moe", folder, **shape), num_steps=4)


def step(model: MegatronModel, number: int) -> dict[str, float]:
    batch = make_batch(number)
    return train_step(model, batch, build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))


def balancing_loss(router: Any, hidden: torch.Tensor) -> float:
    """Switch Transformer, equation 4, top-2 of 4 experts: experts x sum(share of tokens x mean probability)."""
    probabilities = (hidden.flatten(0, 1) @ router.weight.detach().T).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
    return float(4 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum())


def test_a_step_reports_the_mean_of_its_own_microbatches(tmp_path: Path) -> None:
    model = build(tmp_path, *BALANCED)
    routers = [module for module in model.modules[0].modules() if isinstance(module, TopKRouter)]
    expected: dict[Any, list[float]] = {router: [] for router in routers}
    for router in routers:
        router.register_forward_hook(
            lambda self, args, _: expected[self].append(balancing_loss(self, args[0].detach()))
        )
    compute_logprobs(model, make_batch(1), MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))
    for number in (0, 1):
        for losses in expected.values():
            losses.clear()
        metrics = step(model, number)
        layers = [sum(losses) / len(losses) for losses in expected.values()]
        assert len(expected[routers[0]]) == 3
        assert metrics["moe/load_balancing_loss"] == pytest.approx(sum(layers) / 2, rel=1e-5)
        assert metrics["moe/load_balancing_loss_layer_1"] == pytest.approx(layers[1], rel=1e-5)


def test_models_of_different_depth_follow_each_other_in_one_process(tmp_path: Path) -> None:
    for num_layers in (1, 3, 2):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        metrics = step(build(folder, *BALANCED, num_hidden_layers=num_layers), 0)
        assert [name for name in metrics if "_layer_" in name] == [
            f"moe/load_balancing_loss_layer_{index}" for index in range(num_layers)
        ]


def test_nothing_is_reported_without_a_balancing_loss(tmp_path: Path) -> None:
    metrics = step(build(tmp_path, "moe_router_load_balancing_type=none"), 0)
    assert not [name for name in metrics if name.startswith("moe/")]
