"""Records of data sets on disk: JSON lines, JSON, Parquet and Arrow files, folders of them, and saved `datasets`.

Everything is read at once, into plain dictionaries: simple, and exact counts of what is bad are known before training.
The limit is host memory: about twice the files' text. A line that is longer than any record, or that would become many
times its text, is a bad record and never held.

Files may be packed, and kilobytes become terabytes: by gzip, by Parquet's and Arrow's compression, by Parquet's
dictionaries. What a Parquet file says of its size is compared before it is read, but leaves out the dictionaries, and
may be a lie. So the kernel refuses this process more than a share of the free memory while it reads, whatever the kind;
and Parquet and Arrow are read in batches.
"""

import codecs
import gzip
import json
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from nemo_rl_offload.errors import DataError
from nemo_rl_offload.offload.host_memory import free_host_bytes
from nemo_rl_offload.specs.documents import (
    TOO_LONG_A_LINE,
    DocumentError,
    bounded_lines,
    open_plain,
    parse_json,
    read_text,
)
from nemo_rl_offload.specs.process_limits import memory_at_most
from nemo_rl_offload.units import GIB, human_bytes

if TYPE_CHECKING:
    import pyarrow as pa

LINE_SUFFIXES = (".jsonl", ".ndjson")
PACKED_LINES = ".jsonl.gz"
SUFFIXES = (*LINE_SUFFIXES, PACKED_LINES, ".json", ".parquet", ".arrow")
JSON_BYTES = 1 * GIB
"""Of a `.json` file, which is read as a whole."""
SHARE_OF_MEMORY = 0.5
"""What records may take of the free memory; the samples that are made of them need the rest."""
ROW_BYTES = 200
"""Of a record without anything in it, at least."""
BATCH_ROWS = 1000
NUM_SHOWN = 5
_SAVED = "state.json"
"""In a folder that `datasets` saved."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.\w+")
_SPLIT_NAMES = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character in JSON; UTF-8 text has none unescaped."""


@dataclass(frozen=True)
class Record:
    """One record; ``content`` is text that says what is wrong where it cannot be read."""

    place: str
    """File and line, counted from 1."""
    content: dict[str, object] | str


def read_records(path: Path, split: str | None) -> list[Record]:
    """Read the records of a file or a folder.

    A folder is one that `datasets` saved, or holds data files, or has them in a folder `data` or in one folder for each
    split. Where it holds several splits (`train-00000-of-00001.parquet`, `train/0000.parquet`, or a saved dictionary of
    splits), ``split`` names one.

    Raises:
        DataError: nothing to read there, or a file that cannot be read at all.
    """
    files = files_of(path, split)
    _import_readers(files)
    allowed_bytes = int(free_host_bytes() * SHARE_OF_MEMORY)
    try:
        with memory_at_most(allowed_bytes):
            if path.is_dir() and files[0].name == _SAVED:
                return list(_read_saved(files[0].parent))
            return [record for file in files for record in _read_file(file, allowed_bytes)]
    except MemoryError as error:
        raise DataError(_too_large(path, allowed_bytes)) from error


def _import_readers(files: Sequence[Path]) -> None:
    """Before memory is limited: libraries that find none as they start end the process."""
    if any(file.name == _SAVED for file in files):
        import_module("datasets")
    elif any(file.suffix in (".parquet", ".arrow") for file in files):
        import_module("pyarrow.parquet")


