"""Parameters of a model's parts, on one rank of a parallel layout; with one rank, of the whole model."""

from dataclasses import dataclass

from nemo_rl_offload.specs.model_shape import LayerKind, ModelShape
from nemo_rl_offload.specs.parallel_layout import WHOLE, Split


@dataclass(frozen=True)
class ParameterCount:
    """Elements, apart by who replicates them: experts have their own data-parallel group."""

    shared: int
    """Replicated over the data-parallel ranks (context-parallel ones included)."""
    expert: int
    """Replicated over the expert-data-parallel ranks."""

    @property
    def total(self) -> int:
        return self.shared + self.expert

    def __add__(self, other: "ParameterCount") -> "ParameterCount":
        return ParameterCount(self.shared + other.shared, self.expert + other.expert)


def attention_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Projections, their biases, norms of queries and keys, sinks. Key heads fewer than ranks are replicated."""
    h, heads = shape.hidden_size, shape.num_attention_heads // tensor
    out = heads * shape.value_head_dim * h + (h if shape.attention_output_bias else 0)
    latent = shape.latent_attention
    if latent:
        query_in = latent.query_rank or h
        down = h * (latent.query_rank or 0) + h * (latent.key_value_rank + latent.rope_head_dim)
        norms = (latent.query_rank or 0) + latent.key_value_rank
        up = query_in * heads * shape.query_head_dim
        up += latent.key_value_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
        return down + norms + up + out
    groups = max(1, shape.num_key_value_heads // tensor)
    width = (heads * (2 if shape.attention_gate else 1) + 2 * groups) * shape.head_dim
    biases = width if shape.qkv_bias else 0
    norms = 2 * shape.head_dim if shape.qk_norm else 0
    return h * width + biases + norms + out + (heads if shape.attention_sinks else 0)


def mamba_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Two projections, a convolution with its biases, three numbers of each head, and the norm before the gate."""
    mamba, h = shape.mamba, shape.hidden_size
    assert mamba is not None
    heads = mamba.num_heads // tensor
    inner, of_groups = heads * mamba.head_dim, 2 * mamba.num_groups // tensor * mamba.state_dim
    convolved = inner + of_groups
    return h * (inner + convolved + heads) + convolved * (mamba.conv_kernel + 1) + 3 * heads + inner + inner * h


def delta_net_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Two projections, a convolution, two numbers of each head of values, and the norm that all heads share."""
    net, h = shape.delta_net, shape.hidden_size
    assert net is not None
    heads = net.num_value_heads // tensor
    values = heads * net.value_dim
    convolved = 2 * net.num_key_heads // tensor * net.key_dim + values
    projections = h * (convolved + values + 2 * heads) + values * h
    return projections + convolved * net.conv_kernel + 2 * heads + net.value_dim


_MIXERS = {"attention": attention_parameters, "mamba": mamba_parameters, "delta_net": delta_net_parameters}


def mlp_parameters(shape: ModelShape, ffn: int, width: int | None = None) -> int:
    """An MLP of width `ffn` (already divided by its ranks), which reads `width` elements; None: `hidden_size`."""
    width = width or shape.hidden_size
    num_first = 2 if shape.gated_mlp else 1
    return (num_first + 1) * width * ffn + (num_first * ffn + width if shape.mlp_bias else 0)


def layer_parameters(shape: ModelShape, kind: LayerKind, split: Split = WHOLE) -> ParameterCount:
    """One layer, its norms included."""
    h = shape.hidden_size
    num_norms = 2 if shape.output_norms else 1
    shared = 0 if kind.mixer is None else _MIXERS[kind.mixer](shape, split.tensor) + num_norms * h
    if kind.mlp is None:
        return ParameterCount(shared, 0)
    shared += num_norms * h
    if kind.mlp == "dense":
        return ParameterCount(shared + mlp_parameters(shape, shape.ffn_hidden_size // split.tensor), 0)
    experts = shape.experts
    assert experts is not None
    shared += h * experts.num_experts + (experts.num_experts if shape.mlp_bias else 0)
    shared += 2 * h * (experts.latent_size or 0)  # every rank has these projections whole
    if experts.shared_ffn_hidden_size:
        shared += mlp_parameters(shape, experts.shared_ffn_hidden_size // split.tensor)
        shared += h if experts.has_shared_gate else 0
    each = mlp_parameters(shape, experts.ffn_hidden_size // split.expert_tensor, experts.latent_size)
    return ParameterCount(shared, experts.num_experts // split.expert * each)


def embedding_parameters(shape: ModelShape, split: Split = WHOLE) -> int:
    """The token embedding, or the output layer."""
    return shape.vocabulary_rows(split.tensor) * shape.hidden_size


def mtp_parameters(shape: ModelShape, split: Split = WHOLE) -> ParameterCount:
    """All layers of multi-token prediction: what stands in each, the projection of two inputs to one, three norms.

    Embedding and output layer are the main model's.
    """
    h = shape.hidden_size
    one = ParameterCount(2 * h * h // split.tensor + 3 * h, 0)
    for kind in shape.mtp_kinds:
        one += layer_parameters(shape, kind, split)
    return ParameterCount(one.shared * shape.num_mtp_layers, one.expert * shape.num_mtp_layers)


def model_parameters(shape: ModelShape) -> int:
    """The whole model without multi-token prediction, as published counts have it."""
    layers = sum(layer_parameters(shape, kind).total for kind in shape.layer_kinds)
    embeddings = embedding_parameters(shape) * (1 if shape.tied_embeddings else 2)
    return layers + embeddings + shape.hidden_size
