"""What `transformer_impl: torch` saves on a CPU: plain operators instead of fused kernels.

The differences from the fused formulas: a norm is a chain of operators that saves three tensors, in float32 also where
the model is bfloat16; latent attention, whose values are narrower than its keys, has no fused kernel and saves float32
copies and the probabilities; an unfused gated activation saves its parts; experts' activations are weighted by a
product that saves both its factors. Sizes are those of storages: a view charges all of its storage.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from nemo_rl_offload.planner.cost.activations import with_recomputation
from nemo_rl_offload.planner.cost.recurrent import recurrent_core
from nemo_rl_offload.planner.cost.storages import KEPT, LayerContext, Storage
from nemo_rl_offload.specs.model_shape import LayerKind


def torch_layer(context: LayerContext, kind: LayerKind, recompute_modules: Collection[str] = ()) -> list[Storage]:
    """The storages of one layer, by the order of its regions.

    `recompute_modules` are those of selective recomputation.
    """
    mixer: Iterator[Storage] = iter(())
    if kind.mixer == "attention":
        mixer = (_latent if context.shape.latent_attention else _grouped_query)(context, recompute_modules)
    elif kind.mixer is not None:
        mixer = _recurrent(context, kind, recompute_modules)
    mlp: Iterator[Storage] = iter(())
    if kind.mlp is not None:
        mlp = (_experts if kind.mlp == "experts" else _dense)(context, recompute_modules)
    of_outputs: list[list[Storage]] = [[], []]
    if context.shape.output_norms:
        of_outputs = [
            list(_norm(f"{name} output norm", context, context.norm_tokens, context.shape.hidden_size, module))
            for name, module in (("attention", "attn_norm"), ("MLP", "mlp_norm"))
        ]
    first, second = of_outputs
    return [*mixer, *first, *mlp, *second]


def torch_recomputed_layers(context: LayerContext, is_mtp: bool = False) -> list[Storage]:
    """The storages of layers that are recomputed whole, as one: the first one's input.

    Multi-token prediction (`is_mtp`) has a second input, the embeddings of the tokens ahead.
    """
    names = ("layer input", "embeddings ahead")[: 1 + is_mtp]
    hidden = context.norm_tokens * context.shape.hidden_size
    return [_storage(name, hidden, _size(context), "attn_norm") for name in names]


def torch_mtp_layer(
    context: LayerContext, kind: LayerKind, recompute_modules: Collection[str] = (), *, is_first: bool
) -> list[Storage]:
    """The storages of a layer in one of multi-token prediction, maybe its first.

    That one's input is gathered over ranks, and with sequence parallelism a view of all ranks' tokens.
    """
    first, *others = torch_layer(context, kind, recompute_modules)
    if is_first and _is_hidden(first, context):
        first = replace(first, num_bytes=context.tokens.count * context.shape.hidden_size * _size(context))
    return [first, *others]


def with_received_input(storage: Storage, context: LayerContext) -> Storage:
    """A chunk's first storage where its input came from another pipeline rank: that is kept until its backward.

    A norm's copy of it in float32 is not.
    """
    return replace(storage, held_by=KEPT) if _is_hidden(storage, context) else storage


def _is_hidden(storage: Storage, context: LayerContext) -> bool:
    return storage.num_bytes == context.norm_tokens * context.shape.hidden_size * _size(context)


def _size(context: LayerContext) -> int:
    return context.numbers.element_bytes


def _storage(name: str, elements: int, element_bytes: int, *modules: str) -> Storage:
    return Storage(name, elements * element_bytes, elements, modules)


def _norm(name: str, context: LayerContext, num_rows: int, width: int, *modules: str) -> Iterator[Storage]:
    """Input (upcast where it is not float32), reciprocal root of the mean square, normed input: all float32. The
    models that norm outputs, or have an attention gate, add 1 to a norm's weight."""
    yield _storage(f"{name} input", num_rows * width, 4, *modules)
    yield _storage(f"{name} scale", num_rows, 4, *modules)
    yield _storage(f"{name} normed", num_rows * width, 4, *modules)
    if context.shape.output_norms or context.shape.attention_gate:
        yield _storage(f"{name} weight", width, _size(context), *modules)


def _layer_norm(
    context: LayerContext, name: str, recompute_modules: Collection[str], *modules: str
) -> Iterator[Storage]:
    """A norm of the hidden states that `layernorm` in `recompute_modules` recomputes."""
    if "layernorm" in recompute_modules:
        hidden = context.norm_tokens * context.shape.hidden_size
        yield _storage(f"{name} input", hidden, _size(context), *modules)
    else:
        yield from _norm(name, context, context.norm_tokens, context.shape.hidden_size, *modules)


