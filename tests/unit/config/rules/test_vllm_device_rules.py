"""What `check` says about vLLM's engines of several devices, without vLLM."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules.vllm_devices import num_engines
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.errors import ConfigError

CFG = "policy.generation.vllm_cfg"
APART = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources")
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
    "intermediate_size": 64,
    "decoder_sparse_step": 1,
}


def problems(*overrides: str, backend: str = "vllm") -> dict[str, str]:
    given = (f"policy.generation.backend={backend}", "cluster.gpus_per_node=8", *overrides)
    found = examine(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", given), run_here=False)
    return {
        problem.path: problem.message
        for problem in found.problems
        if problem.path.startswith(("policy.generation", "cluster"))  # others want a batch that 8 workers can share
    }


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> list[str]:
    given = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    return [f"{CFG}.{kind}_parallel_size={size}" for kind, size in given.items()]


@pytest.mark.parametrize("taken", [sizes(2), sizes(4), sizes(pipeline=2), sizes(2, 2), sizes(2, 4), sizes(1, 4)])
def test_sizes_that_divide_are_taken(taken: list[str]) -> None:
    assert problems(*taken) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (sizes(pipeline=3), "tensor", "3 devices, which do not divide the 8"),
        (sizes(8), "tensor", "8 does not divide the model's 4 attention heads"),
        (sizes(pipeline=8), "pipeline", "8 does not divide the model's 4 layers"),
        ([*sizes(4, 4), "cluster.num_nodes=3"], "tensor", "do not divide the 24 .* let 32 generate"),
        ([*sizes(1, 4), "cluster.gpus_per_node=6", "cluster.num_nodes=2"], "tensor", "6 generate on a node"),
        ([*sizes(2), APART[0], f"{APART[1]}.gpus_per_node=3"], "tensor", "do not divide the 3 .* let 4 generate"),
        (sizes(2, expert=2), "expert", "no experts. Set it to 1"),
    ],
)
def test_what_does_not_divide_is_said_with_its_fix(overrides: list[str], key: str, said: str) -> None:

    found = problems(*overrides)
    assert re.search(said, found[f"{CFG}.{key}_parallel_size"]), found
    assert problems(*(given for given in overrides if not given.startswith(CFG))) == {}, "and nothing else is wrong"


def test_each_side_is_divided_by_its_own_sizes() -> None:
    apart = (APART[0], f"{APART[1]}.gpus_per_node=4")
    assert problems(*sizes(4), *apart) == {}
    training = "policy.megatron_cfg.pipeline_model_parallel_size=2"
    uneven = (training, "cluster.gpus_per_node=5", APART[0], f"{APART[1]}.gpus_per_node=1")
    assert problems(*sizes(1), *uneven) == {}
    assert "cluster.gpus_per_node" in problems(*uneven, backend="megatron"), "whose workers are laid out alike"


@pytest.mark.parametrize(
    ("taken", "key", "said"),
    [
        (sizes(2, expert=2), None, ""),
        (sizes(4, expert=4), None, ""),
        (sizes(2), None, ""),
        (sizes(4), "tensor", "34 rows of an expert"),
        (sizes(4, expert=2), "expert", "2 is no multiple of tensor_parallel_size=4"),
        (sizes(2, expert=4), "expert", "asks for experts over several engines, not supported here"),
        (sizes(1, expert=4), "expert", "Set it to 1, or both to 4"),
    ],
)
def test_experts_are_as_nemo_rl_counts_them(
    make_model: Callable[..., Path], taken: list[str], key: str | None, said: str
) -> None:
    found = problems(*taken, f"policy.model_name={make_model(**EXPERTS)}")
    assert list(found) == ([] if key is None else [f"{CFG}.{key}_parallel_size"])
    assert said in "".join(found.values())


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"intermediate_size": 66}, "66 rows of an MLP"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, "6 key heads do not divide"),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, None),
        ({"vocab_size": 65}, None),
    ],
)
def test_what_devices_share_is_whole(make_model: Callable[..., Path], shape: dict[str, int], said: str | None) -> None:
    model = f"policy.model_name={make_model(**{'intermediate_size': 64, **shape})}"
    found = problems(*sizes(4), model)
    assert (said is None) == (found == {}), found
    assert said is None or said in found[f"{CFG}.tensor_parallel_size"]
    assert problems(*sizes(1), model) == {}


@pytest.mark.parametrize(("tensor", "is_whole"), [(2, True), (3, False)])
def test_rows_of_the_vocabulary_are_padded_before_they_are_shared(
    make_model: Callable[..., Path], tensor: int, is_whole: bool
) -> None:
    model = make_model(vocab_size=100, intermediate_size=96, num_attention_heads=12, num_key_value_heads=12)
    found = problems(*sizes(tensor), f"policy.model_name={model}", "cluster.gpus_per_node=6")
    assert is_whole == (found == {})
    assert is_whole or "rows of the padded vocabulary" in found[f"{CFG}.tensor_parallel_size"]


def test_other_backends_do_not_ask() -> None:
    assert problems(*sizes(3), backend="megatron") == {}


def test_engines_on_nodes() -> None:
    cfg = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    assert num_engines(cfg, 32, 8) == 2, "each on two nodes"
    assert num_engines(cfg, 16, 16) == 1
    with pytest.raises(ConfigError, match="parts of several nodes"):
        num_engines(cfg, 48, 12)
