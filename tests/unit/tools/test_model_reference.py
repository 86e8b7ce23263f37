"""The table of models in the documents is that of the source."""

import model_reference

from nemo_rl_offload.specs.model_families import FAMILIES


def test_the_document_is_fresh() -> None:
    assert model_reference.document() == model_reference.DOCUMENT.read_text(encoding="utf-8")


def test_every_family_is_a_column() -> None:
    header = next(line for line in model_reference.document().splitlines() if line.startswith("| key |"))
    assert header == f"| key | {' | '.join(FAMILIES)} |"
