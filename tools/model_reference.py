"""Writes the table of `docs/models.md` from the tables that `check` reads: `python tools/model_reference.py`."""

import sys
from collections.abc import Iterator

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.specs.model_families import FAMILIES

MARK = "<!-- Below: written by `python tools/model_reference.py`. -->\n"
DOCUMENT = PROJECT_ROOT / "docs" / "models.md"


def document() -> str:
    """Return `docs/models.md` with its table made anew."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT} has lost the line {MARK}"
    return by_hand + MARK + "\n" + "".join(f"{line}\n" for line in _table())


def _table() -> Iterator[str]:
    keys = sorted({key for family in FAMILIES.values() for key, what in family.items() if what.text != "no effect"})
    yield f"| key | {' | '.join(FAMILIES)} |"
    yield f"|---|{'---|' * len(FAMILIES)}"
    for key in keys:
        yield f"| `{key}` | {' | '.join(_cell(family, key) for family in FAMILIES)} |"


def _cell(family: str, key: str) -> str:
    what = FAMILIES[family].get(key)
    return "" if what is None else {"honoured": "yes"}.get(what.text, what.text.removeprefix("honoured: "))


if __name__ == "__main__":
    text = document()
    if "--check" in sys.argv:
        sys.exit(text != DOCUMENT.read_text(encoding="utf-8"))
    DOCUMENT.write_text(text, encoding="utf-8")
