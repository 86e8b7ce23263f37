"""Records of files and folders, the places they are named by, and what cannot be read."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nemo_rl_offload.data import records
from nemo_rl_offload.data.records import files_of, read_records, read_section
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.units import MIB

ROWS: list[dict[str, Any]] = [
    {"prompt": f"question {n}", "messages": [{"role": "user", "content": "a\nb"}]} for n in range(5)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(path: Path, split: str | None = None) -> list[Any]:
    return [record.content for record in read_records(path, split)]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "json", "parquet", "arrow"])
def test_kinds_of_files(suffix: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"a.{suffix}", ROWS)
    assert contents(file) == contents(tmp_path) == ROWS
    places = [record.place for record in read_records(file, None)]
    assert all(place.startswith(str(file)) for place in places)
    assert len(set(places)) == 5


def test_arrow_file_format_and_json_lines_under_another_name(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as sink:
        sink.write_table(table)
    assert contents(tmp_path / "a.arrow") == ROWS
    write(tmp_path / "b.jsonl", ROWS).rename(tmp_path / "b.json")
    assert contents(tmp_path / "b.json") == ROWS


def test_bad_lines_are_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n\xff\xfe\n{"a": 2}')
    assert [(record.place, record.content) for record in read_records(file, None)] == [
        (f"{file}:1", {"a": 1}),
        (f"{file}:3", "is not JSON: Expecting value at column 6"),
        (f"{file}:4", "is list, not an object with keys"),
        (f"{file}:5", "is not UTF-8 text"),
        (f"{file}:6", {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": "b\\ud800c"}', r"has '\ud800', half of a character, which is no UTF-8 text"),
        ('{"a": {"\\uDFFF": 1}}', r"has '\udfff', half of a character, which is no UTF-8 text"),
        ("[" * 100_000, "is nested over 100 levels deep"),
        ('{"a": ' + "1" * 5000 + "}", "has an integer of over 100 digits"),
    ],
    ids=["surrogate", "key", "nested", "digits"],
)
def test_odd_lines_are_bad_records(line: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"a": "\\ud83d\\ude00"}}\n{line}\n')
    good, bad = read_records(file, None)
    assert good.content == {"a": "\N{GRINNING FACE}"}
    assert bad.place == f"{file}:2"
    assert str(bad.content).startswith(reason)


def test_half_a_character_in_a_list_is_one_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"a": "\ud800"}, {"a": "b"}]))
    assert contents(tmp_path) == [r"has '\ud800', half of a character, which is no UTF-8 text", {"a": "b"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", '{"a": 1}\n{"a": 1}\n'), ("a.json", '{"a": 1}\n{"a": 1}\n'), ("a.json", '[{"a": 1},\n{"a": 1}]')],
)
def test_byte_order_marks_are_left_out(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert contents(tmp_path) == [{"a": 1}, {"a": 1}]


def test_one_object_in_one_line_is_one_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}\n')
    assert contents(tmp_path) == [{"a": 1}]


def test_a_pipe_is_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl is neither a file nor a folder\. Write the data to a file first"):
        read_records(tmp_path / "a.jsonl", None)


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("name", ["b.jsonl", "b.parquet", "b.arrow", "data/b.json", "train/b.jsonl"])
@pytest.mark.parametrize("target", [None, "/dev/zero", "nothing"])
def test_strange_things_in_a_folder_are_refused_by_name(target: str | None, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path.parent / "a.jsonl", ROWS)
    os.mkfifo(path) if target is None else path.symlink_to(target)
    for read in (read_records, files_of):
        with pytest.raises(DataError, match=f"{name} is neither a file nor a folder"):
            read(tmp_path, None if path.parent.name != "train" else "train")


@pytest.mark.usefixtures("never_waits")
@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "dataset_info.json"])
def test_strange_things_in_a_folder_that_datasets_saved(name: str, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / name).unlink()
    os.mkfifo(tmp_path / "saved" / name)
    with pytest.raises(DataError, match=f"{name} is neither a file nor a folder"):
        read_records(tmp_path / "saved", None)


def test_folders_of_a_hub_data_set(tmp_path: Path) -> None:
    for name, rows in (
        ("train-00000-of-00002", ROWS[:2]),
        ("train-00001-of-00002", ROWS[2:4]),
        ("test-00000-of-00001", ROWS[4:]),
    ):
        write(tmp_path / "data" / f"{name}.parquet", rows)
    (tmp_path / "README.md").write_text("card")
    assert contents(tmp_path, "train") == ROWS[:4]
    assert contents(tmp_path, "test") == ROWS[4:]
    with pytest.raises(DataError, match=r"holds the splits test, train\. Choose one with the key split"):
        read_records(tmp_path, None)
    with pytest.raises(DataError, match="holds the splits test, train, and no 'dev'"):
        read_records(tmp_path, "dev")


@pytest.mark.parametrize(
    ("names", "are_splits"), [(("train", "test"), True), (("train", "extra"), False), (("a", "b"), False)]
)
def test_files_called_as_splits_are_not_joined(names: tuple[str, ...], are_splits: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    if are_splits:
        with pytest.raises(DataError, match=r"holds the splits test, train\. Choose one with the key split"):
            read_records(tmp_path, None)
        assert contents(tmp_path, "train") == [{"prompt": "train"}]
    else:
        assert contents(tmp_path) == [{"prompt": name} for name in sorted(names)]


@pytest.mark.parametrize("names", [("train_sft", "test_sft"), ("gsm8k_Train", "gsm8k_Test"), ("train-1", "test")])
def test_splits_are_told_by_a_word_of_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    with pytest.raises(DataError, match="Choose one with the key split"):
        read_records(tmp_path, None)


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    whole = Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": whole.shuffle(seed=1), "test": whole.select([1])}).save_to_disk(str(tmp_path / "several"))
    assert contents(tmp_path / "one") == ROWS
    assert contents(tmp_path / "several", "test") == ROWS[1:2]
    assert sorted(row["prompt"] for row in contents(tmp_path / "several", "train")) == [row["prompt"] for row in ROWS]
    with pytest.raises(DataError, match="holds the splits test, train"):
        read_records(tmp_path / "several", None)
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(DataError, match="datasets cannot load it"):
        read_records(tmp_path / "one", None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"a,b", r"unknown kind of file\. It must end in one of \.jsonl"),
        ("a.parquet", b"nothing", "a.parquet cannot be read: "),
        ("a.arrow", b"nothing at all", "a.arrow cannot be read: "),
        ("a.json", b"[{]", "a.json cannot be read: "),
        ("a.json", b"[" * 100_000, "a.json cannot be read: is nested over 100 levels deep"),
        ("a.json", b'{"data": [\n{}\n]\n}', r"a\.json holds one object with data\. Give a list of records, \[{"),
        ("folder/readme", b"", r"folder holds no data\. Files end in"),
    ],
)
def test_what_cannot_be_read(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read_records(tmp_path / name.split("/")[0], None)


def test_a_folder_for_each_split(tmp_path: Path) -> None:
    for name, part in (("train", ROWS[:3]), ("test", ROWS[3:])):
        for number, rows in enumerate((part[:1], part[1:])):
            write(tmp_path / name / f"{number:04}.parquet", rows)
    (tmp_path / "images").mkdir()
    assert contents(tmp_path, "train") == ROWS[:3]
    assert contents(tmp_path, "test") == ROWS[3:]
    with pytest.raises(DataError, match=r"holds the splits test, train\. Choose one with the key split"):
        contents(tmp_path)
    with pytest.raises(DataError, match="and no 'validation'"):
        contents(tmp_path, "validation")


def test_a_split_of_one_file_has_no_effect(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", ROWS)
    assert len(read_section("data.train", file, "foo")) == 5
    assert len(read_section("data.train", tmp_path, "train")) == 5
    with pytest.raises(DataError, match=r"data\.train\.path: .* and no 'foo'"):
        read_section("data.train", tmp_path, "foo")


READ = """
import resource, sys
from pathlib import Path
from nemo_rl_offload.data import records
from nemo_rl_offload.errors import DataError
records.free_host_bytes = lambda: int(sys.argv[2]) << 20
before = resource.getrlimit(resource.RLIMIT_DATA)
try:
    records.read_records(Path(sys.argv[1]), None)
