"""Models whose layers are gated delta nets, or attention whose output has a gate."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    make_batch,
    make_policy,
    offload,
    read_model,
    same_tensors,
    take_step,
    weights_of,
    write_model,
)
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import build_model, export_hf
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.megatron.layers.delta_net import delta_rule
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.specs.offload_modules import DENSE_MLP_MODULES, MOE_MODULES, SUPPORTED_MODULES

pytestmark = [
    pytest.mark.usefixtures("megatron_process_group"),
    pytest.mark.slow,  # what compiles for the first of them takes 16 s
]

FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
CORE = ("recompute_granularity=selective", "recompute_modules=[core_attn]")
SETTINGS = {"plain": (), "recompute_full": FULL, "recompute_core_attn": CORE, "bfloat16": (".precision=bfloat16",)}
MODULES = {
    "qwen3_5_text": tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES),
    "qwen3_5_moe_text": tuple(name for name in SUPPORTED_MODULES if name not in DENSE_MLP_MODULES),
}
Train = Callable[..., tuple[list[dict[str, float]], dict[str, Tensor], Any]]


@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_the_rule_by_chunks_is_that_of_transformers_token_by_token(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 17, 4)
    query, key = (torch.randn(*shape, 8, generator=generator) for _ in range(2))
    key = key / key.norm(dim=-1, keepdim=True)
    value, state = torch.randn(*shape, 12, generator=generator), torch.randn(2, 4, 8, 12, generator=generator)
    decay, beta = -torch.rand(shape, generator=generator), torch.rand(shape, generator=generator)
    given = [each.requires_grad_() for each in (query, key, value, decay, beta)]
    expected, last = torch_recurrent_gated_delta_rule(*given, state, True)
    found, found_last = delta_rule(*given, chunk, state)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_last, last, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=generator)
    wanted = torch.autograd.grad((expected * weights).sum() + last.sum(), given)
    gradients = torch.autograd.grad((found * weights).sum() + found_last.sum(), given)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def train(model_folder: Callable[[str], Path]) -> Iterator[Train]:
    """Three steps with changing lengths; metrics, weights and what the engine counted."""
    engines = []

    def run(family: str, *overrides: str) -> tuple[list[dict[str, float]], dict[str, Tensor], Any]:
        policy = make_policy(*overrides)
        engine = install_offloading(policy)
        model = build_model(policy, model_folder(family), num_steps=10)
        if engine is not None:
            exclude_parameters(engine, model.modules)
            engines.append(engine)
        metrics = [take_step(model, step, num_samples) for step, num_samples in enumerate((2, 5, 6))]
        return metrics, weights_of(model), None if engine is None else engine.stats()

    yield run
    use_engine(None)
    for engine in engines:
        engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_offloading_changes_no_bit(family: str, setting: str, train: Train) -> None:
    metrics, weights, stats = train(family, *SETTINGS[setting], *offload(MODULES[family]))
    expected, expected_weights, _ = train(family, *SETTINGS[setting])
    assert metrics == expected
    assert same_tensors(weights, expected_weights)
    assert all(each["grad_norm"] > 0 for each in expected)
    moved = {name for name, module in stats.per_module.items() if module.bytes_out}
    recomputed = {"core_attn"} if setting == "recompute_core_attn" else set()
    assert moved == ({"attn_norm"} if setting == "recompute_full" else set(MODULES[family]) - recomputed)
    assert stats.host_bytes == 0


@pytest.mark.parametrize("family", MODULES)
def test_recomputing_changes_no_loss(family: str, train: Train) -> None:
    for setting in ("recompute_full", "recompute_core_attn"):
        for metrics, expected in zip(train(family, *SETTINGS[setting])[0], train(family)[0], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", MODULES)
def test_every_gradient_is_that_of_transformers(
    family: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A step of gradient descent with a rate of 1, exported: the weights differ by the gradients."""
    folder = model_folder(family)
    reference = read_model(folder, family)
    batch = make_batch(0, num_samples=2)
    scored = batch["token_mask"][:, 1:].bool()
    logits = reference(batch["input_ids"], use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits[scored], batch["input_ids"][:, 1:][scored])
    loss.backward()
    descent = ("optimizer.optimizer=sgd", "optimizer.lr=1", "optimizer.clip_grad=0", "scheduler.lr_warmup_iters=0")
    plain = (*descent, "optimizer.use_distributed_optimizer=false", "optimizer.weight_decay=0", "moe_aux_loss_coeff=0")
    for number, heads in enumerate((LogitsHeadFactory(1.0), FusedHeadFactory(1.0, reference.config.vocab_size))):
        model = build_model(make_policy(*plain), folder, num_steps=10)
        metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), 2, heads)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        export_hf(model, folder, tmp_path / str(number))
        trained = dict(read_model(tmp_path / str(number), family).named_parameters())
        for name, weight in reference.named_parameters():
            found = weight.detach() - trained[name].detach()
            assert (found - weight.grad).norm() <= 1e-5 * weight.grad.norm() + 1e-6 * weight.detach().norm(), name
            assert weight.grad.norm() > 0, name


def test_a_sequence_of_several_chunks_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_model("qwen3_5_text", tmp_path, max_position_embeddings=256)
    ids = torch.randint(0, 260, (2, 150), generator=torch.Generator().manual_seed(3))
    model = build_model(make_policy(), folder, num_steps=None).modules[0].eval()
    with torch.no_grad():
        logits = model(ids, torch.arange(150).expand_as(ids), None)
        expected = read_model(folder, "qwen3_5_text")(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_resuming_changes_no_bit(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = build_model(make_policy(), model_folder("qwen3_5_text"), num_steps=10)
    take_step(model, 0)
    checkpoint.save(model, tmp_path)
    expected = take_step(model, 1)
    final = weights_of(model)
    resumed = build_model(make_policy(), model_folder("qwen3_5_text"), num_steps=10)
    checkpoint.load(resumed, tmp_path)
    assert take_step(resumed, 1) == expected
    assert same_tensors(weights_of(resumed), final)
