"""Weights, optimizer, learning-rate schedule and random numbers as a Megatron distributed checkpoint.

Every rank takes part in both directions. The format knows global tensors, so that another parallel layout can read it.
`fully_sharded_model_space`, Megatron's default for the distributed optimizer, fails without Transformer Engine; the
fully reshardable form is used instead. Of a model with adapters a checkpoint holds those and their optimizer's state;
the frozen weights are in the model's folder. Whole-or-absent is the caller's matter (`runs.run_directory`):
it names a folder that nobody reads yet. Sizes and checksums are those of `runs.manifest`.

Megatron prepares a save such that the files can be written in the background, and leaves the background to its caller.
Its own ways fork, or keep a process beside every rank; forking a Ray actor, with its threads, asks for deadlocks. Here
a thread writes, which lets Python's lock go while it writes and computes checksums. It needs a copy of everything
in host memory, where Megatron would give it the weights of a model on the CPU themselves.
"""

import copy
import errno
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import (
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)
from torch.distributed.checkpoint.api import CheckpointException

from nemo_rl_offload.errors import CheckpointError, ResourceError
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.checkpoint.reader import FORMAT_FILE, METADATA_FILE, PARTS, reading
from nemo_rl_offload.megatron.protocols import GradientBuffer
from nemo_rl_offload.runs.manifest import Manifest, check_contents, file_digest
from nemo_rl_offload.specs.lora import is_adapter
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory

COMPLETING_FILES = (METADATA_FILE, FORMAT_FILE)
"""What Megatron writes when every rank is done."""
MAX_REASON = 500
"""Characters of what Megatron says of an error, which may have all names of a checkpoint."""

type _Bucket = tuple[str, str, tuple[list[object], list[tuple[object, torch.Tensor]]]]
"""A file of a rank as Megatron's writer takes it: its path, its name, and what it holds, bytes and tensors."""


def _sharded_state(model: MegatronModel, *, is_loading: bool, with_optimizer: bool) -> ShardedStateDict:
    assert model.optimizer is not None, "a model that is never trained"
    assert model.scheduler is not None
    beside = {"scheduler": model.scheduler.state_dict(), "layout": _layout()}
    if not with_optimizer:
        return _sharded_weights(model) | beside
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = _sharded_weights(model)
    for optimizer in _optimizers(model):
        if isinstance(optimizer, DistributedOptimizer):
            _keep_padding(optimizer)
    state["optimizer"] = model.optimizer.sharded_state_dict(
        dict(state),  # by chunk: interleaved ones number their layers alike
        is_loading=is_loading,
        # No prefix: experts have an optimizer of their own only where their ranks are others than the dense layers'.
        metadata=groups | {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True},
    )
    return state | beside


def _sharded_weights(model: MegatronModel) -> ShardedStateDict:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    states = [module.sharded_state_dict(metadata=groups) for module in model.modules]
    if model.has_adapters:
        states = [{key: value for key, value in state.items() if is_adapter(key)} for state in states]
    return {f"model{index}": state for index, state in enumerate(states)}


def _layout() -> dict[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _random_state() -> ShardedObject:
    """This rank's random number generators. They have a meaning for the same rank of the same layout alone.

    Where layers are captured, the tracker holds generators, which are written as their states.
    """
    tracked = {name: convert_cuda_rng_state(each) for name, each in get_cuda_rng_tracker().get_states().items()}
    state = {"cpu": torch.get_rng_state(), "tracker": tracked}
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return ShardedObject("random_state", state, (dist.get_world_size(),), (dist.get_rank(),))


def _restore_random_state(state: StateDict) -> None:
    torch.set_rng_state(state["cpu"])
    tracker = get_cuda_rng_tracker()
    is_graphable = is_graph_safe_cuda_rng_tracker(tracker)
    tracked = {name: convert_cuda_rng_state(each, is_graphable) for name, each in state["tracker"].items()}
    tracker.set_states(tracked)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])