except DataError as error:
    print(error)
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def gzip_bomb(file: Path) -> None:
    with gzip.open(file, "wb", compresslevel=1) as lines:
        lines.write((json.dumps({"prompt": "x" * MIB}) + "\n").encode() * 200)


def dictionary_bomb(file: Path) -> None:
    """Its footer tells of one value."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 600, pa.int32()), ["x" * MIB])
    pq.write_table(pa.table({"prompt": values}), file, store_schema=False)
    assert pq.read_metadata(file).row_group(0).total_byte_size < 2 * MIB


def footer_bomb(file: Path) -> None:
    with pq.ParquetWriter(
        file, pa.schema([("prompt", pa.string())]), compression="zstd", use_dictionary=False
    ) as writer:
        writer.write_table(pa.table({"prompt": ["x" * 200 * MIB]}))


def rows_bomb(file: Path) -> None:
    with pq.ParquetWriter(file, pa.schema([("prompt", pa.null())])) as writer:
        writer.write_table(pa.table({"prompt": pa.nulls(1_000_000)}))


def arrow_bomb(file: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(file, pa.schema([("prompt", pa.string())]), options=options) as writer:
        writer.write_batch(pa.record_batch({"prompt": ["x" * 600 * MIB]}))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "make", "free_mib"),
    [
        ("a.jsonl.gz", gzip_bomb, 64),
        ("a.parquet", dictionary_bomb, 512),  # the stacks of its threads count too
        ("a.parquet", footer_bomb, 64),
        ("a.parquet", rows_bomb, 64),
        ("a.arrow", arrow_bomb, 512),
    ],
)
def test_kilobytes_that_become_much(name: str, make: Callable[[Path], None], free_mib: int, tmp_path: Path) -> None:
    """In a process of its own: one that has used and freed memory before may use that again."""
    make(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 8 * MIB
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), str(free_mib)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"its records take more than {free_mib // 2}" in done.stdout
    assert "half of the memory that is free here" in done.stdout


@pytest.mark.slow
def test_what_a_footer_tells_is_known_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (footer_bomb, rows_bomb):
        make(tmp_path / "a.parquet")
        monkeypatch.setattr(records, "free_host_bytes", lambda: 64 * MIB)
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *_: pytest.fail("it is read"))
        with pytest.raises(DataError, match="its records take more than 32"):
            read_records(tmp_path, None)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_batches_make_one_row_of_records(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "BATCH_ROWS", 2)
    file = write(tmp_path / f"a.{suffix}", ROWS)
    assert [(record.place, record.content) for record in read_records(file, None)] == [
        (f"{file}: row {number}", row) for number, row in enumerate(ROWS, start=1)
    ]
