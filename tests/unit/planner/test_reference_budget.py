"""A host budget without room for the reference's weights is a problem before the run."""

from collections.abc import Iterator
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.validation import examine
from nemo_rl_offload.planner.host_budget import host_problems

EXAMPLES = PROJECT_ROOT / "examples/configs"
CFG = "policy.megatron_cfg"
BUDGET = f"{CFG}.activation_offload.host_memory_budget"
PENALTY = "loss_fn.reference_policy_kl_penalty"


def problems(file: str, *overrides: str) -> Iterator[str]:
    config: Any = load_config(EXAMPLES / file, overrides)
    return host_problems(config)


@pytest.mark.parametrize(
    ("file", "overrides", "says"),
    [
        ("grpo_math_1B.yaml", (f"{BUDGET}=2GiB",), "2GiB a rank has no room for the reference's weights (2.88 GiB)."),
        ("grpo_math_1B.yaml", (f"{BUDGET}=3GiB",), None),
        ("grpo_math_1B.yaml", (f"{BUDGET}=2GiB", f"{CFG}.tensor_model_parallel_size=2"), None),
        ("grpo_math_1B.yaml", (f"{BUDGET}=2GiB", f"{PENALTY}=0"), None),
        ("grpo_math_1B.yaml", (f"{BUDGET}=0.01",), None),
        ("dpo.yaml", (f"{BUDGET}=1GiB",), "1GiB a rank has no room for the reference's weights"),
        ("sft.yaml", (f"{BUDGET}=1GiB",), None),
        (
            "grpo_math_1B.yaml",
            (f"{BUDGET}=16GiB", f"{CFG}.optimizer.optimizer_cpu_offload=true", "cluster.gpus_per_node=1"),
            "GiB) and the reference's weights (2.88 GiB). Raise it, lower",
        ),
    ],
)
def test_the_budget_is_compared_with_what_waits(file: str, overrides: tuple[str, ...], says: str | None) -> None:
    found = list(problems(file, *overrides))
    assert bool(found) == (says is not None)
    for line in found:
        assert line.startswith(f"{BUDGET}: ")
        assert says is not None
        assert says in line


@pytest.mark.parametrize("is_read", [True, False])
def test_the_budget_has_an_effect_where_the_reference_waits(is_read: bool) -> None:
    overrides = (f"{BUDGET}=1GiB", f"{PENALTY}={0.1 if is_read else 0.0}")
    found = examine(read_recipe(EXAMPLES / "grpo_math_1B.yaml", overrides), run_here=False)
    said = [str(warning) for warning in found.warnings if f"{BUDGET}: " in str(warning) and "no effect" in str(warning)]
    assert bool(said) is not is_read
