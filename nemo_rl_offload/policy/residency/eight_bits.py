"""Copies of weights in 8 bits, which Transformer Engine keeps from forward to forward: about as large as the weights.

They are made anew in the first microbatch of each pass, from weights that have changed by then or are another model's.
Between two passes they are worth nothing, and are freed where gradients are, or where the weights themselves leave.
"""

from collections.abc import Iterable

from torch.nn import Module


def free_copies(modules: Iterable[Module]) -> None:
    """Free the copies of models, whose next pass makes them again."""
    for module in (each for model in modules for each in model.modules()):
        if (copies := getattr(module, "_fp8_workspaces", None)) is not None:
            copies.clear()