class Save:
    """A checkpoint on its way into an existing empty folder.

    The constructor plans it with the other ranks and copies this rank's part into host memory; a thread writes that
    while the model trains on, and `finish` completes the checkpoint with the other ranks.

    Raises:
        ResourceError: the file system is full or not writable (here and in `finish`).
    """

    def __init__(self, model: MegatronModel, folder: Path, *, copies: bool, with_optimizer: bool = True) -> None:
        self._folder = folder
        self._digests: Manifest = {}
        filesystem_async._results_queue = Queue()  # Megatron's own reaches other processes, by way of a third
        state = _sharded_state(model, is_loading=False, with_optimizer=with_optimizer)
        state["random_state"] = _random_state()
        with _disk_errors(folder):
            self._request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, async_strategy="mcore")
        buckets: list[_Bucket] = []
        if self._request.async_fn is not None:  # a rank of which others hold copies has nothing to write
            _, buckets, _ = self._request.async_fn_args
        staged = [
            (path, key, (data, [(item, value.to("cpu", copy=copies)) for item, value in tensors]))
            for path, key, (data, tensors) in buckets
        ]
        self._error: BaseException | None = None
        self._thread = Thread(target=self._write, args=(staged,), name="checkpoint")
        self._thread.start()

    def _write(self, buckets: list[_Bucket]) -> None:
        """Megatron's function for all buckets would tell no more of an error than its type."""
        transforms = self._request.async_fn.args[0] if buckets else []
        results = {}
        try:
            for index, bucket in enumerate(buckets):
                _, outcome = FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, None, None, True)
                if isinstance(outcome, Exception):
                    raise outcome
                results[index] = outcome
                path, name, _ = bucket
                self._digests[name] = file_digest(Path(path))
        except Exception as error:  # noqa: BLE001 - `finish` raises it
            self._error = error
        if buckets:
            self._request.async_fn_args[2].put(results)

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is on the disk, or has failed."""
        return not self._thread.is_alive()

    def finish(self) -> Manifest:
        """Wait for the thread and complete the checkpoint; returns the files that this rank has written."""
        with _disk_errors(self._folder):
            self._thread.join()
            if self._error is not None:
                raise self._error
            for finalize in self._request.finalize_fns:
                finalize()
            if dist.get_rank() == 0:
                self._digests |= {name: file_digest(self._folder / name) for name in COMPLETING_FILES}
        return self._digests


def save(model: MegatronModel, folder: Path) -> Manifest:
    """Write a checkpoint into an existing empty folder; returns the files that this rank has written.

    Raises:
        ResourceError: the file system is full or not writable.
    """
    return Save(model, folder, copies=False).finish()


def verify(folder: Path, manifest: Manifest) -> None:
    """Read every file of the checkpoint, divided among the ranks.

    Raises:
        CheckpointError: one is not what was written, or none that the manifest names.
    """
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    parts = {name for name in there if name in COMPLETING_FILES or PARTS.fullmatch(name)}
    if strange := sorted(parts - manifest.keys()):
        raise CheckpointError(f"{folder} is damaged: {strange[0]} is not named in the manifest.")
    check_contents(folder, manifest, sorted(manifest)[dist.get_rank() :: dist.get_world_size()])


def load(model: MegatronModel, folder: Path) -> None:
    """Read a checkpoint into the model, its optimizer and its schedule, and the random number generators of a layout
    like the one that wrote it. A model without an optimizer takes the weights alone.

    A checkpoint may be without the optimizer's state. The optimizer, which has taken no step, then begins with the
    weights that are read, as they are in the model; a warning says so.

    Raises:
        CheckpointError: the folder is no checkpoint, is damaged, or belongs to another model. The model's values are
            undefined then: they are read in place.
    """
    with _explained(folder), reading(folder):
        _load(model, folder)


def load_weights(model: MegatronModel, folder: Path) -> None:
    """Read the weights alone of a checkpoint into a model whose optimizer has taken no step.

    Raises:
        CheckpointError: as `load`.
    """
    with _explained(folder), reading(folder):
        _load_weights(model, dist_checkpointing.load(_sharded_weights(model), str(folder)))
        for optimizer in _optimizers(model) if model.optimizer is not None else ():
            optimizer.reload_model_params()  # main weights in float32
    model.quantize_weights()


def _load(model: MegatronModel, folder: Path) -> None:
    if model.optimizer is None or model.scheduler is None:
        _load_weights(model, dist_checkpointing.load(_sharded_weights(model), str(folder)))
        return
    scheduler = model.scheduler
    has_optimizer = "optimizer" in dist_checkpointing.load_common_state_dict(str(folder))
    if has_optimizer:
        _check_groups(model, folder)
    for optimizer in _optimizers(model) if has_optimizer else ():
        _prepare(optimizer)
    sharded = _sharded_state(model, is_loading=True, with_optimizer=has_optimizer)
    state: StateDict = dist_checkpointing.load(_with_random_state(sharded, folder), str(folder))
    _load_weights(model, state)
    if has_optimizer:
        _load_optimizer(model.optimizer, _optimizers(model), scheduler, state["optimizer"])
    else:
        _begin_anew(_optimizers(model), folder)
    scheduler.num_steps = 0  # Megatron adds the loaded number to the present one
    scheduler.load_state_dict(state["scheduler"])
    if dist.get_rank() == 0:
        _tell_other_rate(state["scheduler"], scheduler)
    if "random_state" in state:
        _restore_random_state(state["random_state"])


def _load_optimizer(
    whole: MegatronOptimizer,
    parts: list[MegatronOptimizer],
    scheduler: OptimizerParamScheduler,
    state: StateDict,
) -> None:
    _regroup(state, parts)
    _take_present_rates(state, scheduler)
    with torch.no_grad():
        whole.load_state_dict(state)
    for optimizer in parts:
        _separate_steps(optimizer.optimizer)


def _begin_anew(optimizers: list[MegatronOptimizer], folder: Path) -> None:
    """Of optimizers that have taken no step: main weights like those of the model, and no moments."""
    for optimizer in optimizers:
        optimizer.reload_model_params()
    if dist.get_rank() == 0:
        warnings.warn(
            f"{folder} is without the optimizer's state (checkpointing.save_optimizer was false): the optimizer begins "
            "anew with these weights, and the learning rate's schedule goes on.",
            stacklevel=2,
        )


def _take_present_rates(state: Any, scheduler: OptimizerParamScheduler) -> None:
    """Write the rates of the run's present configuration into the parameter groups of a checkpoint, by whose rates
    Megatron finds them, and which would go on with them whatever the schedule says."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "param_groups":
            for group in value:
                group |= {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
        else:
            _take_present_rates(value, scheduler)


def _tell_other_rate(before: StateDict, scheduler: OptimizerParamScheduler) -> None:
    """Warn where the learning rate goes on at another value than by the schedule of the checkpoint."""
    former = copy.copy(scheduler)
    for key in ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"):
        setattr(former, key, before[key])
    old, new = former.get_lr({}), scheduler.get_lr({})
    if not math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-15):
        kept = ""
        if scheduler.lr_decay_style != "constant" and former.lr_decay_steps != scheduler.lr_decay_steps:
            kept = (
                f" It decays until step {scheduler.lr_decay_steps}, and did until {former.lr_decay_steps}: "
                "policy.megatron_cfg.scheduler.lr_decay_iters keeps that."
            )
        warnings.warn(
            f"the learning rate goes on at {new:.3g} after {scheduler.num_steps} optimizer steps; by the schedule "
            f"before it would be {old:.3g}.{kept}",
            stacklevel=2,
        )


