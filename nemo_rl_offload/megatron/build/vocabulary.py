"""Vocabularies that tensor parallelism does not divide.

Megatron splits the rows of the embedding and of the output layer over tensor-parallel ranks, equally many each. Where
they do not divide, rows of zeros are added behind the last. They are no tokens: no id names them, their logits are
masked (`mask_padding`; the head without logits never computes them), so that they have no share in a softmax and no
gradient, and what leaves the model is cut to the vocabulary (`exported_weights`). A checkpoint holds them; Megatron
reads it into another number of rows, zeros behind what there is.

A vocabulary that divides is left as it is: padding it to a rounder number would make other checkpoints of it.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, arange, finfo, nn

from nemo_rl_offload.megatron.build.hf_weights import possible_repeats

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt import GPTModel

_MASKED = -1e9
"""Far below all logits, and finite at every temperature: an entropy multiplies it by 0."""
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def pad_vocabulary(provider: Any, num_parts: int) -> None:
    """Have the model built with rows for `num_parts` tensor-parallel ranks."""
    provider.should_pad_vocab = provider.vocab_size % num_parts != 0
    provider.make_vocab_size_divisible_by = 1


def mask_padding(chunks: Sequence["GPTModel"], vocab_size: int) -> None:
    """Let output layers give rows that pad the vocabulary no share in a softmax."""

    from megatron.core import parallel_state  # the driver imports this module, and Megatron-Core takes seconds

    def mask(layer: nn.Module, _: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        logits, bias = output
        is_whole = logits.shape[-1] == layer.output_size
        first = 0 if is_whole else parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        is_padding = arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
        return logits.masked_fill(is_padding, max(_MASKED, finfo(logits.dtype).min)), bias

    for chunk in chunks:
        if chunk.post_process and chunk.vocab_size != vocab_size:
            chunk.output_layer.register_forward_hook(mask)


def exported_weights(
    auto_bridge: "AutoBridge", chunks: list[Any], vocab_size: int, **how: Any
) -> Iterator[tuple[str, Tensor]]:
    """Bridge's export of all weights by Hugging Face's names, each once, without the rows that pad the vocabulary.

    Every rank takes part.
    """
    table = auto_bridge._model_bridge.mapping_registry()
    padded = {str(found.hf_param) for name in _PADDED if (found := table.megatron_to_hf_lookup(name)) is not None}
    repeats = possible_repeats(auto_bridge)
    for name, weight in auto_bridge.export_hf_weights(chunks, show_progress=False, **how):
        if name in repeats:
            continue
        yield name, weight[:vocab_size] if name in padded else weight