def files_of(path: Path, split: str | None) -> list[Path]:
    """The files that `read_records` reads. Raises DataError as it does."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder. Write the data to a file first.")
    if (path / "dataset_dict.json").is_file():
        folders = {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}
        path = folders[_chosen_split(path, split, list(folders))]
    if (path / _SAVED).is_file():
        _refuse_strange(path.iterdir())  # `datasets` would wait for a pipe
        return [path / _SAVED, *sorted(path.glob("*.arrow"))]
    return _data_files(path, split)


def read_section(name: str, path: Path, split: str | None) -> list[Record]:
    """`read_records` for the section ``name``, whose key messages begin with."""
    try:
        return read_records(path, split)
    except DataError as error:
        raise DataError(f"{name}.path: {error}") from error


def report_bad_records(name: str, bad: Sequence[tuple[str, str]], *, num_good: int, skips_bad: bool) -> None:
    """Warn about records that are left out (`data.on_bad_line: skip`), once, with how many there are for each reason.
    An error has each reason once, with the first places. Both are in the files' order.

    Args:
        name: the section that they come from.
        bad: place and reason of each.
        num_good: how many can be used.
        skips_bad: whether bad ones are to be left out.

    Raises:
        DataError: they are not to be left out, or nothing would remain.
    """
    if not bad:
        return
    bad = sorted(bad, key=lambda each: _in_file(each[0]))
    if not skips_bad or not num_good:
        places: dict[str, list[str]] = {}
        for place, reason in bad:
            places.setdefault(reason, []).append(place)
        shown = [f"{_joined(each)}: {reason}" for reason, each in list(places.items())[:NUM_SHOWN]]
        others = sum(len(each) for each in list(places.values())[NUM_SHOWN:])
        more = f"\n... and {others} more, for other reasons" if others else ""
        remedy = "; data.on_bad_line=skip leaves out what is bad, as long as something is left."
        if skips_bad:
            remedy = ": without them, nothing is left for training, or for validation."
        raise DataError(f"{name}: {len(bad)} record(s) cannot be used\n{'\n'.join(shown)}{more}\nMend the data{remedy}")
    numbers = Counter(reason for _, reason in bad)
    first = {reason: place for place, reason in reversed(bad)}
    shown = [f"{num} from {first[reason]} on: {reason}" for reason, num in numbers.most_common(NUM_SHOWN)]
    others = sum(numbers.values()) - sum(num for _, num in numbers.most_common(NUM_SHOWN))
    more = f"; and {others} for other reasons" if others else ""
    warnings.warn(f"{name}: left {len(bad)} bad record(s) out; {'; '.join(shown)}{more}", stacklevel=2)


def _in_file(place: str) -> tuple[str, int]:
    """The file, and the number of a line, item or row in it."""
    start = place.rstrip("0123456789")
    return start, int(place[len(start) :] or 0)


def _joined(places: Sequence[str]) -> str:
    """The first places, of one file with its name once, and how many more."""
    first, *others = places[:NUM_SHOWN]
    start = first.rstrip("0123456789")
    numbers = [place.removeprefix(start) for place in others]
    more = f" and {len(places) - NUM_SHOWN} more" if len(places) > NUM_SHOWN else ""
    return ", ".join([first, *numbers]) + more


def _data_files(folder: Path, split: str | None) -> list[Path]:
    files = [file for file in sorted(folder.iterdir()) if _kind(file) in SUFFIXES]
    _refuse_strange(files)
    if not files and (folder / "data").is_dir():
        return _data_files(folder / "data", split)
    if not files and (inner := _folders_with_data(folder)):
        return _data_files(inner[_chosen_split(folder, split, list(inner))], None)
    if not files:
        raise DataError(f"{folder} holds no data. Files end in one of {', '.join(SUFFIXES)}.")
    names = {
        file: match[1] if (match := _SHARD.fullmatch(file.name)) else file.name.removesuffix(_kind(file))
        for file in files
    }
    splits = sorted(set(names.values()))
    named = {word for name in splits for word in re.split("[^a-z]+", name.lower()) if word in _SPLIT_NAMES}
    are_splits = len(named) > 1 or any(_SHARD.fullmatch(file.name) for file in files)
    if split is None and not (are_splits and len(splits) > 1):
        return files
    chosen = _chosen_split(folder, split, splits)
    return [file for file in files if names[file] == chosen]


def _refuse_strange(files: Iterable[Path]) -> None:
    """Raise DataError for what may never end, as a pipe or a device, and for a link to nowhere."""
    for file in files:
        if not (file.is_file() or file.is_dir()):
            raise DataError(f"{file} is neither a file nor a folder. Write the data to a file first.")


def _folders_with_data(folder: Path) -> dict[str, Path]:
    """Subfolders by name, each the files of a split."""
    folders = [inner for inner in sorted(folder.iterdir()) if inner.is_dir()]
    return {inner.name: inner for inner in folders if any(_kind(file) in SUFFIXES for file in inner.iterdir())}


def _chosen_split(folder: Path, split: str | None, splits: list[str]) -> str:
    if split in splits:
        return split
    there = f"{folder} holds the splits {', '.join(splits)}"
    raise DataError(f"{there}. Choose one with the key split." if split is None else f"{there}, and no '{split}'.")


def _kind(file: Path) -> str:
    return PACKED_LINES if file.name.endswith(PACKED_LINES) else file.suffix


def _too_large(path: Path, allowed_bytes: int) -> str:
    return (
        f"{path} cannot be read: its records take more than {human_bytes(allowed_bytes)}, half of the memory that is "
        "free here. Give fewer records, or a machine with more memory."
    )


def _read_file(file: Path, allowed_bytes: int) -> Iterator[Record]:
    try:
        if _kind(file) in (*LINE_SUFFIXES, PACKED_LINES):
            yield from _read_lines(file)
        elif file.suffix == ".json":
            yield from _read_json(file)
        elif file.suffix in (".parquet", ".arrow"):
            yield from _read_table(file, allowed_bytes)
        else:
            raise DataError(f"{file}: unknown kind of file. It must end in one of {', '.join(SUFFIXES)}.")
    except DocumentError as error:
        place = "" if error.line is None else f"line {error.line}: "
        raise DataError(f"{file} cannot be read: {place}{error.reason}") from error
    except (OSError, ValueError, EOFError, zlib.error) as error:  # pyarrow's errors are ValueErrors
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read: {error}") from error


def _read_lines(file: Path) -> Iterator[Record]:
    with (
        open_plain(file) as opened,
        gzip.GzipFile(fileobj=opened) if _kind(file) == PACKED_LINES else nullcontext(opened) as lines,
    ):
        for number, line in enumerate(bounded_lines(cast("BinaryIO", lines)), start=1):
            if line is None:
                yield Record(f"{file}:{number}", TOO_LONG_A_LINE)
            elif content := line.removeprefix(codecs.BOM_UTF8).strip():
                yield Record(f"{file}:{number}", _parse(content))


def _parse(line: bytes) -> dict[str, object] | str:
    try:
        text = line.decode()
        return _checked(parse_json(text), may_be_cut=bool(_SURROGATE.search(text)))
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except DocumentError as error:
        return error.reason


def _checked(content: object, *, may_be_cut: bool) -> dict[str, object] | str:
    """The record, or what is wrong with it: such as half of a character where there ``may_be_cut`` ones."""
    if not isinstance(content, dict):
        return f"is {type(content).__name__}, not an object with keys"
    if may_be_cut:
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"has {error.object[error.start]!r}, half of a character, which is no UTF-8 text"
    return content


def _read_json(file: Path) -> Iterator[Record]:
    """A list of objects, or JSON lines under the wrong name."""
    text = read_text(file, JSON_BYTES).removeprefix("\ufeff").strip()
    is_list = text.startswith("[")
    try:
        content = parse_json(text, max_values=sys.maxsize)
    except DocumentError as error:
        if is_list:
            raise DocumentError(error.reason, file, error.line) from error
    else:
        if isinstance(content, dict) and "\n" in text:
            keys = ", ".join(content) or "no key"
            raise DataError(
                f"{file} holds one object with {keys}. Give a list of records, [{{...}}, ...], or JSON lines."
            )
    if not is_list:
        yield from _read_lines(file)
        return
    may_be_cut = bool(_SURROGATE.search(text))
    for number, item in enumerate(content, start=1):
        yield Record(f"{file}: item {number}", _checked(item, may_be_cut=may_be_cut))


def _read_table(file: Path, allowed_bytes: int) -> Iterator[Record]:
    with open_plain(file) as opened:
        batches = _parquet_batches(opened, allowed_bytes) if file.suffix == ".parquet" else _arrow_batches(opened)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, content in enumerate(rows, start=1):
            yield Record(f"{file}: row {number}", content)


def _parquet_batches(opened: BinaryIO, allowed_bytes: int) -> "Iterator[pa.RecordBatch]":
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(opened)
    groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
    if sum(max(group.total_byte_size, group.num_rows * ROW_BYTES) for group in groups) > allowed_bytes:
        raise MemoryError
    yield from parquet.iter_batches(BATCH_ROWS)


def _arrow_batches(opened: BinaryIO) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    is_file = opened.read(6) == b"ARROW1"
    opened.seek(0)
    if is_file:
        reader = pa.ipc.open_file(opened)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(opened)


def _read_saved(folder: Path) -> Iterator[Record]:
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: datasets cannot load it: {error}") from error
    for number, content in enumerate(dataset, start=1):
        yield Record(f"{folder}: row {number}", content)
