"""Writes docs/from-nemo-rl.md below its mark from the table of NeMo-RL's keys: `python tools/nemo_rl_reference.py`."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.config.nemo_rl.table import COMMIT, DATA_SETS, REPOSITORY, Row, rows
from nemo_rl_offload.specs.data_sets import DATA_SETS as NAMED

MARK = "<!-- Below: written by `python tools/nemo_rl_reference.py`. -->\n"
DOCUMENT = PROJECT_ROOT / "docs" / "from-nemo-rl.md"


def documents() -> dict[Path, str]:
    """Each file that is written, and its text."""
    by_hand = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0]
    return {DOCUMENT: by_hand + MARK + "".join(f"{line}\n" for line in _tables())}


def _tables() -> Iterator[str]:
    yield f"The keys are those of [NeMo-RL]({REPOSITORY}) at {COMMIT}."
    found = [row for row in rows().values() if not row.path.startswith(tuple(f"{name}." for name in DATA_SETS[1:]))]
    yield from _table("Honoured, as other keys", ("key", "what becomes of it"), _pairs(found, "honoured"))
    only = [
        (_name(row), " or ".join(f"`{json.dumps(value)}`" for value in row.values), row.feature, row.reason)
        for row in found
        if row.verdict == "only"
    ]
    yield from _table("Accepted with one value", ("key", "value", "any other is refused as", "here"), only)
    refused = [(_name(row), row.feature, row.reason) for row in found if row.verdict == "refused"]
    yield from _table("Refused", ("key", "as", "here"), refused)
    yield from _table("Without effect", ("key", "why"), _pairs(found, "none"))
    names = [
        (
            f"`{name}`",
            f"`{data.hub_id}`",
            ", ".join(f"{key}: `{column}`" for key, column in data.columns.items()) or "-",
        )
        for name, data in NAMED.items()
    ]
    yield from _table("Data sets by name", ("`dataset_name`", "on the hub", "columns"), names)


def _name(row: Row) -> str:
    return f"`{row.path}{'.*' if row.is_open else ''}`"


def _pairs(found: Sequence[Row], verdict: str) -> list[tuple[str, ...]]:
    return [(_name(row), row.reason) for row in found if row.verdict == verdict]


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for cells in lines:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(*, check: bool) -> int:
    """Write the files, or with ``check`` say which are not as they would be written; returns the exit code."""
    stale = {path: text for path, text in documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if check:
            sys.stdout.write(f"{path} is not what `python tools/nemo_rl_reference.py` writes\n")
        else:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
