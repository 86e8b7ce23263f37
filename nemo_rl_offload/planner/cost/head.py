"""Device memory of the output head: logits and what the loss makes of them, or what stands in their place."""

from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.output_head import block_width, chunk_size
from nemo_rl_offload.specs.parallel_layout import ParallelLayout


def logits_bytes(
    shape: ModelShape, layout: ParallelLayout, num_tokens: int, element_bytes: int, chunk_tokens: int | None = None
) -> int:
    """Most memory that output logits and their loss take at a time, on the last stage.

    Per token and entry of the vocabulary: the logits themselves, their float32 copy, the float32 softmax that the loss
    saves, and the float32 gradient before it is cast. With `chunk_tokens` tokens of a microbatch at a time
    (`logprob_chunk_size`), only those have what is float32; beside all logits there are the chunks' gradients, which
    are put together in the end. What an adapter of the output layer makes on the way, three times all logits, is less.
    """
    vocabulary = shape.vocabulary_rows(layout.tensor)
    if chunk_tokens is None or chunk_tokens >= num_tokens:
        return num_tokens * vocabulary * (element_bytes + 3 * 4)
    return vocabulary * (2 * element_bytes * num_tokens + max(3 * 4 * chunk_tokens, element_bytes * num_tokens))


def fused_head_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    num_tokens: int,
    element_bytes: int,
    chunk_tokens: int | None = None,
    *,
    is_frozen: bool = False,
    adapter_dim: int = 0,
) -> int:
    """The same without logits (`use_fused_linear_logprobs`), in the head's backward.

    A block of the vocabulary: its logits in float32, and their gradient. Of all tokens: hidden states, gathered where
    sequence parallelism splits them and put in the order of rows, and their gradient, whose sums of a chunk are
    float32. The gradient of the weight, unless that is frozen; of several chunks in float32 first. An adapter's second
    matrix, and the first one's outputs, have the same.
    """
    vocabulary, hidden = shape.vocabulary_rows(layout.tensor), shape.hidden_size
    tokens = chunk_size(num_tokens, chunk_tokens)
    width = min(vocabulary, block_width(tokens, element_bytes))
    block = tokens * width * (4 + element_bytes)
    num_copies = 2 + layout.sequence_parallel
    of_tokens = hidden * (num_copies * num_tokens * element_bytes + 4 * tokens)
    of_tokens += adapter_dim * (2 * num_tokens * element_bytes + 4 * tokens)
    columns = adapter_dim + (0 if is_frozen else hidden)
    return block + of_tokens + vocabulary * columns * (element_bytes if tokens == num_tokens else 4 + element_bytes)


def forward_logits_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    num_tokens: int,
    element_bytes: int,
    chunk_tokens: int | None = None,
    *,
    adapter_dim: int = 0,
) -> int:
    """Most memory that logits take in a pass without gradients, on the last stage.

    The logits themselves, and of a chunk their float32 copy and that over temperature. Before: with an adapter of the
    output layer its logits, the model's, and their sum.
    """
    copies = 2 * 4 if element_bytes < 4 else 4
    of_loss = num_tokens * element_bytes + min(num_tokens, chunk_tokens or num_tokens) * copies
    return shape.vocabulary_rows(layout.tensor) * max(of_loss, 3 * num_tokens * element_bytes * bool(adapter_dim))


def fused_head_forward_bytes(
    shape: ModelShape,
    layout: ParallelLayout,
    num_tokens: int,
    element_bytes: int,
    chunk_tokens: int | None = None,
    *,
    adapter_dim: int = 0,
) -> int:
    """The same without logits: a block of the vocabulary in float32, and the hidden states of all tokens, with what an
    adapter makes of them."""
    tokens = chunk_size(num_tokens, chunk_tokens)
    width = min(shape.vocabulary_rows(layout.tensor), block_width(tokens, element_bytes))
    columns = (1 + layout.sequence_parallel) * shape.hidden_size + adapter_dim
    return tokens * width * 4 + num_tokens * columns * element_bytes
