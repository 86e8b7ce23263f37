"""Every weight of a model's folder is read, or named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import make_policy, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import build_model

pytestmark = pytest.mark.usefixtures("megatron_process_group")
Weights = dict[str, Tensor]


def _without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def _with(name: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: value}


def _load(folder: Path, change: Callable[[Weights], Weights], family: str = "qwen3") -> None:
    write_model(family, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    build_model(make_policy(), folder, num_steps=None)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_norm.weight"]
)
def test_a_missing_weight_is_named_as_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"1 of .* weights are not in the folder: {name}. Is the download complete"):
        _load(tmp_path, _without(name))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.gate_proj.lora_A.weight", "score.weight"]
)
def test_a_weight_that_no_parameter_reads_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"1 weights of the folder are no part of the model .*: {name}. Training it"):
        _load(tmp_path, _with(name, torch.ones(4)))


def test_many_names_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"7 weights .*: x0, x1, x2, x3 and 3 more\."):
        _load(tmp_path, lambda weights: {**weights, **{f"x{number}": torch.ones(1) for number in range(7)}})


def test_computed_buffers_and_uncounted_layers_are_no_weights(tmp_path: Path) -> None:
    _load(tmp_path / "a", _with("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)))
    _load(tmp_path / "b", _with("model.layers.2.enorm.weight", torch.ones(32)))


def test_a_tied_head_may_be_the_embedding_again_and_nothing_else(tmp_path: Path) -> None:
    embedding = "model.embed_tokens.weight"
    _load(tmp_path / "same", lambda weights: {**weights, "lm_head.weight": weights[embedding].clone()}, "qwen2")
    with pytest.raises(ConfigError, match=r"lm_head.weight is not model.embed_tokens.weight, .* Set it to false"):
        _load(tmp_path / "other", lambda weights: {**weights, "lm_head.weight": weights[embedding] + 1}, "qwen2")


def test_a_weight_without_a_name_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's model has beyond the folder's would be lost by an export."""
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    table = Qwen3Bridge.mapping_registry

    def without_norms(self: object) -> object:
        registry = table(self)
        registry.mappings = [one for one in registry.mappings if "k_layernorm" not in one.megatron_param]
        return type(registry)(*registry.mappings)

    monkeypatch.setattr(Qwen3Bridge, "mapping_registry", without_norms)
    with pytest.raises(ConfigError, match=r"Megatron-Bridge has no name for decoder\.layers\.0\.\S*k_layernorm"):
        _load(tmp_path, dict)
