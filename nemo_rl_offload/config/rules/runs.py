"""Rules about prompts and tasks: everything outside `policy.megatron_cfg` that several algorithms share."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_spec


def takes_problems(get: Get) -> bool:
    """Whether training data are problems of reasoning-gym."""
    spec = algorithm_spec(get)
    if spec.generates:
        return ENVIRONMENTS[get("data.env_name")].problems == "generated"
    return spec.learns_from == "conversations" and get("data.train.path") is None


def _prompt_template(get: Get) -> Iterator[str]:
    template = get("data.prompt_template")
    if template is not None and "{question}" not in template:
        yield "data.prompt_template: has no place for the question. Put {question} into it."


def _generation_workers(get: Get) -> Iterator[str]:
    path = "policy.generation.colocated"
    if not algorithm_spec(get).generates or get(f"{path}.enabled"):
        return
    key = "gpus_per_node" if get("cluster.num_nodes") == 1 else "num_nodes"
    other = "num_nodes" if key == "gpus_per_node" else "gpus_per_node"
    wanted, there = get(f"{path}.resources.{key}"), get(f"cluster.{key}")
    if wanted is None:
        yield f"{path}.resources.{key}: missing value: how many of cluster.{key} generate. Give at least 1."
    elif there != "auto" and wanted >= there:
        yield (
            f"{path}.resources.{key}: {wanted} of cluster.{key}={there} leaves none to train. "
            f"Set cluster.{key} to at least {wanted + 1}."
        )
    if (useless := get(f"{path}.resources.{other}")) not in (None, 1 if other == "num_nodes" else None):
        yield (
            f"{path}.resources.{other}: {useless} is not allowed with cluster.num_nodes={get('cluster.num_nodes')}, "
            f"where {path}.resources.{key} says which workers generate. Set it to null."
        )


def _tracker_is_here(name: str, get: Get) -> Iterator[str]:
    if get(f"logger.{name}_enabled") and find_spec(name) is None:
        yield (
            f"logger.{name}_enabled: the package {name} is not installed. Install it (`uv sync --group {name}`), or "
            "set this to false."
        )


RUN_RULES_OF_THIS_MACHINE: tuple[Rule, ...] = (
    partial(_tracker_is_here, "wandb"),
    partial(_tracker_is_here, "mlflow"),
)
RUN_RULES: tuple[Rule, ...] = (
    _prompt_template,
    _generation_workers,
)
