"""What a checkpoint's pickles may name, and what is made of it.

Each name stands for something that makes plain values and checks its arguments; none looks up an attribute, imports
what a file says, or calls what a file gives it. So a checkpoint is data:

- `.metadata`: torch's descriptions of tensors and of where they are. They are filled with values of the right types
  alone, and say something of sizes, places and names.
- an entry of a `.distcp` file: an archive as `torch.save` writes it, of numbers, texts, lists, dictionaries and
  tensors. A tensor is a view within the bytes that the archive holds for it; the function named `_rebuild_tensor_v2`
  is ours, not torch's, which lets a view grow beyond its bytes.
- what Transformer Engine keeps beside a layer's weights: an array of bytes, which it takes for a pickle and runs. What
  it gets is written anew here from the checked values: a recipe of numbers, formats and texts, and tensors.
"""

import importlib
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_rl_offload.megatron.checkpoint.restricted_pickle import (
    Function,
    Record,
    UnreadableError,
    check_extent,
    unpickle,
)

_NONE = type(None)
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
}
_READ_BYTES = 16 << 20
_LEGACY_MAGIC, _LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""With which torch begins a storage that is pickled outside of an archive."""
_STORAGE_FUNCTIONS = ("torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes")
"""By which such a storage is pickled: torch's, and what Megatron puts in its place when it is imported."""


def _size(sizes: object) -> torch.Size:
    if type(sizes) is not tuple or not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):
        raise UnreadableError("a size is no list of numbers")
    return torch.Size(sizes)


def _layout(name: object) -> torch.layout:
    if name != "torch.strided":
        raise UnreadableError(f"a tensor has the layout {str(name)[:50]}")
    return torch.strided


def _filled(kinds: Mapping[str, type | tuple[type, ...]]) -> Callable[[Any, object], None]:
    def fill(target: Any, content: object) -> None:
        if type(content) is not dict:
            raise UnreadableError(f"a {type(target).__name__} is filled with a {type(content).__name__}")
        for name, value in content.items():
            kind = kinds.get(name)
            if kind is None or type(value) not in (kind if isinstance(kind, tuple) else (kind,)):
                raise UnreadableError(f"a {type(target).__name__} has {str(name)[:50]!r} of {type(value).__name__}")
        target.__dict__.update(content)

    return fill


def _fill_properties(target: TensorProperties, content: object) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(content) is not tuple or tuple(map(type, content)) != kinds:
        raise UnreadableError("a TensorProperties is filled with something else")
    target.__setstate__(content)  # type: ignore[no-untyped-call]


