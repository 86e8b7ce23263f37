"""A training job as the planner sees it, from the `policy` section of a configuration."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from nemo_rl_offload.config.schema import Fp8Config, MegatronConfig, PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.planner.cost.experts import ExpertBuffers, Skew
from nemo_rl_offload.planner.cost.memory import (
    Optimizer,
    allowance_bytes,
    eight_bit_copies_bytes,
    optimizer_host_bytes,
    stage_parameters,
    trained_parameters,
)
from nemo_rl_offload.planner.cost.storages import LayerContext, Numbers, Tokens
from nemo_rl_offload.specs.activation_memory import resolve_activations
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.lora import HEAD, Adapters, parts_named
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.offload_modules import COUNTED_RECOMPUTE
from nemo_rl_offload.specs.parallel_layout import (
    KEYS,
    ParallelLayout,
    check_layout,
    num_microbatches,
    rounded_length,
    stage_layers,
)
from nemo_rl_offload.specs.recompute import RecomputeKeys, ResolvedRecompute
from nemo_rl_offload.units import GIB, MIB


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
        if self.method is not None:
            return ResolvedRecompute("full", None, self.method, self.num_layers).keys
        if not self.modules:
            return ResolvedRecompute().keys
        is_counted = not self.modules.isdisjoint(COUNTED_RECOMPUTE)
        num_layers = self.num_counted_layers if is_counted else None
        return ResolvedRecompute("selective", tuple(sorted(self.modules)), None, num_layers).keys


@dataclass(frozen=True)
class Passes:
    """What a step does beside training, on the ranks that train; 0 where it does not."""

    generation_rows: int = 0
    """Responses at a time that the training workers sample themselves."""
    generation_length: int = 0
    """Of the longest, its prompt included."""
    prompt_length: int = 0
    engine_share: float = 0.0
    """Of the device, which an engine beside training takes while it generates."""
    logprob_tokens: int = 0
    """At a time in passes for log-probabilities, the reference's too."""
    teacher_tokens: int = 0
    """At a time in passes of the teacher."""
    teachers_own_rows: bool = False
    """Whether `teacher.logprob_batch_size` says so, and not the policy's."""


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
    is_auto: bool = False
    """Whether `offload_modules` is configured as `auto`."""
    native_engine: bool = True
    """Whether this project's engine moves them, or Megatron-Core's."""
    offloads: bool = True
    """Whether something can be: Megatron-Core's engine needs Transformer Engine."""
    recomputes_mlp_parts: bool = True
    """Whether parts of dense MLPs can be recomputed: beside this project's engine, and not in 8 bits."""
    transformer_engine: bool = False
    min_elements: int = 1 << 20
    logprob_chunk_size: int | None = None
    """Positions of a row that the output head computes at a time."""
    makes_logits: bool = True
    """Whether the output head makes the logits of all tokens, or none of them."""
    fused_chunk_tokens: int | None = None
    """Tokens at a time where it makes none."""
    memory_bytes: int = 0
    """Device memory that may be used; 0: all of it."""
    host_budget: float | int = 0.5
    """A share of the host memory per device, or bytes per rank."""
    expert_buffers: ExpertBuffers = field(default_factory=ExpertBuffers)
    adapters: Adapters | None = None
    """What is trained beside frozen weights; None: all weights are trained."""
    reference_on_host: bool = False
    """Whether the start model's weights wait in host memory, for the KL penalty."""
    micro_batch_tokens: int | None = None
    """Where microbatches are numbers of tokens (packs, or samples of similar length), that number."""
    is_packed: bool = False
    """Whether the rows of a microbatch stand one behind another in one."""
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
    passes: Passes = field(default_factory=Passes)
    frees_gradients: bool = False
    """Whether they are on the device in training alone."""
    optimizer_leaves_for_logprob: bool = False
    """Whether its state and main weights wait in host memory while log-probabilities are computed."""

    @property
    def context(self) -> LayerContext:
        """What the layers' formulas take."""
        count = (self.micro_batch_tokens or self.sequence * self.micro_batch) // self.layout.context
        tokens = Tokens(count, self.sequence)
        return LayerContext(self.shape, self.layout, tokens, self.numbers, self.transformer_engine)

    def head_chunk_tokens(self, num_rows: int) -> int | None:
        """Tokens that the output head computes at a time of so many rows of the longest; None: all."""
        if not self.makes_logits and self.fused_chunk_tokens is not None:
            return self.fused_chunk_tokens
        num_rows = 1 if self.is_packed else num_rows
        return None if self.logprob_chunk_size is None else self.logprob_chunk_size * num_rows

    @property
    def head_adapter_dim(self) -> int:
        """Rank of the output layer's adapter; 0 where it has none."""
        if self.adapters is None:
            return 0
        names = parts_named(HEAD, False, self.adapters.targets, self.adapters.excluded)
        return self.adapters.dim if names else 0

    @property
    def head_name(self) -> str:
        """What its memory is called."""
        return "logits" if self.makes_logits else "output head"

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes or self.device.memory_bytes

    @property
    def auto_budget_mib(self) -> int:
        """What `auto` is told of the budget: what it leaves to torch's allocator beside the allowances, in MiB."""
        return (self.budget_bytes - sum(allowance_bytes(self.device).values())) // MIB

    @property
    def auto_budget_bytes(self) -> int:
        """The budget that `auto` is planned for, less than one MiB below the job's."""
        return self.auto_budget_mib * MIB + sum(allowance_bytes(self.device).values())

    @property
    def host_budget_bytes(self) -> int:
        """Host memory that one rank may use: no more than there is."""
        present = int(self.device.host_memory_gib * GIB)
        return min(self.host_budget, present) if isinstance(self.host_budget, int) else int(present * self.host_budget)

    @property
    def activations_host_budget_bytes(self) -> int:
        """What of it is left for activations beside what stays there."""
        return max(0, self.host_budget_bytes - max(sum(each.values()) for each in self.resident_host_bytes))

    @cached_property
    def resident_host_bytes(self) -> tuple[dict[str, int], ...]:
        """By stage, what stands in a rank's pinned memory throughout, within the budget."""
        found = []
        for rank, chunks in enumerate(stage_layers(self.layout, self.shape.num_layers)):
            parameters = stage_parameters(self.shape, self.layout, chunks, rank)
            trained = trained_parameters(self.shape, self.layout, chunks, rank, self.adapters)
            sizes = {"optimizer": optimizer_host_bytes(trained, self.layout, self.optimizer)}
            if self.reference_on_host:
                sizes["reference weights"] = parameters.total * self.numbers.element_bytes
            found.append({name: size for name, size in sizes.items() if size})
        return tuple(found)

    @property
    def teacher_bytes(self) -> tuple[int, ...]:
        """By stage, the teacher's weights, over the same ranks."""
        return self._by_stage_of_teacher(lambda *stage: stage_parameters(*stage).total * self.teacher_element_bytes)

    @property
    def teacher_copies_bytes(self) -> tuple[int, ...]:
        """By stage, what Transformer Engine keeps of the teacher's weights in 8 bits."""
        return self._by_stage_of_teacher(eight_bit_copies_bytes if self.numbers.fp8 else lambda *_: 0)

    def _by_stage_of_teacher(
        self, count: Callable[[ModelShape, ParallelLayout, Sequence[range], int], int]
    ) -> tuple[int, ...]:
        """What is counted of the teacher's layers on each stage; 0 without a teacher."""
        if self.teacher is None:
            return (0,) * self.layout.pipeline
        teacher = self.of_teacher
        return tuple(count(teacher.shape, teacher.layout, chunks, rank) for rank, chunks in enumerate(teacher.stages))

    @property
    def of_teacher(self) -> "Job":
        """The same job with the teacher in the trained model's place, for a pass through it."""
        assert self.teacher is not None, "distillation has one"
        layout = replace(self.layout, num_layers_first=None, num_layers_last=None, stages=None, virtual=1)
        numbers = replace(self.numbers, element_bytes=self.teacher_element_bytes)
        return replace(self, shape=self.teacher, layout=layout, numbers=numbers, adapters=None, teacher=None)

    @property
    def stages(self) -> Sequence[Sequence[range]]:
        """The layers of each stage's chunks."""
        return stage_layers(self.layout, self.shape.num_layers)

    @property
    def node_ranks(self) -> int:
        """Ranks that share a machine."""
        return min(self.ranks_per_node or self.device.devices_per_node, self.layout.world)


