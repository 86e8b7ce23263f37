"""Parameters of a model's parts, on one rank of a parallel layout; with one rank, of the whole model."""

from dataclasses import dataclass

from nemo_rl_offload.specs.model_shape import ModelShape
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
    width = (heads + 2 * groups) * shape.head_dim
    biases = width if shape.qkv_bias else 0
    norms = 2 * shape.head_dim if shape.qk_norm else 0
    return h * width + biases + norms + out + (heads if shape.attention_sinks else 0)


def mlp_parameters(shape: ModelShape, ffn: int) -> int:
    """A gated MLP of width `ffn` (already divided by its ranks)."""
    return 3 * shape.hidden_size * ffn + (2 * ffn + shape.hidden_size if shape.mlp_bias else 0)


def layer_parameters(shape: ModelShape, has_experts: bool, split: Split = WHOLE) -> ParameterCount:
    """One transformer layer, its norms included."""
    h = shape.hidden_size
    shared = attention_parameters(shape, split.tensor) + (4 if shape.output_norms else 2) * h
    if not has_experts:
        return ParameterCount(shared + mlp_parameters(shape, shape.ffn_hidden_size // split.tensor), 0)
    experts = shape.experts
    assert experts is not None
    shared += h * experts.num_experts + (experts.num_experts if shape.mlp_bias else 0)
    if experts.shared_ffn_hidden_size:
        shared += mlp_parameters(shape, experts.shared_ffn_hidden_size // split.tensor)
        shared += h if experts.has_shared_gate else 0
    each = mlp_parameters(shape, experts.ffn_hidden_size // split.expert_tensor)
    return ParameterCount(shared, experts.num_experts // split.expert * each)


def embedding_parameters(shape: ModelShape, split: Split = WHOLE) -> int:
    """The token embedding, or the output layer."""
    return shape.vocabulary_rows(split.tensor) * shape.hidden_size


def mtp_parameters(shape: ModelShape, split: Split = WHOLE) -> ParameterCount:
    """All layers of multi-token prediction: a layer like the last, the projection of two inputs to one, three norms.

    Embedding and output layer are the main model's.
    """
    h = shape.hidden_size
    one = layer_parameters(shape, shape.layers_with_experts[-1], split) + ParameterCount(
        2 * h * h // split.tensor + 3 * h, 0
    )
    return ParameterCount(one.shared * shape.num_mtp_layers, one.expert * shape.num_mtp_layers)


def model_parameters(shape: ModelShape) -> int:
    """The whole model without multi-token prediction, as published counts have it."""
    layers = sum(layer_parameters(shape, has_experts).total for has_experts in shape.layers_with_experts)
    embeddings = embedding_parameters(shape) * (1 if shape.tied_embeddings else 2)
    return layers + embeddings + shape.hidden_size
