"""Rules about prompts and tasks: everything outside `policy.megatron_cfg` that several algorithms share."""

import re
from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from nemo_rl_offload.config.rule import Get, Rule
from nemo_rl_offload.errors import nearest

GENERATES = ("grpo", "distillation")
"""Algorithms that sample responses to problems."""


def takes_problems(get: Get) -> bool:
    """Whether training data are problems of reasoning-gym."""
    algorithm = get("algorithm")
    if algorithm in GENERATES:
        return bool(get("data.env_name") == "reasoning_gym")
    return algorithm == "sft" and get("data.train.path") is None


def _prompt_template(get: Get) -> Iterator[str]:
    template = get("data.prompt_template")
    if template is not None and "{question}" not in template:
        yield "data.prompt_template: has no place for the question. Put {question} into it."


def _task(get: Get) -> Iterator[str]:
    task = get("env.reasoning_gym.task")
    names = task_names()
    if task is None and takes_problems(get):
        yield "env.reasoning_gym.task: missing value. Give one: env.reasoning_gym.task=..."
    elif task is not None and task not in names:
        hint = nearest(task, names) or f" Some of them: {', '.join(sorted(names)[:5])}."
        yield f"env.reasoning_gym.task: '{task}' is none of reasoning-gym's {len(names)} tasks.{hint}"


def _function(get: Get) -> Iterator[str]:
    path = get("env.function.path")
    if path is not None and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", path):
        yield f"env.function.path: '{path}' names no function. Write it as package.module:name."
    elif path is None and get("algorithm") in GENERATES and get("data.env_name") == "function":
        yield "env.function.path: missing value. Give one: env.function.path=package.module:name"


def _generation_workers(get: Get) -> Iterator[str]:
    path = "policy.generation.colocated"
    if get("algorithm") not in GENERATES or get(f"{path}.enabled"):
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


@cache
def task_names() -> set[str]:
    """Return the names of reasoning-gym's data sets, read from its sources: importing it takes seconds."""
    package = find_spec("reasoning_gym")
    assert package is not None
    assert package.submodule_search_locations
    declared = re.compile(r'^(?:DATASET_NAME\s*=|register_dataset\()\s*"(\w+)"', re.MULTILINE)
    sources = Path(package.submodule_search_locations[0]).rglob("*.py")
    return {name for source in sources for name in declared.findall(source.read_text(encoding="utf-8"))}


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
    _task,
    _function,
    _generation_workers,
)
