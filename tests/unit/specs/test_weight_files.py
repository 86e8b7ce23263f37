"""Files of weights that are not what they say: one message each, at once, and no memory taken for what is not there."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from patience import within_patience
from safetensors.torch import save_file

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.weight_files import INDEX, MAX_HEADER_BYTES, WHOLE, weight_files

BODY = bytes(8)


def with_header(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def of(*entries: dict[str, object], body: bytes = BODY) -> bytes:
    return with_header(json.dumps(dict(zip("ab", entries, strict=False))).encode(), body)


TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)
HOSTILE = {
    "empty": b"",
    "short": b"abc",
    "a huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "a header beyond the end": struct.pack("<Q", 5000) + b"{}",
    "a header of 90 MB": struct.pack("<Q", 90_000_000) + b"{" + b" " * 89_999_998 + b"}",
    "no JSON": with_header(b"hello   "),
    "a list": with_header(b"[]"),
    "null": with_header(b"null"),
    "deep": with_header(b'{"a":' * 100_000),
    "deep lists": with_header(b"[" * 100_000),
    "an integer of 5,000 digits": with_header(
        b'{"a":{"dtype":"F32","shape":[' + b"1" * 5000 + b'],"data_offsets":[0,8]}}'
    ),
    "no text": with_header(b'{"\xff":1}'),
    "a negative shape": of(entry(shape=[-2])),
    "a broken shape": of(entry(shape=[2.5])),
    "a shape that overflows": of(entry(shape=[1 << 63, 1 << 63])),
    "a large shape": of(entry(shape=[1 << 40])),
    "another type": of(entry(dtype="X9")),
    "no type": of(entry(dtype=None)),
    "nothing in an entry": of({}),
    "an overlap": of(entry(), entry()),
    "a hole": of(entry(), entry(data_offsets=[16, 24]), body=bytes(24)),
    "outside": of(entry(data_offsets=[8, 16])),
    "a negative place": of(entry(data_offsets=[-8, 0])),
    "backwards": of(entry(data_offsets=[8, 0])),
    "too short": of(entry(), body=BODY[:4]),
    "too long": of(entry(), body=bytes(100)),
    "a name twice": with_header(TWICE, BODY),
    "a name twice, of two places": with_header(TWICE.replace(b"[0, 8]", b"[8, 16]", 1), bytes(16)),
}


def refused(folder: Path, start: str) -> str:
    tracemalloc.start()
    with within_patience(), pytest.raises(ConfigError) as caught:
        weight_files(folder, is_quantized=False)
    assert tracemalloc.get_traced_memory()[1] < 2 * MAX_HEADER_BYTES
    tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith(start)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_not_what_it_says(what: str, tmp_path: Path) -> None:
    (tmp_path / WHOLE).write_bytes(HOSTILE[what])
    refused(tmp_path, f"{tmp_path / WHOLE}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "3", "{}", '{"weight_map": null}', '{"weight_map": []}', "[" * 100_000, '{"a":' * 100_000),
        '{"weight_map": {"a": ' + "1" * 5000 + "}}",
        *(f'{{"weight_map": {{"a": {value}}}}}' for value in ("3", "null", '["x"]', '"../x"', '"/etc/passwd"', '""')),
        *(f'{{"weight_map": {{"a": {value}}}}}' for value in ('"."', '".."', '"a/b"', '"a\\u0000b"', f'"{INDEX}"')),
        '{"weight_map": {"a": "x", "b": 3}}',
    ],
)
def test_an_index_that_is_not_what_it_says(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    (tmp_path.parent / "x").write_bytes(of(entry()))
    refused(tmp_path, f"{tmp_path / INDEX}")


def test_an_index_names_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 1000}}))
    assert "names are not there" in refused(tmp_path, f"{tmp_path}: ")
    (tmp_path / INDEX).open("wb").truncate(1 << 40)
    assert "such a file has at most 64.0 MiB" in refused(tmp_path, f"{tmp_path / INDEX}")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model-00001-of-00001.safetensors")
    refused(tmp_path, f"{tmp_path / 'model-00001-of-00001.safetensors'}: is no file")


def test_links_to_files_are_followed_as_caches_have_them(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "blobs" / "1234")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / WHOLE).symlink_to(tmp_path / "blobs" / "1234")
    assert weight_files(tmp_path / "model", is_quantized=False) == {"w": WHOLE}
