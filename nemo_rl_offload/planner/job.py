"""A training job as the planner sees it, from the `policy` section of a configuration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.activations import LayerContext, Numbers, Tokens
from nemo_rl_offload.planner.cost.experts import ExpertBuffers, Skew
from nemo_rl_offload.planner.cost.memory import Optimizer
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.offload_modules import COUNTED_RECOMPUTE
from nemo_rl_offload.specs.parallel_layout import KEYS, ParallelLayout, check_layout, num_microbatches, rounded_length
from nemo_rl_offload.specs.recompute import recompute_settings, recomputed_modules
from nemo_rl_offload.units import GIB


class RecomputeKeys(TypedDict, total=False):
    """Values of `RECOMPUTE_KEYS`."""

    recompute_granularity: Literal["full", "selective"] | None
    recompute_modules: list[str] | None
    recompute_method: str | None
    recompute_num_layers: int | None


@dataclass(frozen=True)
class Recompute:
    """What backward computes again: `modules` of every layer, or whole layers."""

    modules: frozenset[str] = frozenset()
    method: str | None = None
    """None: no whole layers; uniform: all, in groups of `num_layers`; block: the first `num_layers` of each chunk."""
    num_layers: int = 1
    num_counted_layers: int | None = None
    """Of `modules`, `mlp` and `mlp_fc1` are for so many layers of each chunk (`counted_layers`); None: for all."""

    def of_layer(self, is_counted: bool) -> frozenset[str]:
        """The `modules` that a layer recomputes, which is one of the counted ones or none."""
        return self.modules if is_counted or self.num_counted_layers is None else self.modules - set(COUNTED_RECOMPUTE)

    @property
    def keys(self) -> RecomputeKeys:
        """Values of the configuration's keys that say it."""
        keys: RecomputeKeys = {
            "recompute_granularity": None,
            "recompute_modules": None,
            "recompute_method": None,
            "recompute_num_layers": None,
        }
        if self.method is not None:
            keys |= {
                "recompute_granularity": "full",
                "recompute_method": self.method,
                "recompute_num_layers": self.num_layers,
            }
        elif self.modules:
            keys |= {"recompute_granularity": "selective", "recompute_modules": sorted(self.modules)}
            if not self.modules.isdisjoint(COUNTED_RECOMPUTE):
                keys["recompute_num_layers"] = self.num_counted_layers
        return keys


@dataclass(frozen=True)
class Job:
    """Everything that memory and time depend on."""

    shape: ModelShape
    layout: ParallelLayout
    device: Device
    sequence: int
    micro_batch: int
    """Rows of a microbatch; where it is a number of tokens, how many of the longest it holds."""
    num_microbatches: int
    numbers: Numbers = field(default_factory=Numbers)
    optimizer: Optimizer = field(default_factory=Optimizer)
    recompute: Recompute = field(default_factory=Recompute)
    offload_modules: tuple[str, ...] = ()
    """As configured; empty also for `auto`."""
    offload_fraction: float = 1.0
    """Of the groups of those, the earliest of each forward; as configured."""
    native_engine: bool = True
    """Whether this project's engine moves them, or Megatron-Core's."""
    offloads: bool = True
    """Whether something can be: Megatron-Core's engine needs Transformer Engine."""
    recomputes_mlp_parts: bool = True
    """Whether parts of dense MLPs can be recomputed: beside this project's engine, and not in 8 bits."""
    transformer_engine: bool = False
    min_elements: int = 1 << 20
    logprob_chunk_size: int | None = None
    memory_bytes: int = 0
    """Device memory that may be used; 0: all of it."""
    host_budget: float | int = 0.5
    """A share of the host memory per device, or bytes per rank."""
    expert_buffers: ExpertBuffers = field(default_factory=ExpertBuffers)
    reference_on_host: bool = False
    """Whether the start model's weights wait in host memory, for the KL penalty."""
    micro_batch_tokens: int | None = None
    """Where microbatches are numbers of tokens (packs, or samples of similar length), that number."""
    is_packed: bool = False
    """Whether the rows of a microbatch stand one behind another in one."""
    least_sequence: int = 1
    """The shortest `sequence` that prompts and responses fit into."""
    teacher: ModelShape | None = None
    """The model that distillation keeps beside the trained one."""
    teacher_element_bytes: int = 2
    ranks_per_node: int | None = None
    """None: as many as the device's machines have."""
    any_implementation: bool = False
    """Whether the run chooses between layers of plain torch and Transformer Engine's: planned as torch's, with modules
    that both have."""
    rows_per_sample: int = 1
    """Two where a sample is a pair, as in DPO: `train_micro_batch_size` counts samples."""

    @property
    def context(self) -> LayerContext:
        """What the layers' formulas take."""
        count = (self.micro_batch_tokens or self.sequence * self.micro_batch) // self.layout.context
        tokens = Tokens(count, self.sequence)
        return LayerContext(self.shape, self.layout, tokens, self.numbers, self.transformer_engine)

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes or self.device.memory_bytes

    @property
    def host_budget_bytes(self) -> int:
        """Host memory that one rank may use for activations."""
        if isinstance(self.host_budget, int):
            return self.host_budget
        return int(self.device.host_memory_gib * GIB * self.host_budget)

    @property
    def node_ranks(self) -> int:
        """Ranks that share a machine."""
        return min(self.ranks_per_node or self.device.devices_per_node, self.layout.world)


