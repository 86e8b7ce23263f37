"""Descriptions and entries of checkpoints: torch's and Megatron's own are read as they read them, others refused."""

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import safe_globals
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_rl_offload.megatron.checkpoint.contents import read_archive, read_metadata, rewritten_extra_state
from nemo_rl_offload.megatron.checkpoint.restricted_pickle import ForbiddenNameError, UnreadableError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


class Gadget:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch canary",)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read(data: bytes) -> Any:
    return read_archive(io.BytesIO(data), len(data))


def repacked(data: bytes, **changes: bytes | None) -> bytes:
    """The archive with other parts, by their names with `_` for `.` and `/`; None: without one."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            key = name.removeprefix("archive/").replace(".", "_").replace("/", "_")
            content = changes.get(key, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_what_was_saved(dtype: torch.dtype) -> None:
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    for tensor in (whole, whole[1:3, ::2], whole.T, whole[0, 0], whole[:0], torch.zeros(0, 5, dtype=dtype)):
        found = read(saved(tensor))
        assert torch.equal(found, tensor)
        assert (found.dtype, found.stride()) == (dtype, tensor.stride())


def test_values_are_what_was_saved() -> None:
    shared = torch.arange(3.0)
    value = [{"a": [1, 2.5, None, "x", True], "b": OrderedDict(c=(1, 2))}, torch.float32, shared, shared[1:]]
    found = read(saved(value))
    assert found[:2] == value[:2]
    assert torch.equal(found[2], shared)
    assert found[3].data_ptr() == found[2].data_ptr() + 4


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (saved(Gadget()), "posix.system"),
        (saved([{"a": Gadget()}]), "posix.system"),
        (saved(io.BytesIO(b"x")), "_io.BytesIO"),
        (saved(torch.nn.Linear(1, 1)), "torch.nn.modules.linear.Linear"),
        (saved(torch.nn.Parameter(torch.ones(1))), "torch._utils._rebuild_parameter"),
        (saved(torch.eye(2).to_sparse()), "torch._utils._rebuild_sparse_tensor"),
        (saved(torch.Generator()), "torch._C.Generator"),
    ],
)
def test_other_names_are_refused(data: bytes, name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForbiddenNameError, match=f"^{name}$"):
        read(data)
    assert list(tmp_path.iterdir()) == []


def tensor_pickle(size: str, stride: str, *, offset: int = 0, num_elements: int = 4) -> bytes:
    """A pickled tensor; size and stride are instructions."""
    return b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(",
            b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu",
            b"J" + num_elements.to_bytes(4, "little", signed=True) + b"tQ",
            b"J" + offset.to_bytes(4, "little", signed=True),
            size.encode("latin-1") + stride.encode("latin-1"),
            b"\x89ccollections\nOrderedDict\n)RtR.",
        ]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "K\x05\x85"}, "larger than what is stored"),
        ({"offset": 2}, "out of bounds|beyond the end"),
        ({"offset": -1}, "makes no sense"),
        ({"stride": "K\x09\x85"}, "out of bounds|beyond the end"),
        ({"size": "J\xff\xff\xff\xff\x85"}, "no list of numbers"),
        ({"size": "\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01\x85"}, "no list of numbers"),
        ({"size": "X\x01\x00\x00\x00x\x85"}, "no list of numbers"),
        ({"size": "]"}, "no list of numbers"),
        ({"num_elements": 5}, "another size"),
        ({"num_elements": 1 << 30}, "another size"),
        ({"num_elements": -1}, "another size"),
    ],
)
def test_a_tensor_stays_within_its_bytes(changes: dict[str, Any], message: str) -> None:
    data = saved(torch.arange(4.0))
    plain = {"size": "K\x04\x85", "stride": "K\x01\x85"}
    assert torch.equal(read(repacked(data, data_pkl=tensor_pickle(**plain))), torch.arange(4.0))
    with pytest.raises(UnreadableError, match=message):
        read(repacked(data, data_pkl=tensor_pickle(**plain | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_pkl": None}, "no archive of torch"),
        ({"data_0": None}, "instruction or place 'archive/data/0'"),
        ({"data_0": b"short"}, "another size"),
        ({"byteorder": b"big"}, "another kind of machine"),
        ({"data_pkl": b""}, "ends too early"),
    ],
)
def test_damaged_archives(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        read(repacked(saved(torch.ones(4)), **changes))


def test_each_flipped_bit_of_an_archive_is_refused_or_means_nothing() -> None:
    tensor = torch.arange(8.0)
    data = saved(tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        num_read = sum(len(archive.read(f"archive/{name}")) for name in ("data.pkl", "data/0", "byteorder"))
    num_refused = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        try:
            found = read(bytes(changed))
        except (UnreadableError, ForbiddenNameError):
            num_refused += 1
        else:
            assert torch.equal(found, tensor)
    assert num_refused > num_read


def test_packed_parts_are_no_bombs() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))
    with pytest.raises(UnreadableError, match="an archive that torch does not write"):
        read(stream.getvalue())


@pytest.mark.parametrize("legacy", [False, True])
def test_other_formats_of_torch(legacy: bool) -> None:
    stream = io.BytesIO()
    if legacy:
        torch.save(Gadget(), stream, _use_new_zipfile_serialization=False)
    else:
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), stream)
    with pytest.raises((UnreadableError, ForbiddenNameError)):
        read(stream.getvalue())


def description() -> Metadata:
    properties = TensorProperties(dtype=torch.bfloat16)
    chunks = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([2, 3])) for start in (0, 2)]
    places = {
        MetadataIndex("w", torch.Size([start, 0]), index): _StorageInfo(f"__{index}_0.distcp", 10, 20)
        for index, start in enumerate((0, 2))
    }
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties, torch.Size([4, 3]), chunks),
            "b": BytesStorageMetadata(),
        },
        storage_data=places | {MetadataIndex("b"): _StorageInfo("__0_0.distcp", 30, 5)},
        storage_meta=StorageMeta("somewhere", "id"),
        version="1.0.0",
    )


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_description_is_what_was_written(protocol: int) -> None:
    expected = description()
    found = read_metadata(pickle.dumps(expected, protocol))
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


def first(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.storage_data.pop(MetadataIndex("b")), "the parts of 'b' and the places"),
        (lambda m: m.storage_data.update({MetadataIndex("c"): _StorageInfo("x", 0, 1)}), "the parts of 'c' and"),
        (lambda m: m.storage_data.update({"b": 1}), "the place of something"),
        (lambda m: setattr(first(m), "offset", -1), "the place of 'w' cannot be"),
        (lambda m: setattr(first(m), "offset", 30), "the place of 'b' cannot be"),
        (lambda m: setattr(first(m), "offset", "1"), "a _StorageInfo has 'offset' of str"),
        (lambda m: setattr(first(m), "length", 0), "the place of 'w' cannot be"),
        (lambda m: setattr(first(m), "transform_descriptors", ["zstd"]), "'transform_descriptors' of list"),
        (lambda m: setattr(first(m), "more", 1), "a _StorageInfo has 'more' of int"),
        (lambda m: setattr(m, "storage_data", None), "a Metadata has 'storage_data' of NoneType"),
        (lambda m: m.state_dict_metadata["w"].chunks.pop(), "the parts of 'w' are not the whole"),
        (lambda m: m.state_dict_metadata["w"].chunks.append(3), "it makes no sense"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([3, 3])), "a part of 'w' is outside"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([4])), "a part of 'w' is outside"),
        (lambda m: setattr(m.state_dict_metadata["w"].chunks[1], "offsets", torch.Size([0, 0])), "not the whole"),
        (lambda m: m.state_dict_metadata.update({"x": 3}), "'x' is neither a tensor nor bytes"),
        (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "'3' is neither"),
    ],
)
def test_a_description_that_cannot_be(change: Any, message: str) -> None:
    metadata = description()
    change(metadata)
    with pytest.raises(UnreadableError, match=message):
        read_metadata(pickle.dumps(metadata))


def test_a_description_without_its_fields() -> None:
    for empty in (Metadata, TensorStorageMetadata, MetadataIndex, _StorageInfo):
        metadata = description()
        if empty is Metadata:
            metadata = object.__new__(Metadata)
        elif empty is TensorStorageMetadata:
            metadata.state_dict_metadata["w"] = object.__new__(empty)
        elif empty is MetadataIndex:
            metadata.storage_data = {3: object.__new__(empty)}
        else:
            metadata.storage_data[MetadataIndex("b")] = object.__new__(empty)
        with pytest.raises(UnreadableError):
            read_metadata(pickle.dumps(metadata))


def test_code_in_a_description(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metadata = description()
    metadata.planner_data = Gadget()
    with pytest.raises(ForbiddenNameError, match=r"^posix\.system$"):
        read_metadata(pickle.dumps(metadata))
    assert list(tmp_path.iterdir()) == []


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Of numbers with 8 bits, as Transformer Engine has it."""

    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclass(frozen=True)
