"""Memory of Megatron's buffers of gradients: it is freed and given back while their views stay views.

They are worth nothing between two steps, so nothing is moved, and the next step fills them with zeros first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nemo_rl_offload.megatron.protocols import GradientBuffer, ModelChunk


def own_buffers(chunks: Sequence[ModelChunk]) -> Iterator[GradientBuffer]:
    """Those whose memory is not the weights' too, as with weights in 8 bits."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if getattr(buffer, "shared_buffer", None) is None:
                yield buffer


def free_buffers(chunks: Sequence[ModelChunk]) -> None:
    """Those that are freed already stay so."""
    for buffer in own_buffers(chunks):
        buffer.offload_to_cpu(move_params=False, move_grads=True)  # which frees them, and moves nothing


def restore_buffers(chunks: Sequence[ModelChunk]) -> None:
    """Give freed ones memory again, full of zeros."""
    for buffer in own_buffers(chunks):
        buffer.reload_from_cpu(move_params=False, move_grads=True)


@contextmanager
def without_gradients(chunks: Sequence[ModelChunk]) -> Iterator[None]:
    """For what needs their room, at the end of the block no longer."""
    free_buffers(chunks)
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of pieces, among which a buffer would find no room
    restore_buffers(chunks)