def read_job(
    policy: Mapping[str, Any],
    shape: ModelShape,
    device: Device,
    world: int,
    memory_bytes: int = 0,
    skew: Skew | None = None,
    rows_per_sample: int = 1,
    **other: Any,
) -> Job:
    """Read a checked `policy` section. `world` counts the devices; `other` are further fields of Job.

    `skew` is what the experts needed elsewhere; `rows_per_sample` is the loss function's.

    Raises ConfigError for a layout that does not divide, naming keys and the nearest that would do.
    """
    cfg = policy["megatron_cfg"]
    if memory_bytes > device.memory_bytes:
        raise ConfigError(
            f"--memory, gpu_memory_budget: {device.name} has {device.memory_gib:g} GiB. Give at most that."
        )
    layout = _layout(cfg, world)
    sequence = layout.padded(_longest(policy))
    check_layout(layout, shape, sequence)
    microbatches = _microbatches(policy, sequence, layout, rows_per_sample)
    element_bytes = 4 if policy["precision"] == "float32" else 2
    fp8 = _fp8(cfg["model_overrides"], device)
    return Job(
        shape,
        layout,
        device,
        sequence,
        **microbatches,
        **_layers(cfg, fp8),
        numbers=Numbers(element_bytes, fp8),
        optimizer=_optimizer(cfg, element_bytes),
        recompute=_recompute(cfg),
        logprob_chunk_size=policy["logprob_chunk_size"],
        memory_bytes=memory_bytes,
        expert_buffers=_expert_buffers(cfg, skew),
        rows_per_sample=rows_per_sample,
        **other,
    )


def _layers(cfg: Mapping[str, Any], fp8: str | None) -> dict[str, Any]:
    """A Job's fields on the layers' implementation, and on what offloads of them."""
    modules, is_native = cfg["offload_modules"], cfg["activation_offload"]["engine"] == "native"
    listed = cfg["fine_grained_activation_offloading"] and isinstance(modules, list)
    return {
        "offload_modules": tuple(modules) if listed else (),
        "offload_fraction": cfg["activation_offload_fraction"],
        "native_engine": is_native,
        "offloads": is_native or cfg["transformer_impl"] != "torch",
        "recomputes_mlp_parts": is_native and fp8 is None and not cfg["use_transformer_engine_op_fuser"],
        "transformer_engine": cfg["transformer_impl"] == "transformer_engine",
        "any_implementation": cfg["transformer_impl"] == "auto",
        "min_elements": cfg["min_offloaded_tensor_size"],
    }


