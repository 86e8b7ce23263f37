"""How a model is laid out over ranks: which layers stand where, and what one rank holds of a microbatch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.pipeline_layout import KEY as STAGES
from nemo_rl_offload.specs.pipeline_layout import layers_of_stages, layout_problems

LengthRound = int | Literal["power_of_two"]


def rounded_length(length: int, rounding: LengthRound) -> int:
    """Return the next length, in tokens, that is a multiple of a number or a power of two."""
    if rounding == "power_of_two":
        return 1 << (length - 1).bit_length()
    return -(-length // rounding) * rounding


def width_multiple(sequence_parallel_size: int, context_parallel_size: int) -> int:
    """What divides the width of every microbatch."""
    return sequence_parallel_size * (2 * context_parallel_size if context_parallel_size > 1 else 1)


def sequence_multiple(sequence_parallel_size: int, context_parallel_size: int) -> int:
    """What divides the length of each sequence of a pack; without context parallelism only the pack's width counts."""
    return width_multiple(sequence_parallel_size, context_parallel_size) if context_parallel_size > 1 else 1


@dataclass(frozen=True)
class Split:
    """How weights are shared within a pipeline stage: numbers of ranks."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1


WHOLE = Split()


@dataclass(frozen=True)
class ParallelLayout:
    """Numbers of ranks, by Megatron-Core's names; `world` counts all of them."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Chunks of layers on each pipeline rank; above 1 they are interleaved."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    num_layers_first: int | None = None
    """Layers of the first pipeline rank; None: an even share."""
    num_layers_last: int | None = None
    stages: str | None = None
    """`pipeline_model_parallel_layout`, which then says all about layers."""

    @property
    def split(self) -> Split:
        return Split(self.tensor, self.expert, self.expert_tensor)

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    def padded(self, sequence: int) -> int:
        """The length to which a run pads rows of so many tokens, for what must divide it."""
        return rounded_length(sequence, width_multiple(self.tensor if self.sequence_parallel else 1, self.context))


def counted_layers(is_dense: Sequence[bool], number: int | None, ends_with_loss: bool) -> set[int]:
    """Positions of the layers of a chunk in which `mlp` or `mlp_fc1` is recomputed, where that is for `number` layers.

    The last dense ones, whose tensors have the least time to leave the device and come back; None: all dense ones.
    Where the loss follows, backward comes to the chunk's last layer at once, and needs the room that its MLP takes at
    the peak in any case: that one is taken only when all others are.
    """
    dense = [position for position, each in enumerate(is_dense) if each]
    if number is None or number >= len(dense):
        return set(dense)
    if ends_with_loss and is_dense[-1]:
        dense.pop()
    return set(dense[-number:])


KEYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
"""The configuration's names."""


def check_layout(layout: ParallelLayout, shape: ModelShape, sequence: int) -> None:
    """Raise one ConfigError with everything that does not divide."""
    if problems := list(_problems(layout, shape, sequence)):
        raise ConfigError("\n".join(f"policy.megatron_cfg.{problem}" for problem in problems))


def _problems(layout: ParallelLayout, shape: ModelShape, sequence: int) -> Iterator[str]:
    tensor, groups = layout.tensor, shape.num_key_value_heads
    for size, what in ((shape.num_attention_heads, "attention heads"), (shape.ffn_hidden_size, "MLP width")):
        if size % tensor:
            yield f"{KEYS['tensor']}: {tensor} does not divide the {what} {size}. {_divisors(size, tensor)}"
    if groups % tensor and tensor % groups:
        yield f"{KEYS['tensor']}: {tensor} and the {groups} key heads do not divide. {_divisors(groups, tensor)}"
    if layout.sequence_parallel and tensor == 1:
        yield f"sequence_parallel: needs {KEYS['tensor']} above 1. Set it to false."
    yield from _expert_problems(layout, shape)
    model_ranks = tensor * layout.pipeline * layout.context
    if layout.world % model_ranks:
        yield (
            f"{KEYS['tensor']} x {KEYS['pipeline']} x {KEYS['context']}: {model_ranks} ranks do not divide the "
            f"{layout.world} devices. Change one of them, or cluster.num_nodes."
        )
    if sequence % (2 * layout.context if layout.context > 1 else 1):
        yield f"{KEYS['context']}: twice it must divide the sequence of {sequence} tokens. Change one of the two."
    if layout.sequence_parallel and sequence // layout.context % tensor:
        yield f"sequence_parallel: {KEYS['tensor']} {tensor} does not divide the {sequence // layout.context} tokens."
    if layout.stages is None:
        yield from _stage_problems(layout, shape.num_layers)
    else:
        how = {"num_layers": shape.num_layers, "num_mtp_layers": shape.num_mtp_layers, "pipeline": layout.pipeline}
        virtual = layout.virtual if layout.virtual > 1 else None
        yield from (f"{STAGES}: {problem}" for problem in layout_problems(layout.stages, **how, virtual=virtual))


