"""What the command `check` does and says: as text, or as JSON for other programs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.sources import OVERRIDE, LoadedConfig
from nemo_rl_offload.config.validation import Findings, Problem, examine, problem_at, summary
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.activation_memory import resolve_activations

_OF_MEGATRONS_ENGINE = (
    "activation_offload_fraction",
    "delta_offload_bytes_across_pp_ranks",
    "fine_grained_offloading_max_inflight_offloads",
    "delay_offload_until_cuda_graph",
)


def check_file(file: Path, overrides: Sequence[str]) -> Findings:
    """Read and examine a configuration for a run elsewhere; a file that cannot be read is a problem like others."""
    try:
        return examine(read_recipe(file, overrides), run_here=False)
    except ConfigError as error:
        return Findings(None, [Problem("", str(error), "")], [], LoadedConfig({}), [])


def with_data(found: Findings) -> Findings:
    """With what is wrong with data that are on this machine, and with what is to wait in host memory, where nothing
    else is."""
    if found.config is None:
        return found
    from nemo_rl_offload.data.early import data_problems
    from nemo_rl_offload.planner.host_budget import host_problems

    trains = not found.loaded.is_evaluation
    lines = [*data_problems(found.config, trains=trains), *(host_problems(found.config) if trains else ())]
    problems = [problem_at(line, found.loaded) for line in lines]
    warnings = [each for each in found.warnings if not any(_says_the_same(each, problem) for problem in problems)]
    return replace(found, config=None if problems else found.config, problems=problems, warnings=warnings)


def _says_the_same(warning: Problem, problem: Problem) -> bool:
    return warning.path == problem.path and warning.message.startswith(problem.message)


def offload_settings(megatron_cfg: MegatronConfig) -> dict[str, object]:
    """The settings of `policy.megatron_cfg` that decide what is offloaded and how; those without effect left out."""
    activations = resolve_activations(megatron_cfg)
    values: Mapping[str, object] = {**megatron_cfg}
    settings: dict[str, object] = {"fine_grained_activation_offloading": activations.switch}
    if activations.offloads:
        budgets = megatron_cfg["activation_offload"]
        settings |= {"offload_modules": values["offload_modules"], "activation_offload.engine": activations.engine}
        settings["min_offloaded_tensor_size"] = values["min_offloaded_tensor_size"]
        if activations.is_native:
            settings["activation_offload.host_memory_budget"] = budgets["host_memory_budget"]
        else:
            settings |= {key: values[key] for key in _OF_MEGATRONS_ENGINE}
        if activations.is_auto:
            settings["activation_offload.gpu_memory_budget"] = budgets["gpu_memory_budget"]
    for switch in ("cpu_offloading", "moe_paged_stash"):
        if values[switch]:
            settings |= {key: value for key, value in values.items() if key.startswith(switch)}
    optimizer = megatron_cfg["optimizer"]
    if optimizer["optimizer_cpu_offload"]:
        settings["activation_offload.host_memory_budget"] = megatron_cfg["activation_offload"]["host_memory_budget"]
        settings["optimizer.optimizer_cpu_offload"] = True
        settings["optimizer.optimizer_offload_fraction"] = optimizer["optimizer_offload_fraction"]
    return settings


def as_text(file: Path, found: Findings, *, verbose: bool = False) -> str:
    """Lines for a terminal: warnings, then the problems, or that there are none and what is offloaded.

    Keys of NeMo-RL's without effect are one line, or with ``verbose`` one each.
    """
    lines = [f"warning: {warning}" for warning in (found.warnings if verbose else found.summed_up)]
    lines += [f"without effect: {each}" for each in found.without_effect if verbose]
    if found.config is None:
        return "\n".join([*lines, f"error: {summary(str(file), found.problems)}"])
    settings = offload_settings(found.config["policy"]["megatron_cfg"])
    width = max(map(len, settings))
    lines += [f"{file}: no problems", "offloading, from policy.megatron_cfg:"]
    return "\n".join([*lines, *(f"  {key:{width}}  {_shown(value)}" for key, value in settings.items())])


def as_json(file: Path, found: Findings) -> str:
    """The same as one JSON object; `offloading` is null where there are problems."""
    settings = None if found.config is None else offload_settings(found.config["policy"]["megatron_cfg"])
    return json.dumps(
        {
            "config": str(file),
            "problems": [asdict(_placed(problem, found.loaded)) for problem in found.problems],
            "warnings": [asdict(warning) for warning in found.warnings],
            "without_effect": [asdict(each) for each in found.without_effect],
            "offloading": settings,
        },
        indent=2,
    )


def _placed(problem: Problem, loaded: LoadedConfig) -> Problem:
    """With path and place of an override that does not apply; its message has both in words."""
    if problem.message not in loaded.problems:
        return problem
    key = re.match(r"override '[+~]*([\w.]+)", problem.message)
    return replace(problem, path=key[1] if key else "", origin=OVERRIDE)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"[{', '.join(value)}]" if isinstance(value, list) else json.dumps(value)
