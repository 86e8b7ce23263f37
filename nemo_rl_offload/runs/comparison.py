"""How two configurations of a run compare: what a run that goes on may have otherwise, and how the rest is told.

Some keys say by what means a run computes: with others it computes the same. Some can be decided anew at any step:
rates, how and when is validated, saved and logged, how long the run is. All others say what is learned from what; with
others it is another run, which is refused by the keys' names. Adam's decays are among these, for they come from the
checkpoint with the state that they made. So is the global batch, by which the place in given data is counted.
"""

import json
import re
from collections.abc import Mapping

from nemo_rl_offload.config.full_schema import full_schema
from nemo_rl_offload.config.rules.megatron import EARLIER_OVERRIDES
from nemo_rl_offload.config.types import defaults_of

_LAYOUT_AND_MEMORY = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size sequence_parallel num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage fine_grained_activation_offloading offload_modules activation_offload
    min_offloaded_tensor_size activation_offload_fraction delta_offload_bytes_across_pp_ranks
    fine_grained_offloading_max_inflight_offloads activation_checkpointing recompute_granularity recompute_modules
    recompute_method recompute_num_layers empty_unused_memory_level cpu_affinity env_vars use_fused_linear_logprobs
    fused_linear_logprobs_chunk_size pipeline_model_parallel_layout optimizer.optimizer_cpu_offload
    optimizer.optimizer_offload_fraction moe_token_dispatcher_type moe_flex_dispatcher_backend
"""
MEANS = (
    *("cluster", "fault_tolerance", "logger", "policy.generation.colocated", "policy.logprob_chunk_size"),
    "policy.offload_optimizer_for_logprob",
    *(f"policy.megatron_cfg.{key}" for key in _LAYOUT_AND_MEMORY.split()),
    *(f"checkpointing.{key}" for key in ("checkpoint_dir", "save_period", "keep_top_k", "save_optimizer", "is_async")),
    *("checkpointing.checkpoint_must_save_by", "env.nemo_gym.python"),
)
"""Keys that say by what means a run computes, not what: a run may go on with others."""
DECIDED_ANEW = (
    *(f"policy.megatron_cfg.optimizer.{key}" for key in ("lr", "min_lr", "weight_decay", "clip_grad")),
    *("policy.megatron_cfg.scheduler", "policy.dynamic_batching", "policy.sequence_packing", "checkpointing.enabled"),
    *(f"policy.{key}" for key in ("train_micro_batch_size", "logprob_batch_size", "generation_batch_size")),
    "policy.generation.vllm_cfg.gpu_memory_utilization",
    *(f"policy.generation.val_{key}" for key in ("temperature", "top_p", "top_k")),
)
"""Keys that a user may change while a run goes on, if asked for by the run's folder; and those below."""
OF_THE_ALGORITHM = (
    *("val_period", "val_at_start", "val_at_end", "max_val_samples", "val_batch_size"),
    *("val_num_generations_per_prompt", "stop_at_validation_metric", "stop_at_validation_threshold"),
)
"""The same in the section of the run's algorithm."""
NUM_SHOWN = 3
"""Of the keys in which two configurations differ."""


def may_change(path: str, algorithm: object, *, by_request: bool) -> bool:
    """Whether a run that goes on may have another value of a key."""
    allowed = MEANS
    if by_request:
        allowed += (*DECIDED_ANEW, *(f"{algorithm}.{key}" for key in OF_THE_ALGORITHM))
    return any(f"{path}.".startswith(f"{each}.") for each in allowed)


def other_length(there: Mapping[str, object], here: Mapping[str, object], last_step: int) -> dict[str, object]:
    """Keys of the algorithm's length that differ, with their new values: at least as many steps as were taken, or more
    epochs. Both are values by their paths."""
    num_steps, num_epochs = (f"{here.get('algorithm')}.max_num_{unit}" for unit in ("steps", "epochs"))
    found: dict[str, object] = {}
    new, old = here.get(num_steps), there.get(num_steps)
    if isinstance(new, int) and new != old and new >= last_step:
        found[num_steps] = new
    new, old = here.get(num_epochs), there.get(num_epochs)
    if isinstance(old, int) and (new is None or (isinstance(new, int) and new > old)):
        found[num_epochs] = new
    return found


def leaves(node: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Values by their paths."""
    found: dict[str, object] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found


class Differences(dict[str, tuple[str, str]]):
    """Keys by their paths, each with what it is there and here, as text."""

    @property
    def told(self) -> str:
        """The first of them as one line; empty where there is none."""
        shown = [f"{path} is {there} there, {here} here" for path, (there, here) in self.items()]
        more = [f"and {len(shown) - NUM_SHOWN} more"] if len(shown) > NUM_SHOWN else []
        return "; ".join([*shown[:NUM_SHOWN], *more])


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> Differences:
    """What a run there has otherwise, of values by their paths.

    A key that came with a later version than the run's had its default there.
    """
    there, here = _by_their_keys(there), _by_their_keys(here)
    defaults = {path: value for path, value in leaves(defaults_of(full_schema())).items() if path in here}
    known = {**defaults, **there}
    there = {path: _written_out(value, known) for path, value in defaults.items()} | {**there}
    paths = [path for path in {**here, **there} if (path in here) != (path in there) or here[path] != there[path]]
    return Differences((path, (_shown(there, path), _shown(here, path))) for path in paths)


def _by_their_keys(values: Mapping[str, object]) -> dict[str, object]:
    """Fields of Megatron-Core that an earlier version had no keys for, under those that they have by now."""
    section = "policy.megatron_cfg"
    earlier = {f"{section}.model_overrides.{key}": f"{section}.{key}" for key in EARLIER_OVERRIDES}
    moved = {key: values[path] for path, key in earlier.items() if path in values}
    return {path: value for path, value in values.items() if path not in earlier} | moved


def _written_out(default: object, values: Mapping[str, object]) -> object:
    """A default that is another key's value (`${policy.precision}`) as that."""
    same = re.fullmatch(r"\$\{([\w.]+)\}", default) if isinstance(default, str) else None
    return values.get(same[1], default) if same else default


def _shown(values: Mapping[str, object], path: str) -> str:
    return json.dumps(values[path], default=str) if path in values else "absent"