def _refuse_unplanned(megatron_cfg: MegatronConfig, shape: ModelShape, device: Device, memory_bytes: int) -> None:
    if memory_bytes > device.memory_bytes:
        raise ConfigError(
            f"--memory, gpu_memory_budget: {device.name} has {device.memory_gib:g} GiB. Give at most that."
        )
    if shape.num_mtp_layers and megatron_cfg["mtp_use_repeated_layer"] and (megatron_cfg["mtp_num_layers"] or 1) > 1:
        raise ConfigError(
            "policy.megatron_cfg.mtp_use_repeated_layer: true asks for a plan of a layer that predicts several tokens, "
            "not supported here: the planner has no costs of its repetitions. Plan with mtp_num_layers 1 or 0."
        )


def read_job(
    policy: PolicyConfig,
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

    Raises ConfigError for a layout that does not divide, naming keys and the nearest that would do, and for a repeated
    layer of multi-token prediction.
    """
    megatron_cfg = policy["megatron_cfg"]
    _refuse_unplanned(megatron_cfg, shape, device, memory_bytes)
    layout, sequence = _layout_and_row(policy, shape, world)
    samples, tokens = policy["train_micro_batch_size"], tokens_of_a_microbatch(policy)
    microbatches = cut_batch(
        policy["train_global_batch_size"], sequence, layout, rows_per_sample, samples=samples, tokens=tokens
    )
    element_bytes = 4 if policy["precision"] == "float32" else 2
    fp8 = _fp8(megatron_cfg["fp8_cfg"], device)
    activations = resolve_activations(megatron_cfg)
    is_native, transformer_impl = activations.is_native, activations.transformer_impl
    return Job(
        shape,
        layout,
        device,
        sequence,
        micro_batch=microbatches.num_rows,
        num_microbatches=microbatches.number,
        micro_batch_tokens=microbatches.num_tokens,
        is_packed=policy["sequence_packing"]["enabled"],
        offload_modules=activations.listed_modules,
        offload_fraction=megatron_cfg["activation_offload_fraction"],
        is_auto=activations.is_auto and is_native,
        native_engine=is_native,
        offloads=is_native or transformer_impl != "torch",
        recomputes_mlp_parts=is_native and fp8 is None and not megatron_cfg["use_transformer_engine_op_fuser"],
        transformer_engine=transformer_impl == "transformer_engine",
        any_implementation=transformer_impl == "auto",
        min_elements=megatron_cfg["min_offloaded_tensor_size"],
        numbers=Numbers(element_bytes, fp8, has_wide_layers=megatron_cfg["first_last_layers_bf16"]),
        optimizer=read_optimizer(policy, element_bytes),
        recompute=_recompute(activations.recompute, shape),
        adapters=read_adapters(megatron_cfg),
        logprob_chunk_size=policy["logprob_chunk_size"],
        makes_logits=not megatron_cfg["use_fused_linear_logprobs"],
        fused_chunk_tokens=megatron_cfg["fused_linear_logprobs_chunk_size"],
        memory_bytes=memory_bytes,
        expert_buffers=_expert_buffers(megatron_cfg, skew),
        rows_per_sample=rows_per_sample,
        frees_gradients=megatron_cfg["empty_unused_memory_level"] >= 1,
        optimizer_leaves_for_logprob=policy["offload_optimizer_for_logprob"],
        **other,
    )


def _layout_and_row(policy: PolicyConfig, shape: ModelShape, world: int) -> tuple[ParallelLayout, int]:
    """The layout, which fits, and the tokens of a row with its padding."""
    layout, fp8_cfg = read_layout(policy["megatron_cfg"], world), policy["megatron_cfg"]["fp8_cfg"]
    sequence = layout.padded(longest_row(policy), fp8_cfg["fp8_recipe"] if fp8_cfg["enabled"] else None)
    check_layout(layout, shape, sequence)
    return layout, sequence


class Microbatches(NamedTuple):
    """A step's, on each rank."""

    num_rows: int
    """Of each; where it is a number of tokens, how many of the longest it holds."""
    number: int
    num_tokens: int | None = None


def cut_batch(
    global_batch: int, sequence: int, layout: ParallelLayout, rows: int, *, samples: int, tokens: int | None
) -> Microbatches:
    """A batch in microbatches of `samples`, or of `tokens`. A sample has so many `rows`, which stay together.

    Of a number of tokens, as many microbatches as samples of the longest length fill, and so many more that each rank
    has as many as the others. Raises ConfigError as `num_microbatches` does.
    """
    num_interleaved = layout.pipeline if layout.virtual > 1 else 1
    if tokens is None:
        return Microbatches(samples * rows, num_microbatches(global_batch, samples, layout.data, num_interleaved))
    tokens = max(tokens, sequence * rows)
    number = math.ceil(global_batch * rows * sequence / (tokens * layout.data * num_interleaved)) * num_interleaved
    return Microbatches(tokens // sequence, number, tokens)


def longest_row(policy: PolicyConfig) -> int:
    """The longest row, in a microbatch of tokens rounded as those are."""
    length = policy["max_total_sequence_length"]
    sections = (policy["dynamic_batching"], policy["sequence_packing"])
    rounding = next((section["sequence_length_round"] for section in sections if section["enabled"]), 1)
    return rounded_length(length, rounding)


def tokens_of_a_microbatch(policy: PolicyConfig) -> int | None:
    """Where microbatches are numbers of tokens, that number."""
    sections = (policy["dynamic_batching"], policy["sequence_packing"])
    return next((section["train_mb_tokens"] for section in sections if section["enabled"]), None)


def _expert_buffers(megatron_cfg: MegatronConfig, skew: Skew | None) -> ExpertBuffers:
    return ExpertBuffers(
        megatron_cfg["moe_expert_rank_capacity_factor"],
        megatron_cfg["moe_paged_stash"],
        megatron_cfg["moe_paged_stash_buffer_size_factor_cuda"],
        megatron_cfg["moe_paged_stash_buffer_size_factor_cpu"],
        skew,
    )


def read_layout(megatron_cfg: Mapping[str, Any], world: int) -> ParallelLayout:
    """The layout of `world` ranks, which need not divide."""
    ranks = {name: megatron_cfg[key] or 1 for name, key in KEYS.items()}
    return ParallelLayout(
        world=world,
        sequence_parallel=megatron_cfg["sequence_parallel"],
        num_layers_first=megatron_cfg["num_layers_in_first_pipeline_stage"],
        num_layers_last=megatron_cfg["num_layers_in_last_pipeline_stage"],
        stages=megatron_cfg["pipeline_model_parallel_layout"],
        **ranks,
    )


def _fp8(section: Fp8Config, device: Device) -> str | None:
    if not section["enabled"]:
        return None
    if device.fp8_tflops is None:
        raise ConfigError(f"policy.megatron_cfg.fp8_cfg.enabled: {device.name} has no 8-bit formats. Set it to false.")
    return section["fp8_recipe"]


def read_optimizer(policy: PolicyConfig, element_bytes: int) -> Optimizer:
    """What an optimizer of weights of so many bytes keeps for each."""
    megatron_cfg = policy["megatron_cfg"]
    section = megatron_cfg["optimizer"]
    is_adam = section["optimizer"] == "adam"
    master = 0 if element_bytes == 4 else 4
    gradient = 4 if megatron_cfg["distributed_data_parallel_config"]["grad_reduce_in_fp32"] else element_bytes
    gradient_copy = 4 if gradient < 4 else 0
    if section["use_precision_aware_optimizer"] and policy["quant_cfg"] is None:
        # Transformer Engine keeps only the bits that bfloat16 weights lack, and reads gradients as they are.
        master, gradient_copy = 2, 0
    return Optimizer(
        distributed=section["use_distributed_optimizer"],
        gradient_bytes=gradient,
        state_bytes=8 if is_adam else 4 * (section["sgd_momentum"] > 0),
        master_bytes=master,
        gradient_copy_bytes=gradient_copy,
        could_read_gradients=bool(gradient_copy)
        and (is_adam and section["use_distributed_optimizer"] and policy["quant_cfg"] is None)
        and megatron_cfg["transformer_impl"] == "transformer_engine",
        share_on_host=section["optimizer_offload_fraction"] if section["optimizer_cpu_offload"] else 0.0,
    )


def read_adapters(megatron_cfg: MegatronConfig) -> Adapters | None:
    """`megatron_cfg.peft`; None where it is off."""
    peft = megatron_cfg["peft"]
    if not peft["enabled"]:
        return None
    targets, excluded = (tuple(peft[key]) for key in ("target_modules", "exclude_modules"))
    return Adapters(targets, excluded, peft["dim"], peft["share_expert_adapters"])


def _recompute(resolved: ResolvedRecompute, shape: ModelShape) -> Recompute:
    """What a list names for layers that this model lacks is left out: `[mlp_act, moe_act]` fits any model."""
    if resolved.granularity == "full":
        return Recompute(method=resolved.method or "uniform", num_layers=resolved.num_layers or 1)
    if resolved.granularity == "selective":
        absent = set() if shape.has_experts else {"moe", "moe_act"}
        absent |= set() if shape.has_dense_layers else {"mlp", "mlp_act"}
        return Recompute(modules=frozenset(resolved.modules) - absent, num_counted_layers=resolved.num_layers)
    return Recompute()