def _microbatches(policy: Mapping[str, Any], sequence: int, layout: ParallelLayout, rows: int) -> dict[str, Any]:
    """A Job's fields on microbatches. A sample has so many `rows`, which stay together.

    Of a number of tokens, as many microbatches as samples of the longest length fill, and so many more that each rank
    has as many as the others.
    """
    tokens, is_packed = _tokens_of_a_microbatch(policy), policy["sequence_packing"]["enabled"]
    batch, num_interleaved = policy["train_global_batch_size"], layout.pipeline if layout.virtual > 1 else 1
    if tokens is None:
        size: int = policy["train_micro_batch_size"]
        number = num_microbatches(batch, size, layout.data, num_interleaved)
        return {"micro_batch": size * rows, "num_microbatches": number}
    tokens = max(tokens, sequence * rows)
    number = math.ceil(batch * rows * sequence / (tokens * layout.data * num_interleaved)) * num_interleaved
    sizes = {"micro_batch": tokens // sequence, "num_microbatches": number, "micro_batch_tokens": tokens}
    return {**sizes, "is_packed": is_packed}


def _longest(policy: Mapping[str, Any]) -> int:
    """The longest row, in a microbatch of tokens rounded as those are."""
    length: int = policy["max_total_sequence_length"]
    sections = (policy["dynamic_batching"], policy["sequence_packing"])
    rounding = next((section["sequence_length_round"] for section in sections if section["enabled"]), 1)
    return rounded_length(length, rounding)


def _tokens_of_a_microbatch(policy: Mapping[str, Any]) -> int | None:
    """Where microbatches are numbers of tokens, that number."""
    sections = (policy["dynamic_batching"], policy["sequence_packing"])
    return next((section["train_mb_tokens"] for section in sections if section["enabled"]), None)


def _expert_buffers(cfg: Mapping[str, Any], skew: Skew | None) -> ExpertBuffers:
    return ExpertBuffers(
        cfg["moe_expert_rank_capacity_factor"],
        cfg["moe_paged_stash"],
        cfg["moe_paged_stash_buffer_size_factor_cuda"],
        cfg["moe_paged_stash_buffer_size_factor_cpu"],
        skew,
    )


def _layout(cfg: Mapping[str, Any], world: int) -> ParallelLayout:
    ranks = {name: cfg[key] or 1 for name, key in KEYS.items()}
    return ParallelLayout(
        world=world,
        sequence_parallel=cfg["sequence_parallel"],
        num_layers_first=cfg["num_layers_in_first_pipeline_stage"],
        num_layers_last=cfg["num_layers_in_last_pipeline_stage"],
        **ranks,
    )


def _fp8(overrides: Mapping[str, Any], device: Device) -> str | None:
    """`model_overrides` hold Megatron's own `fp8` (hybrid or e4m3) and `fp8_recipe`."""
    if not overrides.get("fp8"):
        return None
    if device.fp8_tflops is None:
        raise ConfigError(f"policy.megatron_cfg.model_overrides.fp8: {device.name} has no 8-bit formats. Take it out.")
    return "mxfp8" if overrides.get("fp8_recipe") == "mxfp8" else "fp8"


def _optimizer(cfg: Mapping[str, Any], element_bytes: int) -> Optimizer:
    section = cfg["optimizer"]
    is_adam = section["optimizer"] == "adam"
    master = 0 if element_bytes == 4 else 4
    if section["use_precision_aware_optimizer"]:
        master = 2  # Transformer Engine keeps only the bits that bfloat16 weights lack
    return Optimizer(
        distributed=section["use_distributed_optimizer"],
        gradient_bytes=4 if cfg["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element_bytes,
        state_bytes=8 if is_adam else 4 * (section["sgd_momentum"] > 0),
        master_bytes=master,
        share_on_host=section["optimizer_offload_fraction"] if section["optimizer_cpu_offload"] else 0.0,
    )


def _recompute(cfg: Mapping[str, Any]) -> Recompute:
    settings = recompute_settings(cfg)
    num_layers = settings["recompute_num_layers"]
    if settings["recompute_granularity"] == "full":
        return Recompute(method=settings["recompute_method"] or "uniform", num_layers=num_layers or 1)
    if settings["recompute_granularity"] == "selective":
        return Recompute(modules=frozenset(recomputed_modules(settings)), num_counted_layers=num_layers)
    return Recompute()
