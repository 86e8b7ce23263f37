"""Microbatches by tokens, padded or packed: the same training as with fixed ones, and offloading changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MICRO_BATCH_SIZE, make_batch, make_policy, offload, same_tensors, weights_of
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.policy.microbatches import shard_for_ranks
from nemo_rl_offload.specs.offload_modules import DENSE_MLP_MODULES, MOE_MODULES, SUPPORTED_MODULES

pytestmark = pytest.mark.usefixtures("megatron_process_group")

MODULES = {
    "qwen2": tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES),
    "qwen3_moe": tuple(name for name in SUPPORTED_MODULES if name not in (*DENSE_MLP_MODULES, "shared_experts")),
    "deepseek_v3": SUPPORTED_MODULES,
    "nemotron_h": SUPPORTED_MODULES,
}
SGD = (
    "optimizer.optimizer=sgd",
    "optimizer.lr=0.3",
    "optimizer.clip_grad=0",
    "optimizer.use_distributed_optimizer=false",
    "scheduler.lr_warmup_iters=0",
    "moe_aux_loss_coeff=0",
    "moe_router_bias_update_rate=0",
)
BY_TOKENS = {
    name: (f".{name}.enabled=true", f".{name}.train_mb_tokens=40", f".{name}.sequence_length_round=4")
    for name in ("dynamic_batching", "sequence_packing")
}


class Outcome:
    """What three steps leave; the number, the size and the width of microbatches change at each."""

    def __init__(self, folder: Path, overrides: tuple[str, ...]) -> None:
        policy: Any = make_policy(*SGD, *overrides)
        engine = install_offloading(policy)
        model = build_model(policy, folder, num_steps=10)
        if engine is not None:
            exclude_parameters(engine, model.modules)
        self.metrics: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.cuts: list[tuple[int, ...]] = []
        for step in range(3):
            batch = make_batch(step)
            sharded = shard_for_ranks(batch, policy, 1, "train")
            how = MICRO_BATCH_SIZE if sharded.splits is None else sharded.splits[0]
            shard = sharded.shards[0]
            self.cuts.append((how,) if isinstance(how, int) else how.widths)
            self.metrics.append(
                train_step(model, shard, build_loss("nll", {}), normalizers(batch), how, LogitsHeadFactory(1.0))
            )
            self.gradients.append(
                {name: weight.main_grad.clone() for name, weight in model.modules[0].named_parameters()}
            )
        self.weights = weights_of(model)
        logprobs = compute_logprobs(model, shard, how, LogitsHeadFactory(1.0))
        assert logprobs is not None
        is_real = torch.arange(logprobs.shape[1]) < batch["input_lengths"][:, None]
        self.logprobs = sharded.gather([logprobs]) * is_real
        self.bytes_out = 0
        if engine is not None:
            self.bytes_out = engine.stats().bytes_out
            use_engine(None)
            engine.close()


Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def train(model_folder: Callable[[str], Path]) -> Train:
    """Each combination once."""
    outcomes: dict[tuple[str, ...], Outcome] = {}

    def run(family: str, *overrides: str) -> Outcome:
        if (family, *overrides) not in outcomes:
            outcomes[family, *overrides] = Outcome(model_folder(family), overrides)
        return outcomes[family, *overrides]

    return run


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("name", BY_TOKENS)
def test_they_train_as_fixed_microbatches_do(family: str, name: str, train: Train) -> None:
    fixed, by_tokens = train(family), train(family, *BY_TOKENS[name])
    assert len(set(by_tokens.cuts)) == len(by_tokens.cuts), "microbatches change at every step"
    for metrics, expected in zip(by_tokens.metrics, fixed.metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)
    for gradients, expected_gradients in zip(by_tokens.gradients, fixed.gradients, strict=True):
        for parameter, expected_gradient in expected_gradients.items():
            error = (gradients[parameter] - expected_gradient).norm()
            assert error <= 1e-5 * expected_gradient.norm() + 1e-7, parameter  # some biases have all but no gradient
    torch.testing.assert_close(by_tokens.logprobs, fixed.logprobs, rtol=1e-4, atol=1e-4)  # three steps later


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("name", BY_TOKENS)
def test_offloading_changes_no_bit(family: str, name: str, train: Train) -> None:
    plain, offloaded = train(family, *BY_TOKENS[name]), train(family, *BY_TOKENS[name], *offload(MODULES[family]))
    assert offloaded.metrics == plain.metrics
    assert all(map(same_tensors, offloaded.gradients, plain.gradients))
    assert same_tensors(offloaded.weights, plain.weights)
    assert offloaded.bytes_out > 0
    assert plain.bytes_out == 0
