"""The command `eval`: pass@k or cons@k of a model's folder or of a run's checkpoint."""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_rl_offload.cli.warned import warnings_as_lines
from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.nemo_rl.dtensor import is_override
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.schema import DataConfig, MasterConfig
from nemo_rl_offload.config.sources import OVERRIDE, LoadedConfig, nodes
from nemo_rl_offload.config.validation import check_config, schema_problems
from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.observability.summary_table import table_of_figures
from nemo_rl_offload.runs.begin import find_checkpoint
from nemo_rl_offload.runs.comparison import leaves
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, EVALUATION_FILE, check_no_run_in, open_run_directory
from nemo_rl_offload.runs.run_files import Evaluation, read_json
from nemo_rl_offload.specs.documents import DocumentError, read_yaml
from nemo_rl_offload.specs.process_limits import widen_limits
from nemo_rl_offload.units import human_duration

EXAMPLE = "examples/configs/eval_tiny.yaml"
_EXPORTED = "model"
"""Folder in the run directory for a checkpoint's weights, while they are evaluated."""


def evaluate(options: argparse.Namespace, overrides: Sequence[str], run_dirs: list[Path]) -> Path:
    """Evaluate, show the figures, and return their file."""
    checkpoint: Path | None = options.checkpoint
    source: Path = options.config or PROJECT_ROOT / EXAMPLE
    name = source.stem if source.stem.startswith("eval") else f"eval_{source.stem}"
    if checkpoint is not None:
        run_dir, folder = find_checkpoint(checkpoint)
        name = f"eval_{run_dir.name}_{folder.name}"
        source = options.config or run_dir / CONFIG_FILE
    loaded = read_recipe(source, overrides)
    if checkpoint is not None and options.config is None:  # has all keys, of which a user wrote but these
        written = {path for path, _ in nodes(loaded.values) if is_override(loaded.origin(path))}
        loaded = replace(loaded, inherited=frozenset(path for path, _ in nodes(loaded.values)) - written)
    _check_sampling(loaded)
    checked = check_config(_that_generates(loaded, source), str(source))
    config = checked.config
    if not has_problems(config["data"]):
        raise ConfigError(f"{source}: data.validation.path: there is no problem to evaluate. Give a file of problems.")
    config = _quantized_once(config, source, None if checkpoint is None else run_dir)
    widen_limits()
    saved = config["eval"]["save_path"]
    default = Path("results") / name if saved is None else Path(saved).expanduser()
    check_no_run_in(options.run_dir or default)
    console = Console(stderr=options.format == "json", highlight=False, markup=False, soft_wrap=True)
    with open_run_directory(options.run_dir, default, config) as out:
        run_dirs.append(out)
        model = config["policy"]["model_name"] if checkpoint is None else str(checkpoint)
        there = read_json(out / EVALUATION_FILE, Evaluation, "Name another --run-dir.")
        if there is not None and there["model"] != model:
            raise ConfigError(f"{out}: has the evaluation of {there['model']}. Name another --run-dir.")
        for warning in checked.warnings:
            console.print(f"warning: {warning}", style="yellow")
        console.print(f"Run directory: {out}")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from nemo_rl_offload.algorithms.evaluation import run_evaluation

        def say(line: str) -> None:
            console.print(line if line.endswith(".") else f"{line} ...")

        stream = sys.stderr if console.stderr else None
        with warnings_as_lines(console):
            if checkpoint is None:
                found = run_evaluation(config, out, model, say, stream)
            else:
                say(f"Exporting {checkpoint}")
                with _exported(checkpoint, out / _EXPORTED) as folder:
                    found = run_evaluation(_with_model(config, folder), out, model, say, stream)
        if options.format != "json":
            console.print(_table(found, out, console.width))
        return out / EVALUATION_FILE


def _check_sampling(loaded: LoadedConfig) -> None:
    """Responses are drawn as in validation. A run's file has those keys resolved, so that no override reaches them."""
    section = dict(nodes(loaded.values))
    problems = []
    for key in ("temperature", "top_p", "top_k"):
        given, read = (f"policy.generation.{prefix}{key}" for prefix in ("", "val_"))
        is_unread = is_override(loaded.origin(given)) and not is_override(loaded.origin(read))
        if is_unread and section.get(given) != section.get(read):
            problems.append(f"{given}: has no effect, for responses are drawn by {read}. Give that. ({OVERRIDE})")
    if problems:
        raise ConfigError("\n".join(problems))


def has_problems(data: DataConfig) -> bool:
    """Whether there are any to evaluate: in files for validation, drawn from those for training, or generated."""
    return data["train"]["path"] is None or data["validation"]["path"] is not None or draws_validation(data)


