"""E2: which variants a command measures."""

import pytest
from dense_rl import is_wanted
from variants import Variant, nothing

NAMES = {
    "ours: all": "ours",
    "ours: norms": "ours",
    "recompute: mlp": "recompute",
    "Transformer Engine: 2 layers": "te",
}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ["nothing", "ours: all", "ours: norms", "recompute: mlp"]),
        (["recompute"], ["nothing", "recompute: mlp"]),
        (["Transformer Engine"], ["nothing", "ours: all", "ours: norms", "Transformer Engine: 2 layers"]),
        (["Transformer Engine", "ours: all"], ["nothing", "ours: all", "Transformer Engine: 2 layers"]),
    ],
)
def test_named_variants_and_what_they_need_beside(named: list[str] | None, expected: list[str]) -> None:
    kinds = {"te": "transformer_engine"}
    found = [nothing(), *(Variant(name, kinds.get(kind, kind), nothing().enter) for name, kind in NAMES.items())]
    assert [variant.name for variant in found if is_wanted(variant, named)] == expected
