"""Device memory of the output head: logits, and what the loss makes of them."""

from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.parallel_layout import ParallelLayout


def logits_bytes(
    shape: ModelShape, layout: ParallelLayout, num_tokens: int, element_bytes: int, chunk_tokens: int | None = None
) -> int:
    """Most memory that output logits and their loss take at a time, on the last stage.

    Per token and entry of the vocabulary: the logits themselves, their float32 copy, the float32 softmax that the loss
    saves, and the float32 gradient before it is cast. With `chunk_tokens` tokens of a microbatch at a time
    (`logprob_chunk_size`), only those have what is float32; beside all logits there are the chunks' gradients, which
    are put together in the end.
    """
    vocabulary = shape.vocab_size // layout.tensor
    if chunk_tokens is None or chunk_tokens >= num_tokens:
        return num_tokens * vocabulary * (element_bytes + 3 * 4)
    return vocabulary * (2 * element_bytes * num_tokens + max(3 * 4 * chunk_tokens, element_bytes * num_tokens))