def draws_validation(data: DataConfig) -> bool:
    """Whether problems for validation are a part of those for training."""
    return any(section["split_validation_size"] for section in (data["train"], *data["train"]["further"]))


def _that_generates(loaded: LoadedConfig, source: Path) -> LoadedConfig:
    """The configuration; of an algorithm that learns from given answers, as that of one that generates.

    What is only trained on is not read: its place is taken by what is validated.
    """
    values = loaded.values
    spec = ALGORITHMS.get(values["algorithm"])
    if spec is None or loaded.problems or schema_problems(values):
        return loaded
    data = values["data"]
    if spec.generates and ENVIRONMENTS[data["env_name"]].leads_episodes:
        raise ConfigError(
            f"{source}: data.env_name: {data['env_name']} leads episodes of a run, whose validation is measured by "
            "them (grpo.val_period, grpo.val_at_end); eval scores responses. Give another data.env_name."
        )
    same = {key: data["validation"][key] for key in ("path", "split", "input_key", "output_key")}
    of_validation = {**data["train"], **same, "further": [], "split_validation_size": 0.0}
    if spec.generates:
        if data["validation"]["path"] is None or draws_validation(data):
            return loaded
        return replace(loaded, values={**values, "data": {**data, "train": of_validation}})
    if ENVIRONMENTS[data["env_name"]].problems == "generated" and (data["train"]["path"] or data["validation"]["path"]):
        scorers = " or ".join(name for name, each in ENVIRONMENTS.items() if each.scorer and each.problems == "file")
        raise ConfigError(
            f"{source}: {spec.name} learned from given answers, which nothing can score. Give problems as "
            f"data.validation.path=FILE, and what scores the model's answers as data.env_name={scorers}."
        )
    ranked = {**values["checkpointing"], "metric_name": None}
    generating = next(name for name, each in ALGORITHMS.items() if each.generates)
    return replace(
        loaded,
        values={**values, "algorithm": generating, "data": {**data, "train": of_validation}, "checkpointing": ranked},
    )


def _quantized_once(config: MasterConfig, source: Path, run_dir: Path | None) -> MasterConfig:
    """The configuration without `policy.quant_cfg` where the weights of this run's checkpoint are quantized by it.

    Raises ConfigError where it asks an engine to quantize what it reads from a folder.
    """
    policy, saved = config["policy"], None
    if run_dir is not None:
        with suppress(OSError, DocumentError):
            saved = leaves(read_yaml(run_dir / CONFIG_FILE, follows_links=False)).get("policy.quant_cfg")
    if policy["quant_cfg"] == saved:
        return {**config, "policy": {**policy, "quant_cfg": None}}
    if policy["quant_cfg"] is not None and policy["generation"]["backend"] == "vllm":
        raise ConfigError(
            f"{source}: policy.quant_cfg: an evaluation by vLLM is of weights as they are in their folder, which are "
            "not quantized. Set policy.generation.backend=megatron, or policy.quant_cfg=null."
        )
    return config


@contextmanager
def _exported(checkpoint: Path, folder: Path) -> Iterator[Path]:
    """The checkpoint's weights as a Hugging Face folder, as long as the block lasts."""
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    command = [sys.executable, "-m", "nemo_rl_offload.cli", "export", str(checkpoint), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # its process has Megatron
        if done.returncode:
            raise CheckpointError(done.stderr.strip().removeprefix("error: ") or "the export was interrupted.")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_model(config: MasterConfig, folder: Path) -> MasterConfig:
    return {**config, "policy": {**config["policy"], "model_name": str(folder)}}


def _table(found: Evaluation, out: Path, width: int) -> Table:
    table = table_of_figures(f"evaluation of {found['model']}", width)
    voted = found.get("cons_at_k")
    rows = {
        f"pass@{found['k_value']}": _with_error(found["pass_at_k"], found["standard_error"]),
        f"cons@{found['k_value']}": "" if voted is None else _with_error(voted, found.get("cons_standard_error")),
        "problems": str(found["num_problems"]),
        "responses to each": str(found["num_tests_per_prompt"]),
        "right": f"{found['accuracy']:.3f} of all responses",
        "mean reward": f"{found['reward']:.3f}",
        "mean length": f"{found['mean_gen_tokens_per_sample']:.1f} tokens",
        "without an end": f"{found['unfinished_fraction']:.3f} of all responses",
        "scorer errors": str(found["scorer_errors"]),
        "wall time": human_duration(found["wall_seconds"]),
        "run directory": str(out),
    }
    for what, value in rows.items():
        if value:
            table.add_row(what, value)
    return table


def _with_error(mean: float, error: float | None) -> str:
    return f"{mean:.3f}" if error is None else f"{mean:.3f} +- {error:.3f}"
