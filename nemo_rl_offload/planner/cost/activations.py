"""What a transformer layer saves for its backward pass, storage by storage.

A storage is named by what it holds and knows the modules whose regions save it; it is charged once, to the first of
them that is offloaded. Below are the formulas for fused kernels (flash attention, fused norms and gated activations,
grouped products), which is what runs on a GPU; `docs/planner.md` derives them. What plain
operators on a CPU save is a table of the tests (`tests/functional/torch_activations.py`).
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

SCALED_BYTES = {"mxfp8": 1 + 1 / 32, "blockwise": 1 + 4 / 128}
"""By recipe, of an element in 8 bits with its share of a scale: a byte for 32 elements (OCP Microscaling Formats 1.0),
or a float32 for 128."""


@dataclass(frozen=True)
class Storage:
    """Memory that one layer's forward pass of one microbatch leaves for its backward pass."""

    name: str
    num_bytes: int
    num_elements: int
    """Of the largest tensor saved on it: what `min_offloaded_tensor_size` is compared with."""
    modules: tuple[str, ...] = ()
    """Modules that save it, in the order in which they are charged; none: it always stays."""
    recomputed_by: tuple[str, ...] = ()
    """The names in `recompute_modules` that would give it up."""
    live: bool = True
    """False: it comes into being only while backward recomputes, and is not offloaded then."""
    held_by: tuple[str, ...] = ()
    """Modules that save it too, before those of `modules`: one that is not offloaded keeps it on the device."""
    only_with: tuple[str, ...] = ()
    """Names in `recompute_modules` without which it does not exist; none: it always does."""
    constant: bool = False
    """The same tensor for all microbatches."""

    def charged_to(self, offloaded: Collection[str], min_elements: int = 0) -> str | None:
        """Return the module whose region copies it out; None when none does."""
        if not self.live or self.num_elements < min_elements:
            return None
        return next((module for module in self.modules if module in offloaded), None)

    def leaves(self, offloaded: Collection[str]) -> bool:
        """Whether copying it out frees device memory. The engine finds out in its first pass, and then leaves it."""
        return all(module in offloaded for module in self.held_by)


@dataclass(frozen=True)
class Tokens:
    """A rank's part of a microbatch."""

    count: int
    """Tokens per microbatch: sequences x length / context-parallel ranks."""
    sequence: int
    """Length of a whole sequence."""


@dataclass(frozen=True)
class Numbers:
    """How values are stored."""

    element_bytes: int = 2
    fp8: str | None = None
    """Recipe of 8 bits in which linears keep their inputs; None: as they are."""
    router_bytes: int = 2
    """Of a router's probability. Only plain operators save those by which they weight experts."""
    has_wide_layers: bool = False
    """Whether first and last layers keep their inputs as they are; all are counted so then, which is more."""

    def linear_input_bytes(self, num_elements: int) -> int:
        """What a linear layer keeps of an input."""
        if self.fp8 is None or self.has_wide_layers:
            return num_elements * self.element_bytes
        return round(num_elements * SCALED_BYTES.get(self.fp8, 1))


