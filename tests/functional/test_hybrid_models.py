"""Models whose layers are Mamba-2, attention, an MLP or experts, one of them each."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, make_policy, offload, read_model, same_tensors, take_step, weights_of, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import build_model, export_hf
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.specs.offload_modules import SUPPORTED_MODULES

pytestmark = pytest.mark.usefixtures("megatron_process_group")

FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
CORE = ("recompute_granularity=selective", "recompute_modules=[core_attn]")
SETTINGS = {"plain": (), "recompute_full": FULL, "recompute_core_attn": CORE, "bfloat16": (".precision=bfloat16",)}
Train = Callable[..., tuple[list[dict[str, float]], dict[str, Tensor], Any]]


@pytest.fixture(scope="module")
def train(model_folder: Callable[[str], Path]) -> Iterator[Train]:
    """Three steps with changing lengths; metrics, weights and what the engine counted."""
    engines = []

    def run(*overrides: str) -> tuple[list[dict[str, float]], dict[str, Tensor], Any]:
        policy = make_policy(*overrides)
        engine = install_offloading(policy)
        model = build_model(policy, model_folder("nemotron_h"), num_steps=10)
        if engine is not None:
            exclude_parameters(engine, model.modules)
            engines.append(engine)
        metrics = [take_step(model, step, num_samples) for step, num_samples in enumerate((2, 5, 6))]
        return metrics, weights_of(model), None if engine is None else engine.stats()

    yield run
    use_engine(None)
    for engine in engines:
        engine.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_offloading_changes_no_bit(setting: str, train: Train) -> None:
    metrics, weights, stats = train(*SETTINGS[setting], *offload(SUPPORTED_MODULES))
    expected, expected_weights, _ = train(*SETTINGS[setting])
    assert metrics == expected
    assert same_tensors(weights, expected_weights)
    assert all(each["grad_norm"] > 0 for each in expected)
    moved = {name for name, module in stats.per_module.items() if module.bytes_out}
    recomputed = {"core_attn"} if setting == "recompute_core_attn" else set()
    assert moved == ({"attn_norm"} if setting == "recompute_full" else set(SUPPORTED_MODULES) - recomputed)
    assert stats.host_bytes == 0


def test_mamba_layers_are_offloaded_by_the_names_of_attention(
    model_folder: Callable[[str], Path], train: Train
) -> None:
    *_, stats = train(*offload(("attn_norm", "qkv_linear", "core_attn", "attn_proj")))
    groups = {name: module.num_groups for name, module in stats.per_module.items() if module.num_groups}
    num_microbatches = 1 + 3 + 3
    assert groups == dict.fromkeys(("attn_norm", "qkv_linear", "core_attn", "attn_proj"), 4 * num_microbatches)


@pytest.mark.slow
def test_recomputing_changes_no_loss(train: Train) -> None:
    for setting in ("recompute_full", "recompute_core_attn"):
        for metrics, expected in zip(train(*SETTINGS[setting])[0], train()[0], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)


def test_the_gradient_is_that_of_transformers(model_folder: Callable[[str], Path]) -> None:
    """With `moe_aux_loss_coeff` and all else at what the tiny policy says, the loss is the mean of tokens alone."""
    folder = model_folder("nemotron_h")
    reference = read_model(folder, "nemotron_h")
    batch = make_batch(0, num_samples=2)
    scored = batch["token_mask"][:, 1:].bool()
    logits = reference(batch["input_ids"], use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits[scored], batch["input_ids"][:, 1:][scored])
    loss.backward()
    expected_norm = torch.stack([weight.grad.norm() for weight in reference.parameters()]).norm()
    for heads in (LogitsHeadFactory(1.0), FusedHeadFactory(1.0, reference.config.vocab_size)):
        model = build_model(make_policy("moe_aux_loss_coeff=0"), folder, num_steps=10)
        metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), 2, heads)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(expected_norm.item(), rel=1e-4)  # sums in another order


@pytest.mark.parametrize("chunk_size", [4, 5])
def test_a_sequence_of_several_chunks_is_what_transformers_computes_token_by_token(
    chunk_size: int, tmp_path: Path
) -> None:
    """Over several chunks at once, transformers' plain form does not agree with itself."""
    folder = write_model("nemotron_h", tmp_path, chunk_size=chunk_size)
    reference = read_model(folder, "nemotron_h")
    ids = torch.randint(0, 260, (2, 18), generator=torch.Generator().manual_seed(3))
    model = build_model(make_policy(), folder, num_steps=None).modules[0].eval()
    with torch.no_grad():
        logits = model(ids, torch.arange(18).expand_as(ids), None)
        cache, steps = None, []
        for position in range(18):
            output = reference(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache, steps = output.past_key_values, [*steps, output.logits[:, -1]]
    torch.testing.assert_close(logits, torch.stack(steps, dim=1), rtol=0, atol=2e-5)


def test_resuming_changes_no_bit(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = build_model(make_policy(), model_folder("nemotron_h"), num_steps=10)
    take_step(model, 0)
    checkpoint.save(model, tmp_path)
    expected = take_step(model, 1)
    final = weights_of(model)
    resumed = build_model(make_policy(), model_folder("nemotron_h"), num_steps=10)
    checkpoint.load(resumed, tmp_path)
    assert take_step(resumed, 1) == expected
    assert same_tensors(weights_of(resumed), final)


def test_the_embedding_has_the_name_of_public_folders_or_that_of_transformers(tmp_path: Path) -> None:
    folder, exported = write_model("nemotron_h", tmp_path / "model"), tmp_path / "exported"
    weights = load_file(folder / "model.safetensors")
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    weights["mtp.layers.0.norm.weight"] = torch.ones(32)  # which transformers does not read
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    export_hf(build_model(make_policy(), folder, num_steps=None), folder, exported)
    found = load_file(exported / "model.safetensors")
    assert found.keys() == weights.keys() - {"mtp.layers.0.norm.weight"}
    assert all(torch.equal(found[name], weights[name]) for name in found)
