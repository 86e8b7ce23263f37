"""What a run reads beside its configuration, so that a run that is taken up again can say what changed meanwhile.

A configuration names files, and its values are compared when a run is taken up again. What stands in the files can
change under the same name. So a run keeps size and checksum of each in `inputs.json`, by the key that names it. Times
of files do not count: the same content, copied anew, is the same. Names are relative to what the key names, so that a
run may move with its files.

Files are read whole: those of data are read whole by the run anyhow. Only those of weights are, above `WHOLE_BYTES`,
told by their size and by blocks from all over them, for a model of 70 billion parameters would take minutes. The limit:
an edit by hand between the blocks goes unseen; training, merging or converting changes every tensor.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from pydantic import TypeAdapter

from nemo_rl_offload.runs.output import write_json_atomic
from nemo_rl_offload.specs.documents import MODEL_BYTES, RUN_BYTES, DocumentError, open_plain, read_json

INPUTS_FILE = "inputs.json"
WHOLE_BYTES = 64 << 20
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
NUM_SHOWN = 3
"""Of the files of one key, and of the keys of one file."""


class FileMark(TypedDict):
    """A file as it was."""

    bytes: int
    sha256: str
    """Of the whole file, or of its blocks."""
    content: NotRequired[dict[str, object]]
    """Of a small file whose changes are told key by key."""


Inputs = dict[str, dict[str, FileMark]]
"""By the key of the configuration, and by the file's name below what the key names."""


def mark_of(path: Path, *, samples: bool = False, keeps_content: bool = False) -> FileMark | None:
    """Size and checksum of a file; None where it cannot be read, which the run itself says.

    Args:
        samples: large files are read in part.
        keeps_content: it is JSON, of which the mark keeps what it says.
    """
    try:
        size = path.stat().st_size
        if samples and size > WHOLE_BYTES:
            return {"bytes": size, "sha256": _checksum_of_blocks(path, size)}
        with open_plain(path) as file:
            mark: FileMark = {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        if keeps_content and isinstance(content := read_json(path, MODEL_BYTES), dict):
            mark["content"] = content
    except (OSError, ValueError):
        return None
    return mark


def _checksum_of_blocks(path: Path, size: int) -> str:
    """Of blocks at equal distances; the first and the last are the file's."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        for number in range(NUM_BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def write_inputs(run_dir: Path, inputs: Inputs) -> None:
    """Keep what a run reads. Raises ResourceError where that cannot be written."""
    write_json_atomic(run_dir / INPUTS_FILE, inputs)


def read_inputs(run_dir: Path) -> Inputs | None:
    """What a run has read; None where that is not known, as of runs of earlier versions."""
    try:
        inputs = read_json(run_dir / INPUTS_FILE, RUN_BYTES, follows_links=False)
        return TypeAdapter(Inputs).validate_python(inputs)
    except (OSError, ValueError):
        return None


def changes(there: Mapping[str, FileMark], here: Mapping[str, FileMark], base: Path) -> dict[str, str]:
    """What happened to each file of a key that is not what it was, by its name; `base` is what the key names now."""
    found = {name: "is gone" for name in there if name not in here}
    found |= {name: "is new" for name in here if name not in there}
    for name in there.keys() & here.keys():
        is_same = there[name]["sha256"] == here[name]["sha256"]
        content = there[name].get("content")
        if not is_same and (content is None or content != here[name].get("content")):  # another layout says the same
            found[name] = _change(there[name], here[name], base / name if base.is_dir() else base)
    return dict(sorted(found.items()))


def _change(there: FileMark, here: FileMark, path: Path) -> str:
    before, after = there.get("content"), here.get("content")
    if before is not None and after is not None:
        return "says other things: " + _listed(list(_differences(before, after)), "; ")
    added = here["bytes"] - there["bytes"]
    if added > 0 and _beginning(path, there["bytes"]) == there["sha256"]:
        return f"has {added} bytes more at its end"
    size = f"{there['bytes']} bytes" + ("" if added == 0 else f" then, {here['bytes']} now")
    return f"has other content ({size})"


def _differences(there: Mapping[str, object], here: Mapping[str, object], path: str = "") -> Iterator[str]:
    for key in [*there, *(key for key in here if key not in there)]:
        before, after = there.get(key), here.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{path}{key}.")
        elif key not in here or key not in there or before != after:
            then, now = (_shown(values[key]) if key in values else "absent" for values in (there, here))
            yield f"{path}{key} was {then}, is {now}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(words: Sequence[str], separator: str) -> str:
    more = [f"and {len(words) - NUM_SHOWN} more"] if len(words) > NUM_SHOWN else []
    return separator.join([*words[:NUM_SHOWN], *more])


def _beginning(path: Path, num_bytes: int) -> str:
    """Checksum of a file's first bytes; of a file that cannot be read, empty."""
    digest = hashlib.sha256()
    try:
        with open_plain(path) as file:
            while num_bytes and (block := file.read(min(num_bytes, BLOCK_BYTES))):
                digest.update(block)
                num_bytes -= len(block)
    except (OSError, DocumentError):
        return ""
    return digest.hexdigest()


def told(base: Path, found: Mapping[str, str]) -> str:
    """The changed files of a key in one line, each by its path."""
    return _listed([f"{base / name if base.is_dir() else base} {what}" for name, what in found.items()], ", ")
