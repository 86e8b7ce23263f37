"""Time of a layer's modules: floating-point operations over the rate reached, or bytes over the memory bandwidth.

A matrix product of [s, m] and [m, n] takes 2 s m n operations, and twice that backward (gradients of both factors).
Causal attention of s tokens over a sequence of S takes, per head, s S (d_qk + d_v) operations: two products of s x S
entries, half of them masked; backward recomputes the scores, 2.5 times that (Dao 2023, arXiv 2307.08691, section 3.1).
Recurrent layers' products (`recurrent.recurrent_flops`) are float32, and what lies between them reads and writes what
it saves. Their times are this arithmetic alone: no GPU has been measured with them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from nemo_rl_offload.planner.cost.recurrent import core_bytes, mixer_of, recurrent_flops
from nemo_rl_offload.planner.cost.storages import LayerContext, Numbers, Tokens
from nemo_rl_offload.specs.devices import Device
from nemo_rl_offload.specs.model_shape import LayerKind, ModelShape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

FLOAT32_SHARE = 1 / 16
"""Of the peak rate of bfloat16, what products of float32 have without tensor cores: 19.5 of 312 TFLOPs on an A100, 67
of 989 on an H100."""


@dataclass(frozen=True)
class ModuleCost:
    """One module of a layer for one microbatch."""

    module: str
    product_flops: float = 0.0
    attention_flops: float = 0.0
    float32_flops: float = 0.0
    """Of a recurrence's products, which have no weights."""
    traffic_bytes: float = 0.0

    def forward_ms(self, device: Device, fp8: bool) -> float:
        rate = (device.fp8_tflops if fp8 and device.fp8_tflops else device.bf16_tflops) * device.achieved
        attention_rate = device.bf16_tflops * device.achieved
        memory_rate = device.memory_gb_per_s * device.achieved_memory
        operations = self.product_flops / rate + self.attention_flops / attention_rate
        operations += self.float32_flops / (FLOAT32_SHARE * attention_rate)
        return operations / 1e9 + self.traffic_bytes / memory_rate / 1e6

    def backward_ms(self, device: Device, fp8: bool, *, is_frozen: bool = False) -> float:
        """Weights that are frozen have no gradients."""
        products = (1 if is_frozen else 2) * self.product_flops
        recurrent, traffic = 2 * self.float32_flops, 2 * self.traffic_bytes
        doubled = ModuleCost(self.module, products, 2.5 * self.attention_flops, recurrent, traffic)
        return doubled.forward_ms(device, fp8)

    @property
    def forward_flops(self) -> float:
        return self.product_flops + self.attention_flops + self.float32_flops


def layer_costs(context: LayerContext, kind: LayerKind) -> list[ModuleCost]:
    """The modules of one layer, in forward order."""
    found: list[ModuleCost] = []
    if kind.mixer is not None:
        found += _attention(context) if kind.mixer == "attention" else _recurrent(context, kind)
    if kind.mlp is not None:
        found += _experts(context) if kind.mlp == "experts" else _dense(context)
    return found


def training_flops(shape: ModelShape, lengths: Sequence[int], *, is_frozen: bool = False) -> float:
    """Floating-point operations of a forward and backward pass over sequences of these lengths, recomputation left out.

    What model FLOPs utilisation counts (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with causal attention's
    half of the scores, or what a window leaves of it: W S - W^2 / 2 pairs. A recurrence counts as products of single
    tokens, in whatever chunks it is computed: per token and head 4 D S in Mamba-2, 6 D S in a gated delta net. Each
    layer for a further token projects two hidden states to one, and has the output head's product too. Of frozen
    weights, whose adapters count for nothing, there are no gradients.
    """
    token = LayerContext(shape, ParallelLayout(), Tokens(1, 1), Numbers())
    work = [(each, layer) for layer, kind in enumerate(shape.all_kinds) for each in layer_costs(token, kind)]
    further = 4.0 * shape.hidden_size**2 * shape.num_mtp_layers
    head = 2.0 * shape.hidden_size * shape.vocab_size * (1 + shape.num_mtp_layers)
    per_token = sum(each.product_flops for each, _ in work) + further + head
    of_states = sum(each.float32_flops for each, _ in work)
    passes = 2 if is_frozen else 3
    total = (passes * per_token + 3 * of_states) * sum(lengths)
    windows = dict(enumerate(shape.windows))
    per_pair: defaultdict[int, float] = defaultdict(float)
    for each, layer in work:
        per_pair[windows.get(layer, 0)] += each.attention_flops
    for window, flops in per_pair.items():
        reach = [min(length, window or length) for length in lengths]
        total += 3 * flops * sum(part * (2 * length - part) for part, length in zip(reach, lengths, strict=True))
    return total


def _norm(context: LayerContext, module: str) -> ModuleCost:
    """Reads its input twice (residual) and writes twice; so does the norm of the same half's output, once."""
    size = context.norm_tokens * context.shape.hidden_size * context.numbers.element_bytes
    return ModuleCost(module, traffic_bytes=(6 if context.shape.output_norms else 4) * size)