def _flash_attention(context: LayerContext) -> Iterator[Storage]:
    """Without positions, keys are views of what was projected, and so are queries unless they are of several groups."""
    count, heads, rotates = context.tokens.count, context.heads, context.shape.rotates
    if rotates or context.copies_queries:
        yield _storage("queries", count * heads * context.shape.query_head_dim, _size(context), "core_attn")
    if rotates:
        yield _storage("keys", count * context.groups * context.shape.query_head_dim, _size(context), "core_attn")
    yield _storage("softmax statistics", count * heads, 4, "core_attn")


def _normed_input(context: LayerContext) -> Iterator[Storage]:
    """The region qkv_linear is around the fused norm and linear, and so around attn_norm."""
    hidden = context.shape.hidden_size
    yield from _norm("attention norm", context, context.norm_tokens, hidden, "attn_norm", "qkv_linear")
    yield _storage("attention norm output", context.norm_tokens * hidden, _size(context), "qkv_linear")


def _recurrent(context: LayerContext, kind: LayerKind, recompute_modules: Collection[str]) -> Iterator[Storage]:
    """The planner's own: operators between the two projections are plain ones on a GPU, too."""
    yield from _normed_input(context)
    for storage in with_recomputation(list(recurrent_core(context, kind)), set(recompute_modules)):
        if storage.live:
            yield storage


def _grouped_query(context: LayerContext, recompute_modules: Collection[str]) -> Iterator[Storage]:
    shape, count, size = context.shape, context.tokens.count, _size(context)
    heads, groups, head = context.heads, context.groups, shape.head_dim
    yield from _normed_input(context)
    # The whole output of the projection is behind the values. Without a copy to float32 the norms of queries and keys
    # read it too; of several groups, queries are copied beside each other.
    held_by: tuple[str, ...] = ()
    largest = groups if shape.rotates or context.copies_queries else heads
    if shape.qk_norm:
        queries = list(_norm("query norm", context, count * heads, head, "qkv_linear"))
        keys = list(_norm("key norm", context, count * groups, head, "qkv_linear"))
        if size == 4:
            keys, held_by = keys[1:], ("qkv_linear",)
            largest = groups if context.copies_queries else heads
            queries = queries if context.copies_queries else queries[1:]
        yield from queries
        yield from keys
    if shape.attention_gate and not context.copies_queries:
        held_by = KEPT  # the gate is a view of it, too
    if "core_attn" not in recompute_modules:
        projected = count * context.projected_width * size
        name = "projected queries, keys, values"
        yield Storage(name, projected, count * largest * head, ("core_attn",), held_by=held_by)
        yield from _flash_attention(context)
    yield _storage("attention output", count * heads * head, size, "attn_proj")


def _latent(context: LayerContext, recompute_modules: Collection[str]) -> Iterator[Storage]:
    shape, size, latent = context.shape, _size(context), context.shape.latent_attention
    assert latent is not None
    yield from _layer_norm(context, "attention norm", recompute_modules, "attn_norm")
    normed = _storage("attention norm output", context.norm_tokens * shape.hidden_size, size, "qkv_linear")
    if "mla_up_proj" in recompute_modules:
        yield normed
        yield from _checkpointed_up_projection(context)
    else:
        yield normed
        yield from _up_projection(context)
        if "core_attn" not in recompute_modules:
            yield from _attention_over_latents(context)
    output = context.tokens.count * context.heads * shape.value_head_dim
    yield _storage("attention output", output, size, "attn_proj")


def _up_projection(context: LayerContext) -> Iterator[Storage]:
    size, latent, tokens = _size(context), context.shape.latent_attention, context.norm_tokens
    assert latent is not None
    # Without a copy to float32, norms read views: of all ranks' tokens, and beside the rotary part of the keys.
    count, is_view = context.tokens.count, size == 4
    if latent.query_rank:
        whole, *others = _norm("query norm", context, tokens, latent.query_rank, "qkv_linear")
        yield replace(whole, num_bytes=count * latent.query_rank * 4) if is_view else whole
        yield from others
        yield _storage("query norm output", tokens * latent.query_rank, size, "qkv_linear")
    whole, *others = _norm("key and value norm", context, tokens, latent.key_value_rank, "qkv_linear")
    yield replace(whole, num_bytes=count * (latent.key_value_rank + latent.rope_head_dim) * 4) if is_view else whole
    yield from others
    yield _storage("key and value norm output", tokens * latent.key_value_rank, size, "qkv_linear")
    for name in ("queries' cosines", "queries' sines", "keys' cosines", "keys' sines"):
        yield _storage(name, context.tokens.sequence * latent.rope_head_dim, size, "qkv_linear")


