import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.validation import CheckedConfig, examine, refusal
from nemo_rl_offload.errors import ConfigError

MakeModel = Callable[..., Path]
Check = Callable[..., CheckedConfig]
Refusals = Callable[[str], list[str]]
Refuses = Callable[[str, str, str, str], None]


@pytest.fixture(scope="session")
def configs() -> Path:
    return PROJECT_ROOT / "examples" / "configs"


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make a folder that passes for a Hugging Face model; keywords go into its config.json, and choose a family."""

    def make(**shape: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        content = {"model_type": _family(shape), "num_hidden_layers": 4, "num_attention_heads": 4, **shape}
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text("{}")
        save_file({}, folder / "model.safetensors")
        return folder

    return make


def _family(shape: dict[str, Any]) -> str:
    if "kv_lora_rank" in shape:
        return "deepseek_v3"
    if {"n_routed_experts", "n_shared_experts", "num_nextn_predict_layers"} & shape.keys():
        return "glm4_moe"
    return "qwen3_moe" if {"num_experts", "num_local_experts"} & shape.keys() else "qwen2"


@pytest.fixture(scope="session")
def dense_model(make_model: MakeModel) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def moe_model(make_model: MakeModel) -> Path:
    return make_model(n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=48)


@pytest.fixture(scope="session")
def tiny(configs: Path, dense_model: Path) -> Callable[..., dict[str, Any]]:
    """Load grpo_tiny.yaml with overrides and a model that exists."""

    always = [f"policy.model_name={dense_model}", "cluster.gpus_per_node=auto"]  # rules about numbers of workers wait
    unchanged = load_config(configs / "grpo_tiny.yaml", always)

    def load(*overrides: str) -> dict[str, Any]:
        if not overrides:
            return copy.deepcopy(unchanged)
        return load_config(configs / "grpo_tiny.yaml", [*always, *overrides])

    return load


@pytest.fixture(scope="session")
def check(tiny: Callable[..., dict[str, Any]]) -> Check:
    """Load and check grpo_tiny.yaml with overrides; every warning is a line of its own."""

    def check(*overrides: str, run_here: bool = True) -> CheckedConfig:
        values = tiny(*overrides)
        found = examine(values, run_here=run_here)
        if found.config is None:
            raise refusal("tiny.yaml", found.problems)
        return CheckedConfig(found.config, [str(warning) for warning in found.warnings])

    return check


@pytest.fixture(scope="session")
def refusals(check: Check, dense_model: Path, moe_model: Path) -> Refusals:
    """Return the lines of all problems; overrides as one text.

    `M.` stands for `policy.megatron_cfg.`, `DENSE` and `MOE` for a model.
    """

    def lines_of(overrides: str) -> list[str]:
        try:
            check(*expand(overrides, dense_model, moe_model), run_here=False)
        except ConfigError as error:
            return str(error).splitlines()[1:]
        return []

    return lines_of


@pytest.fixture(scope="session")
def refuses(refusals: Refusals) -> Refuses:
    """Assert that `broken` overrides have one problem, at `path` and with these `words`, which `legal` ones mend."""

    def assert_refused(broken: str, path: str, words: str, legal: str) -> None:
        (line,) = refusals(broken)
        assert line.startswith(f"{path}: ")
        assert words in line
        assert refusals(f"{broken} {legal}") == []

    return assert_refused


def expand(text: str, dense_model: Path, moe_model: Path) -> list[str]:
    models = {"DENSE": f"policy.model_name={dense_model}", "MOE": f"policy.model_name={moe_model}"}
    shortened = [models.get(part, part) for part in text.split()]
    return [re.sub(r"^(\+?)M\.", r"\1policy.megatron_cfg.", part) for part in shortened]
