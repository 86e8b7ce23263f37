import json
from pathlib import Path
from typing import Any

import pytest
from planner_evidence import PUBLISHED_PARAMETERS

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.parameters import layer_parameters, model_parameters, mtp_parameters
from nemo_rl_offload.specs.catalogue import CATALOGUE, find_config, load_model_shape
from nemo_rl_offload.specs.model_shape import MOE_LAYER, read_model_shape
from nemo_rl_offload.specs.parallel_layout import Split


@pytest.mark.parametrize("name", CATALOGUE)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert model_parameters(load_model_shape(name, None)) == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.248e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6),
        ("HuggingFaceTB/SmolLM2-360M", 361.8e6),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.711e9),
        ("Qwen/Qwen3-4B", 4.02e9),
        ("meta-llama/Llama-3.2-1B", 1.236e9),
        ("openai/gpt-oss-20b", 20.9e9),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.89e9),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2", 12.31e9),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6e9),
    ],
)
def test_so_are_those_of_further_models(name: str, published: float) -> None:
    """As each file's number of weights on the hub."""
    assert model_parameters(load_model_shape(name, None)) == pytest.approx(published, rel=0.005)


def test_multi_token_prediction_counts_as_published() -> None:
    """Published as 11.5B for what is 11.6B."""
    assert mtp_parameters(load_model_shape("deepseek-ai/DeepSeek-V3", None)).total == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"),
    ],
)
def test_variants_have_the_shape_of_their_base(name: str, base: str) -> None:
    assert find_config(name) is CATALOGUE[base]


def test_gemma_has_the_parameters_that_are_published() -> None:
    """999,885,952 by the hub's count of its weights."""
    shape = load_model_shape("google/gemma-3-1b-it", None)
    assert model_parameters(shape) == 999_885_952
    assert (shape.activation, shape.tied_embeddings, shape.sliding_windows) == ("gelu_pytorch_tanh", True, True)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-8B", "Qwen2.5-7B", "Qwen/Qwen2.5-7B-Coder", ""])
def test_other_names_are_not_guessed(name: str) -> None:
    assert find_config(name) is None


def test_an_unknown_model_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'Qwen/Qwen2\.5-7B'\?"):
        load_model_shape("Qwen/Qwen2.5-8B", None)


def test_an_unknown_model_is_told_all_that_can_be_planned() -> None:
    with pytest.raises(ConfigError) as caught:
        load_model_shape("acme/none", None)
    named = str(caught.value).partition(" or one of ")[2].removesuffix(".").split(", ")
    assert {*CATALOGUE, "Qwen/Qwen3-0.6B", "google/gemma-3-27b", "deepseek-ai/DeepSeek-R1"} <= set(named)
    assert len({load_model_shape(name, None) for name in named}) > 25
    assert {"nvidia/NVIDIA-Nemotron-Nano-9B-v2", "Qwen/Qwen3.5-35B-A3B"} <= set(named)


def write(folder: Path, content: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_folder_is_read_like_the_catalogue(tmp_path: Path) -> None:
    write(tmp_path, CATALOGUE["deepseek-ai/DeepSeek-V3"])
    assert load_model_shape("mine", tmp_path) == load_model_shape("deepseek-ai/DeepSeek-V3", None)


@pytest.mark.parametrize("content", ["[]", "{", '"text"'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_shape("mine", tmp_path)


def test_all_missing_keys_are_named_at_once() -> None:
    content = {**CATALOGUE["Qwen/Qwen3-8B"], "num_hidden_layers": "36"}
    del content["hidden_size"]
    with pytest.raises(ConfigError) as raised:
        read_model_shape(content, "mine")
    assert "mine: hidden_size is missing" in str(raised.value)
    assert "mine: num_hidden_layers is '36'" in str(raised.value)


def test_an_unknown_family_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'qwen3_mo' is not known.*Did you mean 'qwen3_moe'"):
        read_model_shape({"model_type": "qwen3_mo"}, "mine")


def test_layers_with_experts() -> None:
    deepseek = load_model_shape("deepseek-ai/DeepSeek-V3", None)
    assert deepseek.layers_with_experts == (False,) * 3 + (True,) * 58
    content = {**CATALOGUE["Qwen/Qwen3-30B-A3B"], "num_hidden_layers": 6, "decoder_sparse_step": 2}
    shape = read_model_shape({**content, "mlp_only_layers": [3]}, "mine")
    assert shape.layers_with_experts == (False, True, False, False, False, True)


def test_parallel_ranks_share_a_layer_but_for_norms_and_router() -> None:
    shape = load_model_shape("Qwen/Qwen3-30B-A3B", None)
    whole = layer_parameters(shape, MOE_LAYER)
    part = layer_parameters(shape, MOE_LAYER, Split(tensor=4, expert=8, expert_tensor=2))
    assert part.expert * 16 == whole.expert
    replicated = 2 * shape.hidden_size + 2 * shape.head_dim + shape.hidden_size * 128
    assert (part.shared - replicated) * 4 == whole.shared - replicated


def test_layers_for_further_tokens_that_a_run_leaves_out() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    whole, without = load_model_shape(name, None), load_model_shape(name, None, mtp_num_layers=0)
    assert (whole.num_mtp_layers, without.num_mtp_layers) == (1, 0)
    assert load_model_shape(name, None, mtp_num_layers=1) == whole
    assert mtp_parameters(without).total == 0
    assert load_model_shape("Qwen/Qwen3-8B", None, mtp_num_layers=0) == load_model_shape("Qwen/Qwen3-8B", None)