def _with_random_state(state: ShardedStateDict, folder: Path) -> ShardedStateDict:
    written = {"expert_tensor": 1} | dist_checkpointing.load_common_state_dict(str(folder))["layout"]
    return state | {"random_state": _random_state()} if written == _layout() else state


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Whatever goes wrong in Megatron's hands is the checkpoint's fault; but not a lack of device memory."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        failed = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        for each in failed:
            if isinstance(each, CheckpointError) or is_out_of_memory(each):
                raise each from error
        reason, cause = _reason(error)[:MAX_REASON], "is it damaged, or of another model?"
        if "shape mismatch" in reason:
            cause = (
                "it is of another one. Has the model in policy.model_name changed since the run began? Bring it back."
            )
        raise CheckpointError(f"{folder} cannot be read into this model; {cause} {reason}") from error


def _load_weights(model: MegatronModel, state: StateDict) -> None:
    for index, module in enumerate(model.modules):
        found = module.load_state_dict(state[f"model{index}"], strict=not model.has_adapters)
        assert not found.unexpected_keys, "adapters are named as they were saved"


def _optimizers(model: MegatronModel) -> list[MegatronOptimizer]:
    return getattr(model.optimizer, "chained_optimizers", [model.optimizer])


def _prepare(optimizer: MegatronOptimizer) -> None:
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