_METADATA = "torch.distributed.checkpoint.metadata."
METADATA_NAMES: Mapping[str, object] = {
    **_DTYPES,
    "torch.Size": Function(_size),
    "torch.serialization._get_layout": Function(_layout),
    f"{_METADATA}_MEM_FORMAT_ENCODING": Function(lambda number: _MEM_FORMAT_ENCODING(number)),
    f"{_METADATA}BytesStorageMetadata": Record(BytesStorageMetadata, _filled({})),
    f"{_METADATA}TensorProperties": Record(TensorProperties, _fill_properties),
    f"{_METADATA}ChunkStorageMetadata": Record(
        ChunkStorageMetadata, _filled({"offsets": torch.Size, "sizes": torch.Size})
    ),
    f"{_METADATA}TensorStorageMetadata": Record(
        TensorStorageMetadata, _filled({"properties": TensorProperties, "size": torch.Size, "chunks": list})
    ),
    f"{_METADATA}MetadataIndex": Record(
        MetadataIndex, _filled({"fqn": str, "offset": (torch.Size, _NONE), "index": (int, _NONE)}), is_key=True
    ),
    f"{_METADATA}StorageMeta": Record(
        StorageMeta,
        _filled(dict.fromkeys(("checkpoint_id", "save_id", "load_id"), (str, _NONE)) | {"modules": list}),
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Record(
        _StorageInfo, _filled({"relative_path": str, "offset": int, "length": int, "transform_descriptors": _NONE})
    ),
    f"{_METADATA}Metadata": Record(
        Metadata,
        _filled(
            {
                "state_dict_metadata": dict,
                "planner_data": (dict, _NONE),
                "storage_data": dict,
                "storage_meta": (StorageMeta, _NONE),
                "version": (str, _NONE),
            }
        ),
    ),
}
"""Of `.metadata`."""


def read_metadata(data: bytes) -> Metadata:
    """The description of a checkpoint, whose chunks are those of its tensors and are somewhere once.

    Raises:
        ForbiddenNameError, UnreadableError: it is something else.
    """
    metadata, _ = unpickle(data, METADATA_NAMES)
    if type(metadata) is not Metadata:
        raise UnreadableError(f"it holds a {type(metadata).__name__}")
    try:
        _check_metadata(metadata)
    except (AttributeError, TypeError) as error:  # a record that was not filled, or with a list of others
        raise UnreadableError(f"it makes no sense: {error}") from error
    metadata.planner_data = None
    metadata.storage_meta = None
    return metadata


def _check_metadata(metadata: Metadata) -> None:
    wanted: set[tuple[str, torch.Size | None]] = set()
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str or type(entry) not in (BytesStorageMetadata, TensorStorageMetadata):
            raise UnreadableError(f"{str(name)[:80]!r} is neither a tensor nor bytes")
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(name, entry)
            wanted |= {(name, chunk.offsets) for chunk in entry.chunks}
        else:
            wanted.add((name, None))
    places: set[tuple[str, int]] = set()
    for index, info in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise UnreadableError("it has the place of something that is no part of a tensor")
        if info.offset < 0 or info.length <= 0 or (info.relative_path, info.offset) in places:
            raise UnreadableError(f"the place of {index.fqn[:80]!r} cannot be")
        places.add((info.relative_path, info.offset))
    found = {(index.fqn, index.offset) for index in metadata.storage_data}
    if wanted != found:
        name = min(name for name, _ in wanted ^ found)
        raise UnreadableError(f"the parts of {name[:80]!r} and the places where they are differ")


def _check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    if type(entry.properties) is not TensorProperties:
        raise UnreadableError(f"{name[:80]!r} has no type")
    for chunk in entry.chunks:
        pairs = zip(chunk.offsets, chunk.sizes, entry.size, strict=False)
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size) or any(
            offset + size > whole for offset, size, whole in pairs
        ):
            raise UnreadableError(f"a part of {name[:80]!r} is outside of it")
    num_elements = sum(prod(chunk.sizes) for chunk in entry.chunks)
    num_places = len({chunk.offsets for chunk in entry.chunks})
    if num_elements != prod(entry.size) or num_places != len(entry.chunks):
        raise UnreadableError(f"the parts of {name[:80]!r} are not the whole")


@dataclass(frozen=True, eq=False)
class _Elements:
    """The name of a storage's type."""

    dtype: torch.dtype