def _checkpointed_up_projection(context: LayerContext) -> Iterator[Storage]:
    """Inputs of the projections to heads, and the angles of the positions."""
    size, latent, tokens = _size(context), context.shape.latent_attention, context.norm_tokens
    assert latent is not None
    count = context.tokens.count  # sequence parallelism takes views of all ranks' tokens
    if latent.query_rank:
        queries = count * latent.query_rank * size
        yield Storage("compressed queries", queries, tokens * latent.query_rank, ("qkv_linear",))
    rank, rotary = latent.key_value_rank, latent.rope_head_dim
    both = count * (rank + rotary) * size
    largest = rank if context.layout.sequence_parallel else max(rank, rotary)
    yield Storage("compressed keys and values", both, tokens * largest, ("qkv_linear",))
    if context.layout.sequence_parallel:  # the rotary part is gathered from the ranks
        yield _storage("rotary part of keys", count * rotary, size, "qkv_linear")
    angles = _storage("angles", context.tokens.sequence * rotary, 4, "qkv_linear")
    yield replace(angles, held_by=KEPT, constant=True)


def _attention_over_latents(context: LayerContext) -> Iterator[Storage]:
    """Without a fused kernel: scaled queries and keys, values, probabilities; all float32."""
    shape, count, heads = context.shape, context.tokens.count, context.heads
    if shape.query_head_dim == shape.value_head_dim:
        yield from _flash_attention(context)
        yield _storage("values", count * heads * shape.value_head_dim, _size(context), "core_attn")
        return
    for name in ("queries", "keys"):
        yield _storage(name, count * heads * shape.query_head_dim, 4, "core_attn")
    yield _storage("values", count * heads * shape.value_head_dim, 4, "core_attn")
    yield _storage("probabilities", count * heads * context.tokens.sequence, 4, "core_attn")


def _dense(context: LayerContext, recompute_modules: Collection[str]) -> Iterator[Storage]:
    shape, size = context.shape, _size(context)
    if not {"mlp", "mlp_fc1"}.isdisjoint(recompute_modules):
        yield _storage("MLP input", context.norm_tokens * shape.hidden_size, size, "mlp_norm")
        return
    width = context.tokens.count * shape.ffn_hidden_size // context.layout.tensor
    yield from _norm("MLP norm", context, context.norm_tokens, shape.hidden_size, "mlp_norm")
    yield _storage("MLP norm output", context.norm_tokens * shape.hidden_size, size, "mlp_fc1")
    num_parts = 2 if shape.gated_mlp else 1
    if "mlp_act" in recompute_modules:
        yield _storage("MLP activation input", num_parts * width, size, "mlp_act")
        return
    yield Storage("MLP activation input", num_parts * width * size, width, ("mlp_act",))
    if shape.gated_mlp:
        yield _storage("MLP activated gate", width, size, "mlp_act")
    yield _storage("MLP activation output", width, size)


def _experts(context: LayerContext, recompute_modules: Collection[str]) -> Iterator[Storage]:
    shape, size, experts = context.shape, _size(context), context.shape.experts
    assert experts is not None
    yield from _layer_norm(context, "MLP norm", recompute_modules, "mlp_norm")
    yield _storage("MLP norm output", context.norm_tokens * shape.hidden_size, size)
    if "moe" in recompute_modules:
        return
    if experts.shared_ffn_hidden_size and "shared_experts" not in recompute_modules:
        width = context.tokens.count * experts.shared_ffn_hidden_size // context.layout.tensor
        yield from _activation(context, "shared experts'", width, "shared_experts")
        yield _storage("shared experts' activation output", width, size, "shared_experts")
        if experts.has_shared_gate:
            yield _storage("shared experts' output", context.norm_tokens * shape.hidden_size, size, "shared_experts")
            yield _storage("gate of the shared experts", context.norm_tokens, size, "shared_experts")
    tokens = context.expert_tokens
    width = tokens * experts.ffn_hidden_size // context.layout.expert_tensor
    num_local = experts.num_experts // context.layout.expert
    yield _storage("tokens of the experts", tokens * (experts.latent_size or shape.hidden_size), size, "expert_fc1")
    yield _storage("ends of the experts", num_local, 4, "expert_fc1")
    weights = _storage("weights of the experts' tokens", tokens, max(size, context.numbers.router_bytes), "moe_act")
    if "moe_act" in recompute_modules:
        yield _storage("experts' activation input", (2 if shape.gated_mlp else 1) * width, size, "moe_act")
        yield weights
        return
    yield from _activation(context, "experts'", width, "moe_act")
    yield _storage("experts' gated", width, size, "moe_act")
    yield weights
    yield _storage("experts' activation output", width, size, "expert_fc2")
    yield _storage("ends of the experts again", num_local, 4, "expert_fc2")


def _activation(context: LayerContext, whose: str, width: int, module: str) -> Iterator[Storage]:
    """Megatron adds an offset, mostly 0, to the linear part, and so saves that part anew. Without a gate there is what
    relu gives."""
    size = _size(context)
    if not context.shape.gated_mlp:
        yield _storage(f"{whose} activation input", width, size, module)
        return
    yield Storage(f"{whose} activation input", 2 * width * size, width, (module,))
    yield _storage(f"{whose} activated gate", width, size, module)
    yield _storage(f"{whose} linear part", width, size, module)
