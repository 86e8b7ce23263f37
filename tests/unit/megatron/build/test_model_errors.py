"""What is raised while a model is read: the model's fault, but for a device without memory."""

from pathlib import Path

import pytest

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import _named


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "Last error:\nFailed to CUDA calloc async 24 bytes"])
def test_a_lack_of_device_memory_is_left_to_who_explains_it(words: str) -> None:
    with pytest.raises(RuntimeError, match=words), _named(Path("model")):
        raise RuntimeError(words)


def test_anything_else_is_named_after_the_model() -> None:
    told = r"^policy\.model_name: model: Megatron-Bridge cannot take it: no such head$"
    with pytest.raises(ConfigError, match=told), _named(Path("model")):
        raise RuntimeError("no such head")