def _attention(context: LayerContext) -> Iterator[ModuleCost]:
    shape, tokens, heads = context.shape, context.tokens, context.heads
    h, latent = shape.hidden_size, shape.latent_attention
    yield _norm(context, "attn_norm")
    if latent:
        down = h * ((latent.query_rank or 0) + latent.key_value_rank + latent.rope_head_dim)
        up = (latent.query_rank or h) * heads * shape.query_head_dim
        up += latent.key_value_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
        yield ModuleCost("qkv_linear", 2.0 * context.norm_tokens * down + 2.0 * tokens.count * up)
    else:
        yield ModuleCost("qkv_linear", 2.0 * tokens.count * h * context.projected_width)
    per_token = tokens.sequence * heads * (shape.query_head_dim + shape.value_head_dim)
    yield ModuleCost("core_attn", attention_flops=float(tokens.count * per_token))
    yield ModuleCost("attn_proj", 2.0 * tokens.count * heads * shape.value_head_dim * h)


def _recurrent(context: LayerContext, kind: LayerKind) -> Iterator[ModuleCost]:
    mixer, count, h = mixer_of(context, kind), context.tokens.count, context.shape.hidden_size
    yield _norm(context, "attn_norm")
    yield ModuleCost("qkv_linear", 2.0 * count * h * mixer.projected)
    yield ModuleCost(
        "core_attn", float32_flops=recurrent_flops(context, kind), traffic_bytes=2.0 * core_bytes(context, kind)
    )
    yield ModuleCost("attn_proj", 2.0 * count * mixer.gate * h)


def _mlp(
    context: LayerContext, tokens: int, outer: int, width: int, names: tuple[str, str, str]
) -> Iterator[ModuleCost]:
    """`outer`: elements of a token that it reads."""
    num_parts = 2 if context.shape.gated_mlp else 1
    yield ModuleCost(names[0], 2.0 * tokens * outer * num_parts * width)
    yield ModuleCost(names[1], traffic_bytes=(num_parts + 1.0) * tokens * width * context.numbers.element_bytes)
    yield ModuleCost(names[2], 2.0 * tokens * width * outer)


def _dense(context: LayerContext) -> Iterator[ModuleCost]:
    yield _norm(context, "mlp_norm")
    width = context.shape.ffn_hidden_size // context.layout.tensor
    names = ("mlp_fc1", "mlp_act", "mlp_fc2")
    yield from _mlp(context, context.tokens.count, context.shape.hidden_size, width, names)


def _experts(context: LayerContext) -> Iterator[ModuleCost]:
    shape, experts, size = context.shape, context.shape.experts, context.numbers.element_bytes
    assert experts is not None
    h, tokens = shape.hidden_size, context.expert_tokens
    yield _norm(context, "mlp_norm")
    outer = experts.latent_size or h
    moved = 4.0 * tokens * outer * size  # read and written, on the way there and back
    routed = experts.num_experts + 2 * (experts.latent_size or 0)  # with the projections on either side
    yield ModuleCost("router", 2.0 * context.norm_tokens * h * routed, traffic_bytes=moved)
    if experts.shared_ffn_hidden_size:
        width = experts.shared_ffn_hidden_size // context.layout.tensor
        num_products = 3.0 if shape.gated_mlp else 2.0
        yield ModuleCost("shared_experts", 2 * num_products * context.tokens.count * h * width)
    width = experts.ffn_hidden_size // context.layout.expert_tensor
    yield from _mlp(context, tokens, outer, width, ("expert_fc1", "moe_act", "expert_fc2"))


def recompute_ms(context: LayerContext, name: str, device: Device) -> float:
    """Time to compute again what one separable entry of `recompute_modules` gives up in a layer."""
    fp8 = context.numbers.fp8 is not None
    shape, latent = context.shape, context.shape.latent_attention
    if name == "layernorm":
        return ModuleCost(name, traffic_bytes=_norm(context, name).traffic_bytes / 2).forward_ms(device, fp8)
    if name in ("moe_act", "mlp_act"):
        modules = _experts(context) if name == "moe_act" else _dense(context)
        return next(work for work in modules if work.module == name).forward_ms(device, fp8)
    assert name == "mla_up_proj"
    assert latent is not None
    up = (latent.query_rank or shape.hidden_size) * context.heads * shape.query_head_dim
    up += latent.key_value_rank * context.heads * (latent.nope_head_dim + latent.value_head_dim)
    return ModuleCost(name, 2.0 * context.tokens.count * up).forward_ms(device, fp8)


_WHOLE = {
    "core_attn": ("core_attn",),
    "mlp": ("mlp_fc1", "mlp_act", "mlp_fc2"),
    "mlp_fc1": ("mlp_fc1", "mlp_act"),
    "mlp_act": ("mlp_act",),
    "moe": ("router", "shared_experts", "expert_fc1", "moe_act", "expert_fc2"),
    "shared_experts": ("shared_experts",),
}
_PART = {"layernorm": "mlp_norm", "moe_act": "moe_act", "mla_up_proj": "qkv_linear"}


def recomputed_ms(
    context: LayerContext, kind: LayerKind, recompute_modules: Collection[str], device: Device
) -> dict[str, float]:
    """Time that selective recomputation adds to the backward of each module of a layer."""
    fp8 = context.numbers.fp8 is not None
    forward = {work.module: work.forward_ms(device, fp8) for work in layer_costs(context, kind)}
    extra: dict[str, float] = {}
    for name in recompute_modules:
        if name in _WHOLE:
            extra |= {module: forward[module] for module in _WHOLE[name] if module in forward}
    latent, has_experts = context.shape.latent_attention is not None, kind.mlp == "experts"
    exists = {"layernorm": latent or has_experts, "moe_act": has_experts, "mla_up_proj": latent}
    for name in recompute_modules:
        if exists.get(name) and _PART[name] not in extra:
            num_norms = 1 + (latent and has_experts) if name == "layernorm" else 1
            extra[_PART[name]] = num_norms * recompute_ms(context, name, device)
    return extra
