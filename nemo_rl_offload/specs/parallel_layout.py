"""How a model is laid out over ranks: which layers stand where, and what one rank holds of a microbatch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.pipeline_layout import KEY as STAGES
from nemo_rl_offload.specs.pipeline_layout import (
    SECTION,
    even_stages,
    layers_of_stages,
    layout_problems,
    stages_override,
)

LengthRound = int | Literal["power_of_two"]


def rounded_length(length: int, rounding: LengthRound) -> int:
    """Return the next length, in tokens, that is a multiple of a number or a power of two."""
    if rounding == "power_of_two":
        return 1 << (length - 1).bit_length()
    return -(-length // rounding) * rounding


FP8_TOKENS = {"blockwise": 128, "mxfp8": 32}
"""By recipe, what divides the tokens of a product in 8 bits: a block of scales; else `FP8_LEAST_TOKENS`.

Transformer Engine's `Float8BlockQuantizer.is_quantizable` and Megatron-Core's `get_fp8_align_size`."""
FP8_LEAST_TOKENS = 16


def fp8_tokens(recipe: str | None) -> int:
    """What divides the tokens that a layer gets on a rank; `recipe` is None without products in 8 bits."""
    return 1 if recipe is None else FP8_TOKENS.get(recipe, FP8_LEAST_TOKENS)


def width_multiple(sequence_parallel_size: int, context_parallel_size: int, fp8_recipe: str | None = None) -> int:
    """What divides the width of every microbatch, so that it does the share of each rank, too."""
    tokens = fp8_tokens(fp8_recipe)
    if context_parallel_size > 1:
        tokens = max(2, tokens)  # all others are even
    return sequence_parallel_size * context_parallel_size * tokens


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

    def padded(self, sequence: int, fp8_recipe: str | None = None) -> int:
        """The length to which a run pads rows of so many tokens, for what must divide it."""
        sizes = self.tensor if self.sequence_parallel else 1, self.context
        return rounded_length(sequence, width_multiple(*sizes, fp8_recipe))


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
            yield f"{KEYS['tensor']}: {tensor} does not divide the {what} {size}. {nearest_divisor(size, tensor)}"
    if groups % tensor and tensor % groups:
        yield f"{KEYS['tensor']}: {tensor} and the {groups} key heads do not divide. {nearest_divisor(groups, tensor)}"
    if problem := recurrent_groups_problem(shape, tensor):
        yield f"{KEYS['tensor']}: {problem}"
    if problem := recurrent_heads_problem(shape, tensor, layout.context):
        yield f"{KEYS['context']}: {problem}"
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
        yield from _stage_problems(layout, shape)
    else:
        how = {"num_layers": shape.num_layers, "num_mtp_layers": shape.num_mtp_layers, "pipeline": layout.pipeline}
        virtual = layout.virtual if layout.virtual > 1 else None
        yield from (f"{STAGES}: {problem}" for problem in layout_problems(layout.stages, **how, virtual=virtual))


NO_EXPERTS = "the model has no experts. Set it to 1."
"""Of sizes that divide them."""


def expert_tensor_problem(shape: ModelShape, num_ranks: int) -> str | None:
    """Why so many ranks cannot share each expert of a model that has some, and what they could be; None: they can."""
    if num_ranks == 1 or shape.experts is None:
        return None
    if shape.mlp_bias:
        return (
            f"{num_ranks} ranks cannot share the model's experts, which have biases: Bias in Moe is only supported "
            "when ETP==1, says Megatron-Core. Set it to 1."
        )
    if (width := shape.experts.ffn_hidden_size) % num_ranks:
        return f"{num_ranks} does not divide the experts' width {width}. {nearest_divisor(width, num_ranks)}"
    return None


GROUPED_ROW_BYTES = 16
"""Of which a row of what `torch.nn.functional.grouped_mm` multiplies is a multiple."""


def grouped_rows_problem(width: int, num_ranks: int, element_bytes: int) -> str | None:
    """The same of experts of this width in layers of torch; None: they can, or `num_ranks` does not divide it."""
    row_bytes = width // num_ranks * element_bytes
    if num_ranks == 1 or width % num_ranks or row_bytes % GROUPED_ROW_BYTES == 0:
        return None
    return (
        f"{num_ranks} ranks of an expert of width {width} have rows of {row_bytes} bytes each, "
        f"and products of groups in torch take multiples of {GROUPED_ROW_BYTES}. Lower it, or set transformer_impl: "
        "transformer_engine."
    )


def _expert_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    ranks, key = layout.expert, KEYS["expert"]
    if shape.experts is None:
        for name, number in ((key, ranks), (KEYS["expert_tensor"], layout.expert_tensor)):
            if number > 1:
                yield f"{name}: {NO_EXPERTS}"
        return
    if shape.experts.num_experts % ranks:
        num_experts = shape.experts.num_experts
        yield f"{key}: {ranks} does not divide the {num_experts} experts. {nearest_divisor(num_experts, ranks)}"
    if (problem := expert_tensor_problem(shape, layout.expert_tensor)) is not None:
        yield f"{KEYS['expert_tensor']}: {problem}"
    if layout.world % (ranks * layout.expert_tensor * layout.pipeline):
        yield (
            f"{key} x {KEYS['expert_tensor']} x {KEYS['pipeline']}: "
            f"{ranks * layout.expert_tensor * layout.pipeline} ranks do not divide the {layout.world} devices."
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "sequence_parallel: experts with tensor parallelism need it. Set it to true."


def _stage_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    key, num_layers = KEYS["pipeline"], shape.num_layers
    if layout.pipeline == 1:
        if layout.virtual > 1:
            yield f"{KEYS['virtual']}: needs {key} above 1. Raise that, or set this to null."
        return
    ends = [num for num in (layout.num_layers_first, layout.num_layers_last) if num is not None]
    middle, others = num_layers - sum(ends), layout.pipeline - len(ends)
    parts = f" with {layout.virtual} chunks each" if layout.virtual > 1 else ""
    uneven = any(num % layout.virtual for num in ends)
    if uneven or middle < others or (others and middle % (others * layout.virtual)) or (not others and middle):
        numbers = {FIRST: layout.num_layers_first, LAST: layout.num_layers_last}
        given = [key for key, number in numbers.items() if number is not None]
        yield (
            f"{key}: {num_layers} layers cannot be divided among {layout.pipeline} ranks{parts}. "
            f"{division_remedy(num_layers, layout.pipeline, layout.virtual, shape.num_mtp_layers, given)}"
        )


class Division(NamedTuple):
    """How layers are divided among pipeline ranks: an even share where nothing else is said."""

    num_layers_first: int | None = None
    num_layers_last: int | None = None
    stages: str | None = None


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def divisions(num_layers: int, pipeline: int, virtual: int = 1, num_mtp_layers: int = 0) -> list[Division]:
    """How so many layers can be divided among 2 or more ranks: evenly, or with a smaller first or last rank, or as even
    as they go. Empty where there are fewer layers than stages.

    Those by numbers of layers come first. Of all, no rank has more layers than it must, but for a chunk.
    """
    if pipeline * virtual > num_layers:
        return []
    if num_layers % (pipeline * virtual) == 0:
        return [Division()]
    share = -(-num_layers // (pipeline * virtual)) * virtual
    end = num_layers - share * (pipeline - 1)
    found = []
    if end > 0 and end % virtual == 0:
        found = [Division(num_layers_first=end), Division(num_layers_last=end)]
    return [*found, Division(stages=even_stages(num_layers, pipeline * virtual, num_mtp_layers))]


_FASTER = ". `plan --layouts` looks for faster ones, which leave the last stage room for the output layer"


def division_remedy(num_layers: int, pipeline: int, virtual: int, num_mtp_layers: int, given: Sequence[str]) -> str:
    """Overrides that divide the layers among the ranks, else what to lower; `given` are those of FIRST and LAST that
    are configured."""
    found = divisions(num_layers, pipeline, virtual, num_mtp_layers)
    if not found:
        sizes = f"{KEYS['pipeline']} x {KEYS['virtual']}" if virtual > 1 else KEYS["pipeline"]
        return f"Lower {sizes}, to {num_layers} at most."
    unset = [f"{SECTION}.{key}=null" for key in given]
    if found == [Division()]:
        return f"Set {' '.join(unset)}."
    stages = found[-1].stages
    assert stages is not None
    even = f"as even as can be: {' '.join([*unset, stages_override(stages)])}"
    if (end := found[0].num_layers_first) is None:
        return f"A{even[1:]}{_FASTER}"
    setting = " ".join([f"{SECTION}.{FIRST}={end}", *(f"{SECTION}.{key}=null" for key in given if key == LAST)])
    return f"With {setting} the others take {(num_layers - end) // (pipeline - 1)} each; {even}{_FASTER}"


def nearest_divisor(size: int, near: int) -> str:
    """A sentence with the divisor of `size` that is nearest to `near`."""
    below = [n for n in range(1, size + 1) if size % n == 0]
    return f"The nearest that does is {min(below, key=lambda n: abs(n - near))}."


def recurrent_groups_problem(shape: ModelShape, num_tensor: int) -> str | None:
    """Why tensor-parallel ranks cannot divide a model with recurrent layers; None: they can, or it has none."""
    if shape.num_mamba_groups % num_tensor:
        what = f"{shape.num_mamba_groups} groups of heads in Mamba-2 layers"
    elif shape.num_delta_heads % num_tensor:
        what = f"{shape.num_delta_heads} heads of keys in gated delta nets"
    elif shape.attention_gate and shape.num_key_value_heads % num_tensor:
        what = f"{shape.num_key_value_heads} key heads of attention, whose output has a gate"
    else:
        return None
    return f"{num_tensor} does not divide the model's {what}. Change it."


def recurrent_heads_problem(shape: ModelShape, num_tensor: int, num_context: int) -> str | None:
    """Why context-parallel ranks cannot divide a tensor-parallel rank's heads of recurrent layers; None: they can, or
    there are none. They may share a group of heads, as in Megatron's `MambaContextParallel`."""
    if shape.mamba is not None:
        all_heads, all_groups, of_groups = shape.mamba.num_heads, shape.mamba.num_groups, "groups of heads"
    elif shape.delta_net is not None:
        all_heads, all_groups, of_groups = shape.delta_net.num_value_heads, shape.num_delta_heads, "heads of keys"
    else:
        return None
    if all_groups % num_tensor:  # which another rule reports
        return None
    layers = "gated delta nets" if shape.mamba is None else "Mamba-2 layers"
    where = f"in {layers}{' on each tensor-parallel rank' if num_tensor > 1 else ''}"
    heads, groups = all_heads // num_tensor, all_groups // num_tensor
    if heads % num_context:
        return f"{num_context} does not divide the {heads} heads {where}. {nearest_divisor(heads, num_context)}"
    if groups % num_context and num_context % groups:
        return f"{num_context} ranks and the {groups} {of_groups} {where} do not divide. Change it."
    return None


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
        of_rank, rest = divmod(global_batch, num_shards)
        others = "" if rest else f", or train_micro_batch_size to {math.gcd(of_rank, micro_batch)}"
        if global_batch % micro_batch == 0:
            others += ", or change the number of workers"
        raise ConfigError(
            f"{path}: {global_batch} is not a multiple of train_micro_batch_size x data-parallel ranks = "
            f"{micro_batch} x {num_shards} = {per_pass}. Set it to "
            f"{nearest_multiple(global_batch, per_pass)}{others}."
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
