from typing import Any

import pytest

from nemo_rl_offload.config.loader import resolve_tokenizer_path
from nemo_rl_offload.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_tokenizer(resolve_tokenizer_path("examples/models/tiny_speller"))
