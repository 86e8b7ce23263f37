"""Metrics of the several updates of a step as one: each weighs as much as what it is a mean over."""

from collections.abc import Mapping, Sequence

OF_TOKENS = (
    *("probs_ratio", "probs_ratio_clamped", "clip_fraction", "approx_kl", "approx_entropy"),
    *("sampling_importance_ratio", "is_oob_ratio"),
)
"""Always means over tokens."""
OF_LOSS = ("loss", "kl_penalty", "entropy")
"""Means over what the loss is a mean over."""


def mean_of_updates(
    updates: Sequence[Mapping[str, float]],
    num_tokens: Sequence[int],
    num_sequences: Sequence[int],
    *,
    token_level_loss: bool,
) -> dict[str, float]:
    """Average the metrics of updates with so many valid tokens and sequences; updates count alike in all others.

    The loss is a mean over tokens with ``token_level_loss``, and else over sequences.
    """
    weights: dict[str, Sequence[int]] = dict.fromkeys(OF_TOKENS, num_tokens)
    weights |= dict.fromkeys(OF_LOSS, num_tokens if token_level_loss else num_sequences)
    ones = [1] * len(updates)
    found = {}
    for name in updates[0]:
        counts = weights.get(name, ones)
        counts = counts if any(counts) else ones
        found[name] = sum(each[name] * count for each, count in zip(updates, counts, strict=True)) / sum(counts)
    return found
