"""What a transformer layer saves for its backward pass, storage by storage.

Below are the formulas for fused kernels (flash attention, fused norms and gated activations,
grouped products), which is what runs on a GPU; `docs/planner.md` derives them. What plain
operators on a CPU save is a table of the tests (`tests/functional/torch_activations.py`).
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

from nemo_rl_offload.planner.cost.recurrent import kept_bytes, recurrent_core
from nemo_rl_offload.planner.cost.storages import KEPT, LayerContext, Storage, linear_input, tensor
from nemo_rl_offload.specs.model_shape import LayerKind


def fused_layer(context: LayerContext, kind: LayerKind) -> list[Storage]:
    """The storages of one layer with fused kernels, without recomputation."""
    mixer, mlp = _mixer(context, kind), _mlp(context, kind)
    if not context.shape.output_norms:
        return [*mixer, *mlp]
    hidden, size = context.norm_tokens * context.shape.hidden_size, context.numbers.element_bytes
    projected, made = (
        tensor(name, hidden, size, module)
        for name, module in (("attention projection output", "attn_norm"), ("MLP output", "mlp_norm"))
    )
    return [*mixer, projected, *mlp, made]


def _mixer(context: LayerContext, kind: LayerKind) -> Iterator[Storage]:
    if kind.mixer == "attention":
        return _latent(context) if context.shape.latent_attention else _grouped_query(context)
    return iter(()) if kind.mixer is None else _recurrent(context, kind)


def _mlp(context: LayerContext, kind: LayerKind) -> Iterator[Storage]:
    if kind.mlp is None:
        return iter(())
    return _experts(context) if kind.mlp == "experts" else _dense(context)


def with_recomputation(storages: Sequence[Storage], modules: Set[str]) -> list[Storage]:
    """Mark what selective recomputation of these `recompute_modules` gives up.

    What only a checkpoint saves is left out without it.
    """
    return [
        replace(storage, live=modules.isdisjoint(storage.recomputed_by))
        for storage in storages
        if not storage.only_with or not modules.isdisjoint(storage.only_with)
    ]


def _attention_output(context: LayerContext) -> Iterator[Storage]:
    """Attention saves its output and its softmax statistics; the projection reads the output a moment later."""
    count, size = context.tokens.count, context.numbers.element_bytes
    yield tensor("softmax statistics", count * context.heads, 4, "core_attn")
    output = count * context.heads * context.shape.value_head_dim
    if context.shape.attention_gate:  # between the two regions
        yield tensor("attention output", output, size)
        yield tensor("attention gate", output, 4)
        yield tensor("gated attention output", output, size, "attn_proj")
    else:
        yield tensor("attention output", output, size, "attn_proj")
    if context.gathers_keys:
        yield tensor("attention output, by chunks", output, size, "core_attn")
    if context.numbers.fp8:
        yield linear_input(context, "attention output in 8 bits", output, "attn_proj")


def _grouped_query(context: LayerContext) -> Iterator[Storage]:
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    head = shape.head_dim
    yield from _normed_input(context)
    yield from (_copied_projection if context.fused_norm_linear else _viewed_projection)(context)
    if shape.rotates or context.copies_queries:
        yield tensor("queries", count * context.heads * head, size, "core_attn")
    if shape.rotates or context.gathers_keys:
        yield tensor("keys", context.key_tokens * context.groups * head, size, "core_attn")
    if context.gathers_keys:
        yield tensor("values", context.key_tokens * context.groups * head, size, "core_attn")
    yield from _attention_output(context)


def _normed_input(context: LayerContext) -> Iterator[Storage]:
    """Of a norm and the linear behind it, around which `qkv_linear` is; inside it, `attn_norm` is a region where the
    norm is a module's part of its own."""
    hidden, size = context.norm_tokens * context.shape.hidden_size, context.numbers.element_bytes
    norm = ("qkv_linear",) if context.fused_norm_linear else ("attn_norm", "qkv_linear")
    yield tensor("layer input", hidden, size, *norm)
    yield linear_input(context, "attention norm output", hidden, "qkv_linear")


def _recurrent(context: LayerContext, kind: LayerKind) -> Iterator[Storage]:
    yield from _normed_input(context)
    yield from recurrent_core(context, kind)


def _viewed_projection(context: LayerContext) -> Iterator[Storage]:
    """Queries and keys are rotated into storages of their own; values stay views of the projection's whole output."""
    shape, count, size = context.shape, context.tokens.count, context.numbers.element_bytes
    projected = count * context.projected_width
    both = tensor("projected queries, keys, values", projected, size, "core_attn")
    if shape.qk_norm:
        if context.copies_queries:
            queries = count * context.heads * shape.head_dim
            yield tensor("queries before their norm", queries, size, "qkv_linear")
        both = replace(both, held_by=("qkv_linear",))
    if shape.attention_gate and not context.copies_queries:  # the gate is needed behind the region
        both = replace(both, held_by=KEPT)
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
        yield tensor("queries before their norm", count * context.heads * shape.head_dim, size, "qkv_linear")
        yield tensor("keys before their norm", of_groups, size, "qkv_linear")
    yield tensor("values", of_groups, size, "core_attn", by=("core_attn",))
    projected = count * context.heads * shape.head_dim + 2 * of_groups
    both = tensor("projected queries, keys, values", projected, size, "core_attn")
    yield replace(both, only_with=("core_attn",))


