"""What the command `check` does and says: as text, or as JSON for other programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nemo_rl_offload.config.loader import BASE, read_config
from nemo_rl_offload.config.megatron_schema import MegatronConfig
from nemo_rl_offload.config.nemo_rl import UNSUPPORTED
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.validation import Findings, Problem, examine, summary
from nemo_rl_offload.errors import ConfigError

_OF_MEGATRONS_ENGINE = (
    "activation_offload_fraction",
    "delta_offload_bytes_across_pp_ranks",
    "fine_grained_offloading_max_inflight_offloads",
    "delay_offload_until_cuda_graph",
)


def check_file(file: Path, overrides: Sequence[str], *, allow_unsupported: bool = False) -> Findings:
    """Read and examine a configuration for a run elsewhere; a file that cannot be read is a problem like others.

    With ``allow_unsupported`` it is a recipe of NeMo-RL: base.yaml gives what it does not say or this project lacks.
    """
    try:
        if not allow_unsupported:
            return examine(read_config(file, overrides), run_here=False)
        recipe = read_config(file, overrides, below=[BASE])
        return examine(recipe, run_here=False, nemo_rl_defaults=read_config(BASE, resolve=False).values)
    except ConfigError as error:
        return Findings(None, [Problem("", str(error), "")], [], LoadedConfig({}))


def offload_settings(cfg: MegatronConfig) -> dict[str, object]:
    """The settings of `policy.megatron_cfg` that decide what is offloaded and how; those without effect left out."""
    settings: dict[str, object] = {"fine_grained_activation_offloading": cfg["fine_grained_activation_offloading"]}
    if cfg["fine_grained_activation_offloading"]:
        how = cfg["activation_offload"]
        settings |= {"offload_modules": cfg["offload_modules"], "activation_offload.engine": how["engine"]}
        settings["min_offloaded_tensor_size"] = cfg["min_offloaded_tensor_size"]
        if how["engine"] == "native":
            settings["activation_offload.host_memory_budget"] = how["host_memory_budget"]
        if cfg["offload_modules"] == "auto":
            settings["activation_offload.gpu_memory_budget"] = how["gpu_memory_budget"]
        if how["engine"] == "megatron":
            settings |= {key: {**cfg}[key] for key in _OF_MEGATRONS_ENGINE}
    for switch in ("cpu_offloading", "moe_paged_stash"):
        if {**cfg}[switch]:
            settings |= {key: value for key, value in cfg.items() if key.startswith(switch)}
    return settings


def as_text(file: Path, found: Findings) -> str:
    """Lines for a terminal: warnings, then the problems, or that there are none and what is offloaded."""
    lines = [f"warning: {warning}" for warning in found.warnings]
    if found.config is None:
        lines += [f"error: {summary(str(file), found.problems)}"]
        if any(UNSUPPORTED in problem.message for problem in found.problems):
            lines += ["hint: to read a recipe of NeMo-RL as it stands, add --allow-unsupported"]
        return "\n".join(lines)
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
            "problems": [asdict(problem) for problem in found.problems],
            "warnings": [asdict(warning) for warning in found.warnings],
            "offloading": settings,
        },
        indent=2,
    )


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"[{', '.join(value)}]" if isinstance(value, list) else json.dumps(value)