class QParams:
    """As there."""

    power_2_scale: bool = False


class Recipe:
    """As there."""

    _cached_repr: str | None = None


@dataclass
class DelayedScaling(Recipe):
    """As there."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_compute_algo: Any = "max"
    later = QParams()

    def __post_init__(self) -> None:
        self.later = QParams(power_2_scale=True)
        self._cached_repr = "text"


RECIPES = "transformer_engine.common.recipe"


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes like those of Transformer Engine, under its names."""
    classes = (_FormatHelper, Format, QParams, DelayedScaling)
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.common", RECIPES)}
    for kind in classes:
        monkeypatch.setattr(kind, "__module__", RECIPES)
        setattr(modules[RECIPES], kind.__name__, kind)
    modules["transformer_engine"].common = modules["transformer_engine.common"]  # type: ignore[attr-defined]
    modules["transformer_engine.common"].recipe = modules[RECIPES]  # type: ignore[attr-defined]
    megatron = "megatron.core.extensions.transformer_engine"
    for name, module in {**modules, megatron: ModuleType(megatron)}.items():
        monkeypatch.setitem(sys.modules, name, module)


def extra_state() -> dict[str, Any]:
    return {
        "recipe": DelayedScaling(margin=2, fp8_format=Format.E4M3),
        "scale_fwd": torch.arange(3.0),
        "amax_history_fwd": torch.arange(6.0).reshape(2, 3),
        "extra_fp8_variables": {"num_gemms": 1, "names": ("a", "b"), "fp8_checkpoint": True},
    }


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")],
)
def test_what_a_layer_unpickles_is_written_anew(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=False)

    load.__module__, load.__qualname__ = module, name
    monkeypatch.setattr(safe_globals, "safe_load_from_bytes", load)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", load)
    data = pickle.dumps(extra_state())
    again = pickle.loads(rewritten_extra_state(data))
    assert again["recipe"] == extra_state()["recipe"]
    assert again["recipe"].later == QParams(power_2_scale=True)
    assert again["extra_fp8_variables"] == extra_state()["extra_fp8_variables"]
    for name in ("scale_fwd", "amax_history_fwd"):
        assert torch.equal(again[name], extra_state()[name])


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("place", ["whole", "value", "attribute", "storage", "method"])
def test_code_that_a_layer_would_unpickle(place: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state: Any = extra_state()
    if place == "whole":
        state = Gadget()
    elif place == "value":
        state["extra_fp8_variables"]["x"] = Gadget()
    elif place == "attribute":
        state["recipe"].amax_compute_algo = os.system
    elif place == "method":
        state["recipe"].__dict__["__post_init__"] = "text"
    data = pickle.dumps(state)
    if place == "storage":
        stream = io.BytesIO()
        torch.save(Gadget(), stream, _use_new_zipfile_serialization=False)
        inner = stream.getvalue()
        call = b"\x80\x02ctorch.storage\n_load_from_bytes\nB" + len(inner).to_bytes(4, "little") + inner + b"\x85R."
        data = call
    with pytest.raises((ForbiddenNameError, UnreadableError)):
        rewritten_extra_state(data)
    assert list(tmp_path.iterdir()) == []
