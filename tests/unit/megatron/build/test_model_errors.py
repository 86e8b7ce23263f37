"""What is raised while a model is read: the model's fault, but for a device without memory."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import _named, check_layers


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "Last error:\nFailed to CUDA calloc async 24 bytes"])
def test_a_lack_of_device_memory_is_left_to_who_explains_it(words: str) -> None:
    with pytest.raises(RuntimeError, match=words), _named(Path("model")):
        raise RuntimeError(words)


def test_anything_else_is_named_after_the_model() -> None:
    told = r"^policy\.model_name: model: Megatron-Bridge cannot take it: no such head$"
    with pytest.raises(ConfigError, match=told), _named(Path("model")):
        raise RuntimeError("no such head")


def test_weights_of_other_shapes_are_told_as_such() -> None:
    told = r"^policy\.model_name: model: its weights have other shapes than its config\.json says: Shape mismatch for"
    with pytest.raises(ConfigError, match=told), _named(Path("model")):
        raise ValueError("Shape mismatch for megatron param embedding.word_embeddings.weight:\n  Expected shape: [328]")


@pytest.mark.parametrize(
    ("content", "num_ranks", "is_packed", "words"),
    [
        ({"model_type": "gpt_oss"}, 2, True, "context_parallel_size: 2 ranks share the sequences of packs"),
        ({"model_type": "mistral"}, 4, True, "has no attention with sliding windows"),
        ({"model_type": "gpt_oss"}, 1, True, None),
        ({"model_type": "gpt_oss"}, 2, False, None),
        ({"model_type": "llama"}, 2, True, None),
        ({"model_type": "llama", "mlp_bias": True}, 1, False, "mlp_bias true of config.json needs"),
    ],
)
def test_what_transformer_engines_layers_do_not_do(
    content: dict[str, Any], num_ranks: int, is_packed: bool, words: str | None
) -> None:
    policy: Any = {"megatron_cfg": {"context_parallel_size": num_ranks}, "sequence_packing": {"enabled": is_packed}}
    check_layers(content, policy, Path("model"), "torch")
    if words is None:
        check_layers(content, policy, Path("model"), "transformer_engine")
        return
    with pytest.raises(ConfigError, match=words):
        check_layers(content, policy, Path("model"), "transformer_engine")