def _expert_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    ranks, key = layout.expert, KEYS["expert"]
    if shape.experts is None:
        if ranks > 1:
            yield f"{key}: the model has no experts. Set it to 1."
        return
    if shape.experts.num_experts % ranks:
        num_experts = shape.experts.num_experts
        yield f"{key}: {ranks} does not divide the {num_experts} experts. {_divisors(num_experts, ranks)}"
    if shape.experts.ffn_hidden_size % layout.expert_tensor:
        yield f"{KEYS['expert_tensor']}: {layout.expert_tensor} does not divide the experts' width."
    if layout.world % (ranks * layout.expert_tensor * layout.pipeline):
        yield (
            f"{key} x {KEYS['expert_tensor']} x {KEYS['pipeline']}: "
            f"{ranks * layout.expert_tensor * layout.pipeline} ranks do not divide the {layout.world} devices."
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "sequence_parallel: experts with tensor parallelism need it. Set it to true."


def _stage_problems(layout: ParallelLayout, num_layers: int) -> Iterator[str]:
    key = KEYS["pipeline"]
    if layout.pipeline == 1:
        if layout.virtual > 1:
            yield f"{KEYS['virtual']}: needs {key} above 1. Raise that, or set this to null."
        return
    ends = [num for num in (layout.num_layers_first, layout.num_layers_last) if num is not None]
    middle, others = num_layers - sum(ends), layout.pipeline - len(ends)
    parts = f" with {layout.virtual} chunks each" if layout.virtual > 1 else ""
    uneven = any(num % layout.virtual for num in ends)
    if uneven or middle < others or (others and middle % (others * layout.virtual)) or (not others and middle):
        yield (
            f"{key}: {num_layers} layers cannot be divided among {layout.pipeline} ranks{parts}. "
            f"{_stage_fix(num_layers, layout)}"
        )


def _stage_fix(num_layers: int, layout: ParallelLayout) -> str:
    """Name sizes of the last stage, or of both ends, that leave an even share for the others."""
    share = max(layout.virtual, round(num_layers / layout.pipeline / layout.virtual) * layout.virtual)
    last = num_layers - share * (layout.pipeline - 1)
    if last > 0 and last % layout.virtual == 0:
        return f"With num_layers_in_last_pipeline_stage={last} the others take {share} each. {STAGES} takes any stages."
    fitting = [n for n in range(1, num_layers + 1) if num_layers % (n * layout.virtual) == 0]
    nearest = min(fitting, key=lambda n: abs(n - layout.pipeline), default=1)
    return f"The nearest size that divides evenly is {nearest}. {STAGES} takes any stages."


def _divisors(size: int, near: int) -> str:
    below = [n for n in range(1, size + 1) if size % n == 0]
    return f"The nearest that does is {min(below, key=lambda n: abs(n - near))}."


def stage_layers(layout: ParallelLayout, num_layers: int) -> list[list[range]]:
    """Return the layers of each chunk of each pipeline rank. The layout must have passed `check_layout`."""
    first, last, ranks = layout.num_layers_first, layout.num_layers_last, layout.pipeline
    if ranks == 1:
        return [[range(num_layers)]]
    if layout.stages is not None:
        ends = list(accumulate(layers_of_stages(layout.stages), initial=0))
        chunks = [range(begin, end) for begin, end in pairwise(ends)]
        return [chunks[rank::ranks] for rank in range(ranks)]
    others = ranks - (first is not None) - (last is not None)
    share = (num_layers - (first or 0) - (last or 0)) // others if others else 0
    sizes = [share] * ranks
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    stages: list[list[range]] = [[] for _ in range(ranks)]
    start = 0
    for _ in range(layout.virtual):
        for rank, size in enumerate(sizes):
            stages[rank].append(range(start, start + size // layout.virtual))
            start += size // layout.virtual
    return stages


def num_microbatches(global_batch: int, micro_batch: int, num_shards: int, num_interleaved: int) -> int:
    """Microbatches of a step on each rank, `num_interleaved` or a multiple of that.

    Raises ConfigError when the batch cannot be cut so, with the nearest that can.
    """
    path, per_pass = "policy.train_global_batch_size", num_shards * micro_batch
    if global_batch % per_pass:
        raise ConfigError(
            f"{path}: {global_batch} is not a multiple of train_micro_batch_size x data-parallel ranks = "
            f"{micro_batch} x {num_shards} = {per_pass}. The nearest that is: "
            f"{nearest_multiple(global_batch, per_pass)}. Or change train_micro_batch_size, or the number of workers."
        )
    number = global_batch // per_pass
    if number % num_interleaved:
        raise ConfigError(
            f"{path}: with virtual_pipeline_model_parallel_size, a step's {number} microbatches must be a "
            f"multiple of the {num_interleaved} pipeline ranks. Set it to a multiple of {per_pass * num_interleaved}."
        )
    return number


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of `of`, above 0, that is nearest to `number`."""
    return max(1, round(number / of)) * of