def _latent(context: LayerContext) -> Iterator[Storage]:
    shape, size, latent = context.shape, context.numbers.element_bytes, context.shape.latent_attention
    assert latent is not None
    tokens, count = context.norm_tokens, context.tokens.count
    yield tensor("layer input", tokens * shape.hidden_size, size, "attn_norm")
    yield linear_input(
        context, "attention norm output", tokens * shape.hidden_size, "qkv_linear", by=("layernorm",)
    )  # fmt: skip
    if latent.query_rank:
        yield tensor("compressed queries", tokens * latent.query_rank, size, "qkv_linear")
        yield linear_input(context, "normed compressed queries", tokens * latent.query_rank, "qkv_linear")
    key_value = tokens * (latent.key_value_rank + latent.rope_head_dim)
    yield tensor("compressed keys and values", key_value, size, "qkv_linear")
    yield linear_input(context, "normed compressed keys and values", tokens * latent.key_value_rank, "qkv_linear")
    for name, num, width in (
        ("queries", count, shape.query_head_dim),
        ("keys", context.key_tokens, shape.query_head_dim),
        ("values", context.key_tokens, latent.value_head_dim),
    ):
        yield tensor(name, num * context.heads * width, size, "core_attn", by=("mla_up_proj",))
    yield from _attention_output(context)


def _dense(context: LayerContext) -> Iterator[Storage]:
    shape, size = context.shape, context.numbers.element_bytes
    hidden = context.norm_tokens * shape.hidden_size
    width = context.tokens.count * shape.ffn_hidden_size // context.layout.tensor
    norm = "mlp_fc1" if context.fused_norm_linear else "mlp_norm"
    yield tensor("MLP input", hidden, size, norm)
    whole = ("mlp", "mlp_fc1")
    yield linear_input(context, "MLP norm output", hidden, "mlp_fc1", by=whole)
    yield tensor("MLP activation input", (2 if shape.gated_mlp else 1) * width, size, "mlp_act", by=whole)
    yield linear_input(context, "MLP activation output", width, by=(*whole, "mlp_act"))


def _experts(context: LayerContext) -> Iterator[Storage]:
    shape, size, experts = context.shape, context.numbers.element_bytes, context.shape.experts
    assert experts is not None
    hidden, tokens = context.norm_tokens * shape.hidden_size, context.expert_tokens
    width = tokens * experts.ffn_hidden_size // context.layout.expert_tensor
    yield tensor("MLP input", hidden, size, "mlp_norm")
    yield tensor("MLP norm output", hidden, size, by=("layernorm",))
    yield tensor("router scores", 2 * context.norm_tokens * experts.num_experts, 4, by=("moe",))
    outer, num_parts = experts.latent_size or shape.hidden_size, 2 if shape.gated_mlp else 1
    if experts.latent_size:
        latent = context.norm_tokens * experts.latent_size
        yield linear_input(context, "experts' outputs before their projection", latent, by=("moe",))
    yield linear_input(context, "tokens of the experts", tokens * outer, "expert_fc1", by=("moe",))
    yield tensor("experts' activation input", num_parts * width, size, "moe_act", by=("moe",))
    if not shape.gated_mlp:  # what is weighted by the router's probabilities, for which no kernel is fused
        yield tensor("experts' activated", width, size, "moe_act", by=("moe_act", "moe"))
    yield linear_input(context, "experts' activation output", width, "expert_fc2", by=("moe_act", "moe"))
    if experts.shared_ffn_hidden_size:
        shared = context.tokens.count * experts.shared_ffn_hidden_size // context.layout.tensor
        by = ("shared_experts", "moe")
        yield tensor("shared experts' activation input", num_parts * shared, size, "shared_experts", by=by)
        yield linear_input(context, "shared experts' activation output", shared, "shared_experts", by=by)
        if experts.has_shared_gate:
            yield tensor("shared experts' output", hidden, size, "shared_experts", by=by)


def forward_bytes(context: LayerContext, kind: LayerKind) -> int:
    """The most that a layer's forward holds at a time where nothing is saved: what it is given, and what the wider of
    its halves makes of that."""
    halves = (_mixer(context, kind), _mlp(context, kind))
    sizes = (sum(storage.num_bytes for storage in half if not storage.only_with) for half in halves)
    return context.hidden_bytes + max(sizes)


def generation_bytes(context: LayerContext, kinds: Iterable[LayerKind]) -> dict[str, int]:
    """What these layers keep of the context's tokens while they generate: keys and values, or a state of each row."""
    shape, latent = context.shape, context.shape.latent_attention
    width = context.groups * 2 * shape.head_dim
    if latent:
        width = context.heads * (shape.query_head_dim + latent.value_head_dim)
    sizes = {"keys and values": 0, "states": 0}
    for kind in kinds:
        if kind.mixer == "attention":
            sizes["keys and values"] += context.tokens.count * width * context.numbers.element_bytes
        elif kind.mixer is not None:
            sizes["states"] += kept_bytes(context, kind)
    return {name: size for name, size in sizes.items() if size}
