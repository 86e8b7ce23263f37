"""What Mamba-2 layers and gated delta nets save between their two projections, what they keep of a sequence, and their
floating-point operations.

They are layers of plain torch (`megatron/layers/mamba.py`, `delta_net.py`), so these are no formulas of kernels: each
storage is one that an operator there saves, in the order of its lines, and a GPU saves what a CPU does. The recurrence
is float32, and goes by chunks: products of a chunk's tokens squared, and a state for each chunk. Sequences are filled
up to whole chunks. Context-parallel ranks have a share of the heads over whole sequences.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl_offload.planner.cost.storages import LayerContext, Storage, tensor
from nemo_rl_offload.specs.model_shape import DELTA_CHUNK, LayerKind

_FLOAT32 = 4


@dataclass(frozen=True)
class Mixer:
    """Sizes of a recurrent layer on one rank, in elements."""

    rows: int
    length: int
    """Of a row: a whole sequence."""
    chunk: int
    heads: int
    groups: int
    """Of heads: of a delta net, heads of keys."""
    head_dim: int
    """Of what is mixed."""
    state_dim: int
    """Of each element of a head: of a delta net, the width of its keys."""
    conv_kernel: int
    gate: int
    """For a token, as wide as what is mixed, of all heads of the tensor-parallel rank."""
    projected: int
    """All that the first projection gives for a token."""

    @property
    def num_chunks(self) -> int:
        """Of a row."""
        return -(-self.length // self.chunk)

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.length

    @property
    def padded(self) -> int:
        """Tokens of all rows, filled up to whole chunks."""
        return self.rows * self.num_chunks * self.chunk

    @property
    def inner(self) -> int:
        """Of what is mixed, for a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """That the convolution reads, for a token."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def states(self) -> int:
        """Of all rows at one time."""
        return self.rows * self.inner * self.state_dim


def mixer_of(context: LayerContext, kind: LayerKind) -> Mixer:
    """The sizes of a recurrent layer."""
    shape, layout, tokens = context.shape, context.layout, context.tokens
    parts = layout.tensor * layout.context
    rows = -(-tokens.count * layout.context // tokens.sequence)
    if kind.mixer == "mamba":
        mamba = shape.mamba
        assert mamba is not None
        gate = mamba.num_heads // layout.tensor * mamba.head_dim
        of_groups = mamba.num_groups // layout.tensor * mamba.state_dim
        return Mixer(
            rows,
            tokens.sequence,
            min(mamba.chunk, tokens.sequence),
            mamba.num_heads // parts,
            max(1, mamba.num_groups // parts),
            mamba.head_dim,
            mamba.state_dim,
            mamba.conv_kernel,
            gate,
            2 * (gate + of_groups) + mamba.num_heads // layout.tensor,
        )
    net = shape.delta_net
    assert net is not None
    gate = net.num_value_heads // layout.tensor * net.value_dim
    keys = net.num_key_heads // layout.tensor * net.key_dim
    return Mixer(
        rows,
        tokens.sequence,
        min(DELTA_CHUNK, tokens.sequence),
        net.num_value_heads // parts,
        max(1, net.num_key_heads // parts),
        net.value_dim,
        net.key_dim,
        net.conv_kernel,
        gate,
        2 * (gate + keys + net.num_value_heads // layout.tensor),
    )


def recurrent_core(context: LayerContext, kind: LayerKind) -> Iterator[Storage]:
    """What a recurrent layer saves of convolution, recurrence, norm and gate, which `core_attn` is around, and what the
    last projection reads."""
    mixer, size = mixer_of(context, kind), context.numbers.element_bytes
    sizes = _of_mamba(mixer, size) if kind.mixer == "mamba" else _of_delta_net(mixer, size)
    for name, elements, each_bytes, of_one in (*_of_convolution(mixer, kind, size), *sizes):
        yield Storage(name, elements * each_bytes, of_one or elements, ("core_attn",), ("core_attn",))
    gate, projected = context.tokens.count * mixer.gate, context.tokens.count * mixer.projected
    if size == _FLOAT32:  # a view, and else a copy
        yield Storage("projected gate and others", projected * size, gate, ("core_attn",), ("core_attn",))
    else:
        yield tensor("gate", gate, _FLOAT32, "core_attn", by=("core_attn",))
        yield Storage("projected input", projected * size, projected, only_with=("core_attn",))
    yield tensor("gated output", gate, size, "attn_proj")


type _Sizes = Iterator[tuple[str, int, int, int]]
"""Name, elements, bytes of each, and elements of the largest tensor there where there are several or it is a view."""


def _of_convolution(mixer: Mixer, kind: LayerKind, size: int) -> _Sizes:
    convolved = mixer.tokens * mixer.channels
    yield "convolution's input", convolved + mixer.rows * mixer.channels * (mixer.conv_kernel - 1), size, 0
    yield "convolution's output", convolved, size, 0
    largest = mixer.inner if kind.mixer == "mamba" else mixer.groups * mixer.state_dim
    yield "its activation, float32", convolved, _FLOAT32, mixer.tokens * largest


def _of_mamba(mixer: Mixer, size: int) -> _Sizes:
    padded, heads, inner = mixer.padded, mixer.heads, mixer.inner
    squares, of_groups = padded * mixer.chunk, padded * mixer.groups * mixer.state_dim
    local, later = mixer.tokens * inner, mixer.num_chunks - 1
    gives_state = later > 0  # what the last chunk adds to a state is for nobody
    yield "decays of heads", (2 if size == _FLOAT32 else 3) * heads, _FLOAT32, heads
    yield "steps", mixer.tokens * heads, _FLOAT32, 0
    yield "steps and decays", (2 + gives_state) * padded * heads, _FLOAT32, padded * heads
    yield "later tokens", mixer.chunk**2, 1, 0
    yield "decays and weights of a chunk's tokens", 2 * squares * heads, _FLOAT32, squares * heads
    yield "c times b", squares * mixer.groups, _FLOAT32, 0
    yield "copies of b and c", (2 + 2 * gives_state) * of_groups, _FLOAT32, of_groups
    yield "x in its forms, and what states give", (3 + 2 * gives_state) * padded * inner, _FLOAT32, padded * inner
    yield "decays of chunks", gives_state * mixer.rows * mixer.num_chunks * heads, _FLOAT32, 0
    yield "states", later * mixer.states, _FLOAT32, mixer.states
    yield "states of all chunks", mixer.num_chunks * mixer.states, _FLOAT32, 0
    yield "mixed, activated gate and their product", 3 * local, _FLOAT32, local
    yield "scale of the norm", mixer.tokens * mixer.groups, _FLOAT32, 0
    yield "normed", local, size, 0


def _of_delta_net(mixer: Mixer, size: int) -> _Sizes:
    padded, heads, num_chunks = mixer.padded, mixer.heads, mixer.num_chunks
    squares, keys, values = padded * mixer.chunk * heads, padded * heads * mixer.state_dim, padded * mixer.inner
    of_heads, local = padded * heads, mixer.tokens * mixer.inner
    later = num_chunks - 1
    yield "lengths of queries and keys", 2 * mixer.tokens * mixer.groups, _FLOAT32, mixer.tokens * mixer.groups
    yield "decays of heads", 2 * heads, _FLOAT32, heads
    yield "steps, their activation, and beta", 3 * mixer.tokens * heads, _FLOAT32, mixer.tokens * heads
    yield "later tokens", mixer.chunk**2, 1, 0
    yield "decays, products of keys and of queries, the system", 4 * squares, _FLOAT32, squares
    yield "beta and decays", (3 + (later > 0)) * of_heads, _FLOAT32, of_heads
    yield "keys and queries in their forms", 7 * keys, _FLOAT32, keys
    yield "values", values, _FLOAT32, 0
    yield "solution of the system", keys + values, _FLOAT32, 0
    yield "states", num_chunks * mixer.states, _FLOAT32, mixer.states
    yield "what states get and give", values, _FLOAT32, values // num_chunks
    yield "products of queries, by chunks", squares, _FLOAT32, squares // num_chunks
    yield "keys and queries of later chunks", 3 * keys * later // num_chunks, _FLOAT32, keys // num_chunks
    yield "decays of chunks", mixer.rows * later * heads, _FLOAT32, mixer.rows * heads
    yield "mixed", values, _FLOAT32, local
    yield "scale of the norm", mixer.tokens * heads, _FLOAT32, 0
    yield "normed, and times its weight", 2 * local, size, local
    yield "activated gate", local, _FLOAT32, 0


def kept_bytes(context: LayerContext, kind: LayerKind) -> int:
    """What a layer keeps of the context's rows to generate their next tokens: states, and what the convolution still
    reads."""
    mixer, size = mixer_of(context, kind), context.numbers.element_bytes
    return mixer.states * _FLOAT32 + mixer.rows * mixer.channels * (mixer.conv_kernel - 1) * size


def recurrent_flops(context: LayerContext, kind: LayerKind) -> float:
    """Of the products of a recurrence, in chunks, and of its convolution, forward.

    Mamba-2 (arXiv 2405.21060, section 6): of a chunk's q tokens c b^T for each group and its product with x for each
    head, and for each token what it adds to a state and what it reads of one. Gated delta net (arXiv 2412.06464,
    section 3.3): two products of a chunk's keys and of its queries, the triangular system, the product with its
    solution, and three for each token with a state. With chunks of one token that is the recurrence itself.
    """
    mixer = mixer_of(context, kind)
    convolution = 2.0 * mixer.tokens * mixer.channels * mixer.conv_kernel
    squares, of_states = float(mixer.padded * mixer.chunk), float(mixer.padded * mixer.inner * mixer.state_dim)
    if kind.mixer == "mamba":
        return convolution + 2 * squares * (mixer.groups * mixer.state_dim + mixer.inner) + 4 * of_states
    keys, values = mixer.heads * mixer.state_dim, mixer.inner
    return convolution + squares * (4 * keys + (keys + values) + 2 * values) + 6 * of_states


def core_bytes(context: LayerContext, kind: LayerKind) -> int:
    """All that a layer saves between its two projections, without recomputation."""
    return sum(storage.num_bytes for storage in recurrent_core(context, kind) if storage.recomputed_by)


def gradients_of_core(context: LayerContext, kind: LayerKind) -> int:
    """The most that gradients take between the two projections, over what is freed by then.

    A bound from peaks counted on a CPU: norm and gate, which backward begins with, take up to 4.5 times the wider of
    what is mixed and, in a delta net, the keys; with long chunks two products of a chunk's tokens take more, when five
    such are freed.
    """
    mixer = mixer_of(context, kind)
    width = mixer.inner if kind.mixer == "mamba" else max(mixer.inner, mixer.heads * mixer.state_dim)
    wide, squares = mixer.padded * width, mixer.padded * mixer.chunk * mixer.heads
    return round(max(4.5 * wide, 2 * squares - 5 * wide) * _FLOAT32)