def _keep_padding(optimizer: DistributedOptimizer) -> None:
    """Megatron gathers the state of a buffer without the padding between its buckets (distrib_optimizer.py:1398), and
    then cuts it at places that count the padding (1794). Behind the first padded bucket, a checkpoint would hold other
    weights' state: of a tied embedding in a pipeline, for one."""
    gather = type(optimizer).get_parameter_state_dp_zero

    def gather_padded(**how: object) -> object:
        state = gather(optimizer, **how)
        for index, buffer in enumerate(optimizer.buffers) if state is not None else ():
            (tensors,) = state[index].values()
            tensors |= {key: _spread(value, buffer) for key, value in tensors.items() if torch.is_tensor(value)}
        return state

    optimizer.get_parameter_state_dp_zero = gather_padded


def _spread(tensor: torch.Tensor, buffer: GradientBuffer) -> torch.Tensor:
    """Values of a buffer's parameters, [elements], at their places in the buffer, [elements with padding]."""
    spread, start = tensor.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensor[start:end]
        start = end
    return spread


def _check_groups(model: MegatronModel, folder: Path) -> None:
    """Refuse to read one optimizer's state into two, or conversely, where it is not found by name."""
    layout = {"expert_tensor": 1} | dist_checkpointing.load_common_state_dict(str(folder))["layout"]
    had_experts_apart = layout["expert"] > 1 or layout["expert_tensor"] != layout["tensor"]
    optimizers = _optimizers(model)
    if model.config.num_moe_experts is None or had_experts_apart == (len(optimizers) > 1):
        return
    if not all(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers):
        raise CheckpointError(
            f"{folder} was written with other sizes of expert or tensor parallelism, for which an optimizer's state "
            "is divided otherwise. Take those, or policy.megatron_cfg.optimizer.use_distributed_optimizer=true in both "
            "runs."
        )


def _regroup(state: StateDict, optimizers: list[MegatronOptimizer]) -> None:
    """Give each optimizer its parameter groups where the checkpoint has one optimizer and the model two, or conversely.

    Experts have an optimizer of their own, with groups marked so, where the ranks with the same experts are others than
    those with the same dense layers. Tensors are found by name in either case; the groups hold what is the same for all
    of them, the step and the rates.
    """
    parts = [state] if len(optimizers) == 1 else [state[number] for number in range(len(optimizers))]
    if all("optimizer" in part or "param_groups" in part for part in parts):
        return
    written = [state] if "optimizer" in state else [state.pop(number) for number in (0, 1)]
    groups = [group for part in written for group in part["optimizer"]["param_groups"]]
    either = [{**group, "is_expert_parallel": flag} for group in groups for flag in (False, True)]
    for part in parts:
        part |= {key: value for key, value in written[0].items() if key not in part and not isinstance(key, int)}
        part["optimizer"] = {**written[0]["optimizer"], "param_groups": either}
    if len(parts) > 1:
        for key in [key for key in state if not isinstance(key, int)]:
            del state[key]  # Megatron takes every entry for an optimizer


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
        there = next(path for path in (folder, *folder.parents) if path.exists())  # it may have been removed meanwhile
        free_bytes = shutil.disk_usage(there).free
        full = os.strerror(errno.ENOSPC)
        if full in str(error) or isinstance(error, OSError | CheckpointException) or free_bytes < 1 << 16:
            reason = full if full in str(error) or free_bytes < 1 << 16 else _reason(error)
            raise ResourceError(
                f"Cannot write the checkpoint {folder}: {reason} ({free_bytes >> 20} MiB free). "
                "Free some space, lower checkpointing.keep_top_k, or choose another folder with --run-dir."
            ) from error
        raise
