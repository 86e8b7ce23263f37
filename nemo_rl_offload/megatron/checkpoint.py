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

from megatron.core import dist_checkpointing, parallel_state

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
        CheckpointError: the folder is no checkpoint, is damaged, or belongs to another model.
    """
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: it has no metadata.json")
    try:
        state = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
    except Exception as error:
        raise CheckpointError(
            f"{folder} cannot be read into this model; is it damaged, or of another model? "
            f"{type(error).__name__}: {error}"
        ) from error
    for index, module in enumerate(model.modules):
        module.load_state_dict(state[f"model{index}"])
    model.optimizer.load_state_dict(state["optimizer"])
    model.scheduler.load_state_dict(state["scheduler"])


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Torch's writer reports a full disk in several ways, none of which names the disk."""
    try:
        yield
    except Exception as error:
        free_bytes = shutil.disk_usage(folder).free if folder.exists() else 0
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or isinstance(error, OSError) or free_bytes < 1 << 16:
            reason = full if full in str(error) or free_bytes < 1 << 16 else str(error)
            raise ResourceError(
                f"Cannot write the checkpoint {folder}: {reason} ({free_bytes >> 20} MiB free). "
                "Free some space, lower checkpointing.keep_top_k, or choose another folder with --run-dir."
            ) from error
        raise