@dataclass(frozen=True)
class LayerContext:
    """Everything that a layer's activations depend on."""

    shape: ModelShape
    layout: ParallelLayout
    tokens: Tokens
    numbers: Numbers
    fused_norm_linear: bool = False
    """Transformer Engine's norm+linear in one: its norm has no region of its own, dense MLPs have none at all."""

    @property
    def norm_tokens(self) -> int:
        """Tokens of a norm's input: split by sequence parallelism."""
        return self.tokens.count // (self.layout.tensor if self.layout.sequence_parallel else 1)

    @property
    def hidden_bytes(self) -> int:
        """Of a layer's input, or its output."""
        return self.norm_tokens * self.shape.hidden_size * self.numbers.element_bytes

    @property
    def heads(self) -> int:
        return self.shape.num_attention_heads // self.layout.tensor

    @property
    def groups(self) -> int:
        """Key and value heads; fewer than ranks are replicated."""
        return max(1, self.shape.num_key_value_heads // self.layout.tensor)

    @property
    def gathers_keys(self) -> bool:
        """Whether attention keeps keys and values of whole sequences: plain torch gathers them over context-parallel
        ranks, and Transformer Engine passes them around."""
        return self.layout.context > 1 and not self.fused_norm_linear

    @property
    def key_tokens(self) -> int:
        """Tokens whose keys and values attention keeps."""
        return self.tokens.count * (self.layout.context if self.gathers_keys else 1)

    @property
    def expert_tokens(self) -> int:
        """Tokens that this rank's experts take, balanced: each rank receives as many as it sends, whatever EP is, and
        those of all ranks that share its experts."""
        experts = self.shape.experts
        assert experts is not None
        return self.norm_tokens * experts.experts_per_token * self.layout.expert_tensor


def fused_layer(context: LayerContext, has_experts: bool) -> list[Storage]:
    """The storages of one layer with fused kernels, without recomputation."""
    attention = _latent(context) if context.shape.latent_attention else _grouped_query(context)
    mlp = _experts(context) if has_experts else _dense(context)
    if not context.shape.output_norms:
        return [*attention, *mlp]
    hidden, size = context.norm_tokens * context.shape.hidden_size, context.numbers.element_bytes
    projected, made = (
        _tensor(name, hidden, size, module)
        for name, module in (("attention projection output", "attn_norm"), ("MLP output", "mlp_norm"))
    )
    return [*attention, projected, *mlp, made]


def with_recomputation(storages: Sequence[Storage], modules: Set[str]) -> list[Storage]:
    """Mark what selective recomputation of these `recompute_modules` gives up.

    What only a checkpoint saves is left out without it.
    """
    return [
        replace(storage, live=modules.isdisjoint(storage.recomputed_by))
        for storage in storages
        if not storage.only_with or not modules.isdisjoint(storage.only_with)
    ]


def _tensor(name: str, elements: int, element_bytes: int, *modules: str, by: tuple[str, ...] = ()) -> Storage:
    return Storage(name, elements * element_bytes, elements, modules, by)


def _linear_input(context: LayerContext, name: str, elements: int, *modules: str, by: tuple[str, ...] = ()) -> Storage:
    return Storage(name, context.numbers.linear_input_bytes(elements), elements, modules, by)


def _attention_output(context: LayerContext) -> Iterator[Storage]:
    """Attention saves its output and its softmax statistics; the projection reads the output a moment later."""
    count, size = context.tokens.count, context.numbers.element_bytes
    yield _tensor("softmax statistics", count * context.heads, 4, "core_attn")
    output = count * context.heads * context.shape.value_head_dim
    yield _tensor("attention output", output, size, "attn_proj")
    if context.gathers_keys:
        yield _tensor("attention output, by chunks", output, size, "core_attn")
    if context.numbers.fp8:
        yield _linear_input(context, "attention output in 8 bits", output, "attn_proj")


def _grouped_query(context: LayerContext) -> Iterator[Storage]:
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    hidden, head = context.norm_tokens * shape.hidden_size, shape.head_dim
    # The region qkv_linear is around the fused norm and linear; inside it, attn_norm is one where there is that region.
    norm = ("qkv_linear",) if context.fused_norm_linear else ("attn_norm", "qkv_linear")
    yield _tensor("layer input", hidden, size, *norm)
    yield _linear_input(context, "attention norm output", hidden, "qkv_linear")
    yield from (_copied_projection if context.fused_norm_linear else _viewed_projection)(context)
    yield _tensor("queries", count * context.heads * head, size, "core_attn")
    yield _tensor("keys", context.key_tokens * context.groups * head, size, "core_attn")
    if context.gathers_keys:
        yield _tensor("values", context.key_tokens * context.groups * head, size, "core_attn")
    yield from _attention_output(context)


def _viewed_projection(context: LayerContext) -> Iterator[Storage]:
    """Queries and keys are rotated into storages of their own; values stay views of the projection's whole output."""
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    projected = count * (context.heads + 2 * context.groups) * shape.head_dim
    both = _tensor("projected queries, keys, values", projected, size, "core_attn")
    if shape.qk_norm:
        if context.heads > context.groups > 1:  # of several groups they are copied beside each other
            queries = count * context.heads * shape.head_dim
            yield _tensor("queries before their norm", queries, size, "qkv_linear")
        both = replace(both, held_by=("qkv_linear",))
    if not context.gathers_keys:
        yield both
    elif shape.qk_norm:  # gathered values are a copy, and the norms alone read the projection's output
        yield replace(both, modules=("qkv_linear",))


def _copied_projection(context: LayerContext) -> Iterator[Storage]:
    """Transformer Engine's attention takes values whose strides are not those of the keys as a copy, and its norms take
    what is not contiguous likewise: nothing holds the projection's output, but for a checkpoint around attention."""
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    of_groups = count * context.groups * shape.head_dim
    if shape.qk_norm:
        yield _tensor("queries before their norm", count * context.heads * shape.head_dim, size, "qkv_linear")
        yield _tensor("keys before their norm", of_groups, size, "qkv_linear")
    yield _tensor("values", of_groups, size, "core_attn", by=("core_attn",))
    projected = count * context.heads * shape.head_dim + 2 * of_groups
    both = _tensor("projected queries, keys, values", projected, size, "core_attn")
    yield replace(both, only_with=("core_attn",))


def _latent(context: LayerContext) -> Iterator[Storage]:
    shape, size, latent = context.shape, context.numbers.element_bytes, context.shape.latent_attention
    assert latent is not None
    tokens, count = context.norm_tokens, context.tokens.count
    yield _tensor("layer input", tokens * shape.hidden_size, size, "attn_norm")
    yield _linear_input(
        context, "attention norm output", tokens * shape.hidden_size, "qkv_linear", by=("layernorm",)
    )  # fmt: skip
    if latent.query_rank:
        yield _tensor("compressed queries", tokens * latent.query_rank, size, "qkv_linear")
        yield _linear_input(context, "normed compressed queries", tokens * latent.query_rank, "qkv_linear")
    key_value = tokens * (latent.key_value_rank + latent.rope_head_dim)
    yield _tensor("compressed keys and values", key_value, size, "qkv_linear")
    yield _linear_input(context, "normed compressed keys and values", tokens * latent.key_value_rank, "qkv_linear")
    for name, num, width in (
        ("queries", count, shape.query_head_dim),
        ("keys", context.key_tokens, shape.query_head_dim),
        ("values", context.key_tokens, latent.value_head_dim),
    ):
        yield _tensor(name, num * context.heads * width, size, "core_attn", by=("mla_up_proj",))
    yield from _attention_output(context)


def _dense(context: LayerContext) -> Iterator[Storage]:
    shape, size = context.shape, context.numbers.element_bytes
    hidden = context.norm_tokens * shape.hidden_size
    width = context.tokens.count * shape.ffn_hidden_size // context.layout.tensor
    norm = "mlp_fc1" if context.fused_norm_linear else "mlp_norm"
    yield _tensor("MLP input", hidden, size, norm)
    whole = ("mlp", "mlp_fc1")
    yield _linear_input(context, "MLP norm output", hidden, "mlp_fc1", by=whole)
    yield _tensor("MLP activation input", 2 * width, size, "mlp_act", by=whole)
    yield _linear_input(context, "MLP activation output", width, by=(*whole, "mlp_act"))


def _experts(context: LayerContext) -> Iterator[Storage]:
    shape, size, experts = context.shape, context.numbers.element_bytes, context.shape.experts
    assert experts is not None
    hidden, tokens = context.norm_tokens * shape.hidden_size, context.expert_tokens
    width = tokens * experts.ffn_hidden_size // context.layout.expert_tensor
    yield _tensor("MLP input", hidden, size, "mlp_norm")
    yield _tensor("MLP norm output", hidden, size, by=("layernorm",))
    yield _tensor("router scores", 2 * context.norm_tokens * experts.num_experts, 4, by=("moe",))
    yield _linear_input(context, "tokens of the experts", tokens * shape.hidden_size, "expert_fc1", by=("moe",))
    yield _tensor("experts' activation input", 2 * width, size, "moe_act", by=("moe",))
    yield _linear_input(context, "experts' activation output", width, "expert_fc2", by=("moe_act", "moe"))
    if experts.shared_ffn_hidden_size:
        shared = context.tokens.count * experts.shared_ffn_hidden_size // context.layout.tensor
        by = ("shared_experts", "moe")
        yield _tensor("shared experts' activation input", 2 * shared, size, "shared_experts", by=by)
        yield _linear_input(context, "shared experts' activation output", shared, "shared_experts", by=by)


def forward_bytes(context: LayerContext, has_experts: bool) -> int:
    """The most that a layer's forward holds at a time where nothing is saved: what it is given, and what the wider of
    its halves makes of that."""
    attention = _latent(context) if context.shape.latent_attention else _grouped_query(context)
    mlp = _experts(context) if has_experts else _dense(context)
    halves = (sum(storage.num_bytes for storage in half if not storage.only_with) for half in (attention, mlp))
    return context.hidden_bytes + max(halves)


def key_value_bytes(context: LayerContext, num_layers: int) -> int:
    """Keys and values of the context's tokens, as layers keep them while they generate."""
    shape, latent = context.shape, context.shape.latent_attention
    width = context.groups * 2 * shape.head_dim
    if latent:
        width = context.heads * (shape.query_head_dim + latent.value_head_dim)
    return num_layers * context.tokens.count * width * context.numbers.element_bytes
