"""Weights, optimizer and learning-rate schedule as a Megatron distributed checkpoint.

Every rank takes part in both directions. The format knows global tensors, so that another parallel layout can read it.
`fully_sharded_model_space`, Megatron's default for the distributed optimizer, fails without Transformer Engine; the
fully reshardable form is used instead. Whole-or-absent is the caller's matter: it names a folder that nobody reads yet.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_offload.errors import CheckpointError, ResourceError
from nemo_rl_offload.megatron.model import MegatronModel


def _sharded_state(model: MegatronModel, *, is_loading: bool) -> dict[str, Any]:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        f"model{index}": module.sharded_state_dict(metadata=groups)  # type: ignore[operator]
        for index, module in enumerate(model.modules)
    }
    weights = {key: value for chunk in list(state.values()) for key, value in chunk.items()}
    state["optimizer"] = model.optimizer.sharded_state_dict(
        weights,
        is_loading=is_loading,
        metadata=groups | {"distrib_optim_sharding_type": "fully_reshardable"},
    )
    state["scheduler"] = model.scheduler.state_dict()
    return state


def save(model: MegatronModel, folder: Path) -> None:
    """Write a checkpoint into an existing empty folder.

    Raises:
        ResourceError: the file system is full or not writable.
    """
    with _disk_errors(folder):
        dist_checkpointing.save(_sharded_state(model, is_loading=False), str(folder))


def load(model: MegatronModel, folder: Path) -> None:
    """Read a checkpoint into the model, its optimizer and its schedule.

    Raises:
        CheckpointError: the folder is no checkpoint, is damaged, or belongs to another model. The model's values are
            undefined then: they are read in place.
    """
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no metadata.json")
    optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    for optimizer in optimizers:
        _prepare(optimizer)
    try:
        state = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{folder} cannot be read into this model; is it damaged, or of another model? {_reason(error)}"
        ) from error
    for index, module in enumerate(model.modules):
        module.load_state_dict(state[f"model{index}"])
    with torch.no_grad():
        model.optimizer.load_state_dict(state["optimizer"])
    for optimizer in optimizers:
        _separate_steps(optimizer.optimizer)
    model.scheduler.num_steps = 0  # Megatron adds the loaded number to the present one
    model.scheduler.load_state_dict(state["scheduler"])


def _prepare(optimizer: Any) -> None:
    """Megatron reads a checkpoint into state that is there, which it allocates for Transformer Engine's and Apex's
    optimizers alone. Torch's begin without any, and DistributedOptimizer does not expect Adam's `step` in it."""
    inner = optimizer.optimizer
    optimizer.init_state_fn = optimizer.init_state_fn or (lambda *_: None)
    for group in inner.param_groups:
        for weight in group["params"]:
            if isinstance(inner, torch.optim.AdamW) and not inner.state[weight]:
                inner.state[weight] = {"step": torch.tensor(0.0)} | {
                    key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")
                }
            if isinstance(inner, torch.optim.SGD) and group["momentum"]:
                inner.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
    if isinstance(optimizer, DistributedOptimizer) and isinstance(inner, torch.optim.AdamW):
        write = type(optimizer)._set_main_param_and_optimizer_states
        # The step is in the parameter groups already; here it is looked up by name (distrib_optimizer.py:1223).
        optimizer._set_main_param_and_optimizer_states = lambda weight, tensors: write(
            optimizer, weight, {**tensors, "step": None}
        )


def _separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """DistributedOptimizer gives all weights one `step`, which Adam would count up once for each of them."""
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def _reason(error: BaseException) -> str:
    """Torch's CheckpointException, which is no Exception, writes every rank's traceback; its last line says it."""
    return str(error).strip().splitlines()[-1] if isinstance(error, CheckpointException) else f"{error!r}"


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Torch's writer reports a full disk in several ways, none of which names the disk."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        free_bytes = shutil.disk_usage(folder).free if folder.exists() else 0
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or isinstance(error, OSError | CheckpointException) or free_bytes < 1 << 16:
            reason = full if full in str(error) or free_bytes < 1 << 16 else _reason(error)
            raise ResourceError(
                f"Cannot write the checkpoint {folder}: {reason} ({free_bytes >> 20} MiB free). "
                "Free some space, lower checkpointing.keep_top_k, or choose another folder with --run-dir."
            ) from error
        raise
