"""Which kind each layer of a hybrid model is, whose layers are attention, Mamba-2, an MLP or experts, one of them each.

A pattern has a letter for each layer, as Nemotron-H's `hybrid_override_pattern` and Megatron's own have.
"""

from collections.abc import Mapping
from typing import Any

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
LETTERS = {"mamba": MAMBA, "attention": ATTENTION, "mlp": MLP, "moe": EXPERTS}
"""By the names that transformers' `layers_block_type` has."""

_DEFAULT, _DEFAULT_MTP = "ME*-", "*E"


def layer_pattern(content: Mapping[str, Any]) -> str | None:
    """The pattern of a `config.json`; None where it says what is none.

    transformers takes `layers_block_type` where both keys are there, and a pattern of its own where none is.
    """
    return _pattern(content.get("layers_block_type"), content.get("hybrid_override_pattern", _DEFAULT))


def mtp_layer_pattern(content: Mapping[str, Any]) -> str | None:
    """That of what predicts a further token (MTP), likewise; transformers takes `mtp_layers_block_type` where both keys
    are there, unless it is the default."""
    pattern = content.get("mtp_hybrid_override_pattern", _DEFAULT_MTP)
    listed = _pattern(content.get("mtp_layers_block_type"), pattern)
    return _pattern(None, pattern) if listed == _DEFAULT_MTP else listed


def _pattern(kinds: object, pattern: object) -> str | None:
    if isinstance(kinds, list):
        are_known = all(isinstance(kind, str) and kind in LETTERS for kind in kinds)
        return "".join(LETTERS[kind] for kind in kinds) if are_known else None
    if isinstance(pattern, str) and pattern and set(pattern) <= set(LETTERS.values()):
        return pattern
    return None