def _rebuild_tensor(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> torch.Tensor:
    """A view of a storage, [elements]; torch raises where it would leave that."""
    if not isinstance(storage, torch.Tensor) or type(offset) is not int or hooks or metadata:
        raise UnreadableError("a tensor is made of something else")
    sizes, strides = _size(size), _size(stride)
    if type(requires_grad) is not bool or prod(sizes) > storage.numel():
        raise UnreadableError("a tensor is larger than what is stored of it")
    return storage.as_strided(sizes, strides, offset)


_STORAGES = {
    f"torch.{name}Storage": _Elements(dtype)
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}
ARCHIVE_NAMES: Mapping[str, object] = {
    **_DTYPES,
    **_STORAGES,
    "torch.Size": Function(_size),
    "collections.OrderedDict": Function(lambda: OrderedDict()),
    "torch._utils._rebuild_tensor_v2": Function(_rebuild_tensor),
}
"""Of the entries of `.distcp` files."""


def read_archive(file: IO[bytes], num_bytes: int) -> object:
    """What `torch.save` wrote: numbers, texts, lists, dictionaries and tensors on the CPU.

    Raises:
        ForbiddenNameError, UnreadableError: it is something else.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _read_archive(archive, num_bytes)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise UnreadableError(f"it is no archive of torch, or is damaged: {str(error)[:200]}") from error


def _read_archive(archive: zipfile.ZipFile, num_bytes: int) -> object:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()) or any(
        info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 for info in members.values()
    ):
        raise UnreadableError("it is an archive that torch does not write")
    (name,) = (name for name in members if name.endswith("/data.pkl"))
    folder = name.removesuffix("data.pkl")
    if (order := members.get(f"{folder}byteorder")) and archive.read(order) != b"little":
        raise UnreadableError("its numbers are of another kind of machine")
    if sum(info.file_size for info in members.values()) > num_bytes:
        raise UnreadableError("its parts are more than the whole")
    storages: dict[str, torch.Tensor] = {}

    def storage(identifier: object) -> torch.Tensor:
        elements, key, num_elements = _storage_of(identifier)
        if key not in storages:
            info = members[f"{folder}data/{key}"]
            if info.file_size != num_elements * elements.dtype.itemsize:
                raise UnreadableError(f"its part {key[:20]!r} has another size")
            storages[key] = _elements(_content(archive, info), elements)
        if storages[key].dtype != elements.dtype:
            raise UnreadableError(f"its part {key[:20]!r} has two types")
        return storages[key]

    value, _ = unpickle(archive.read(members[name]), ARCHIVE_NAMES, storage)
    check_extent(value)
    return value


def _storage_of(identifier: object) -> tuple[_Elements, str, int]:
    if type(identifier) is not tuple or identifier[:1] != ("storage",) or len(identifier) not in (5, 6):
        raise UnreadableError("it refers to something that is no storage")
    elements, key, _, num_elements = identifier[1:5]
    if type(elements) is not _Elements or type(key) is not str or type(num_elements) is not int:
        raise UnreadableError("it refers to something that is no storage")
    return elements, key, num_elements


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytearray:
    """What a part holds; its checksum is compared on the way."""
    content, position = bytearray(info.file_size), 0
    with archive.open(info) as part:
        while block := part.read(_READ_BYTES):
            content[position : position + len(block)] = block
            position += len(block)
    if position != info.file_size:
        raise UnreadableError("it ends too early")
    return content


def _elements(content: bytearray, elements: _Elements) -> torch.Tensor:
    return torch.frombuffer(content, dtype=elements.dtype) if content else torch.empty(0, dtype=elements.dtype)


def _storage_from_bytes(data: object) -> torch.Tensor:
    """A storage that was pickled outside of an archive: five pickles, and the elements."""
    if type(data) is not bytes:
        raise UnreadableError("a storage is made of something else")
    magic, at = unpickle(data, {})
    protocol, at = unpickle(data, {}, start=at)
    _, at = unpickle(data, {}, start=at)
    identifier, at = unpickle(data, _STORAGES, lambda found: found, start=at)
    keys, at = unpickle(data, {}, start=at)
    elements, key, num_elements = _storage_of(identifier)
    num_bytes = num_elements * elements.dtype.itemsize
    if (magic, protocol, keys) != (_LEGACY_MAGIC, _LEGACY_PROTOCOL, [key]):
        raise UnreadableError("a storage is of no form that is known")
    if data[at : at + 8] != num_elements.to_bytes(8, "little") or len(data) != at + 8 + num_bytes:
        raise UnreadableError("a storage has another size")
    return _elements(bytearray(data[at + 8 :]), elements)


_RECIPES = "transformer_engine.common.recipe"
_RECIPE_CLASSES = (
    *(f"{_RECIPES}.{name}BlockScaling" for name in ("MXFP8", "Float8", "NVFP4")),
    *(f"{_RECIPES}.{name}" for name in ("DelayedScaling", "Float8CurrentScaling", "QParams", "MMParams")),
    "megatron.core.extensions.transformer_engine.TEDelayedScaling",
)


def rewritten_extra_state(data: bytes) -> bytes:
    """The pickle that Transformer Engine keeps beside weights in 8 bits, written anew.

    Raises:
        ForbiddenNameError, UnreadableError: it is something else.
        ImportError: Transformer Engine is not here, or is another version.
    """
    modules = {path: importlib.import_module(path) for path in {name.rpartition(".")[0] for name in _RECIPE_CLASSES}}
    recipes = modules[_RECIPES]
    kinds = [
        getattr(modules[path], name)
        for path, _, name in (full.rpartition(".") for full in _RECIPE_CLASSES)
        if hasattr(modules[path], name)
    ]
    plain = (bool, int, float, str, _NONE, recipes.Format, *kinds)

    def fill(target: Any, content: object) -> None:
        known = {"_cached_repr", *getattr(type(target), "__dataclass_fields__", ())}
        for kind in type(target).__mro__:  # what is set after the fields stands in the class first
            known |= {name for name, value in vars(kind).items() if type(value) in plain and not name.startswith("__")}
        if type(content) is not dict or not content.keys() <= known:
            raise UnreadableError(f"a {type(target).__name__} is filled with something else")
        if not all(type(value) in plain for value in content.values()):
            raise UnreadableError(f"a {type(target).__name__} is filled with values of other types")
        target.__dict__.update(content)

    names = {
        **ARCHIVE_NAMES,
        **{f"{kind.__module__}.{kind.__qualname__}": Record(kind, fill) for kind in kinds},
        f"{_RECIPES}.Format": Function(lambda value: recipes.Format(value)),
        f"{_RECIPES}._FormatHelper": Record(recipes._FormatHelper, _filled({}), make=recipes._FormatHelper),
        **dict.fromkeys(_STORAGE_FUNCTIONS, Function(_storage_from_bytes)),
    }
    value, _ = unpickle(data, names)
    check_extent(value)
    return pickle.dumps(value)
