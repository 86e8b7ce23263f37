"""A run's checkpoint as a Hugging Face folder: `nemo-rl-offload export RUN_DIR/step_N OUT`.

The checkpoint is read as one rank would have written it, in this process and on the CPU, whatever layout wrote it: an
export needs neither Ray nor the GPUs of the run, but host memory for the whole model, twice.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.runs.output import make_writable, partial_of
from nemo_rl_offload.runs.run_directory import CHECKPOINTS, CONFIG_FILE, POLICY, read_checkpoint, steps_in

ONE_RANK: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "transformer_impl": "torch",  # the same names and shapes of weights as Transformer Engine's
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
}


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint's folder that `RUN_DIR/step_N` or `RUN_DIR/checkpoints/step_N` names.

    Raises:
        CheckpointError: there is none; the message lists those that there are.
    """
    run_dir = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    folder = run_dir / CHECKPOINTS / path.name
    if folder.is_dir() and path.name.startswith("step_"):
        return run_dir, folder
    there = ", ".join(f"step_{step}" for step in steps_in(run_dir / CHECKPOINTS))
    raise CheckpointError(
        f"{path}: there is no such checkpoint. "
        + (f"{run_dir} has: {there}." if there else "Give RUN_DIR/step_N of a run that has written checkpoints.")
    )


def export_checkpoint(checkpoint: Path, destination: Path) -> None:
    """Write the checkpoint's weights to a new folder, with the start model's configuration and tokenizer.

    Raises:
        CheckpointError: it is not there, damaged, or of another model.
        ConfigError: the destination exists or cannot be written, or the start model is not where the run found it.
        ResourceError: the disk is full.
    """
    run_dir, folder = find_checkpoint(checkpoint)
    if os.path.lexists(destination):  # also a link to nowhere, over which no folder can be moved
        raise ConfigError(f"{destination}: exists already. Name a new folder.")
    _, _, files = read_checkpoint(folder)
    policy = _policy_of(run_dir)
    model_path = resolve_model_path(policy["model_name"])
    make_writable(partial_of(destination), str(destination))
    shutil.rmtree(partial_of(destination))  # what is damaged below leaves nothing behind
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices: the whole model may be larger than one
    import torch.distributed as dist

    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()
    from nemo_rl_offload.megatron.build.model import build_model, export_hf, init_process_groups, join_alone
    from nemo_rl_offload.megatron.checkpoint.distributed import load, verify

    if not dist.is_initialized():
        join_alone("gloo")
    init_process_groups(policy, seed=0)
    verify(folder / POLICY, files)
    model = build_model(policy, model_path, num_steps=None)
    load(model, folder / POLICY)
    export_hf(model, model_path, destination)


def _policy_of(run_dir: Path) -> PolicyConfig:
    path = run_dir / CONFIG_FILE
    try:
        policy: Any = yaml.safe_load(path.read_text())["policy"]
        merged: Any = {**policy, "megatron_cfg": {**policy["megatron_cfg"], **ONE_RANK}}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not the configuration of a run: {error}. Restore it from a copy.") from error
    return merged  # type: ignore[no-any-return]
