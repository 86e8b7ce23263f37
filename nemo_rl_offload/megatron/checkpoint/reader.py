"""Torch's reader of distributed checkpoints, which here takes nothing from a file but data.

Torch's own runs whatever `.metadata` and the entries of its `.distcp` files say. Megatron reads a `common.pt` where
one stands there, a form that no version of this program has written. Here each is read by `contents`, from files that
are opened without following links. The bytes that are checked are those that are used: `.metadata` is read once, and
the planner, which unpickles by itself, is given what was checked, written anew. So it does not matter what becomes of
the files between a check of their sums and their use.

An entry has to be of the type and the shape that `.metadata` says, and its parts have the checksums that the archive
has of them: what was damaged before its sum was taken is told, and not read as other weights.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TypedDict

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from pydantic import TypeAdapter
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nemo_rl_offload.errors import CheckpointError
from nemo_rl_offload.megatron.checkpoint.contents import read_archive, read_metadata, rewritten_extra_state
from nemo_rl_offload.megatron.checkpoint.restricted_pickle import ForbiddenNameError, UnreadableError
from nemo_rl_offload.runs.manifest import open_inside, read_checkpoint_json

METADATA_FILE, FORMAT_FILE, FORMER_COMMON_FILE = ".metadata", "metadata.json", "common.pt"
PARTS = re.compile(r"__\d+_\d+\.distcp")
MAX_METADATA_BYTES = 1 << 30
"""An entry has some hundred bytes."""
COMMON, EXTRA_STATE = "common_state", "_extra_state"
COMMON_PARTS = {"optimizer", "scheduler", "layout"}
"""Of what is the same on all ranks. Weights there would go to layers of which the checkpoint has none."""


class _Format(TypedDict):
    """`metadata.json`."""

    sharded_backend: Literal["torch_dist"]
    sharded_backend_version: Literal[1]


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Have Megatron read this checkpoint, and no other, with a `CheckedReader`.

    Raises:
        CheckpointError: there is none, or its description is damaged, or more than data.
    """
    if not os.path.lexists(folder / FORMAT_FILE):
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FORMAT_FILE}")
    read_checkpoint_json(folder, FORMAT_FILE, TypeAdapter(_Format))
    reader = CheckedReader(folder)
    reader.read_metadata()  # torch would look for another one where this one cannot be read
    replaced: list[tuple[Any, str, Callable[..., object]]] = [
        (serialization, "verify_checkpoint", lambda _: None),  # which opens a file
        (serialization, "_legacy_common_state_exists", lambda _: False),
        (serialization, "_get_filesystem_reader", lambda *_, **__: reader),
        (torch_strategies, "_get_filesystem_reader", lambda *_, **__: reader),
    ]
    former = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, function in replaced:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in former:
            setattr(module, name, function)


class CheckedReader(FileSystemReader):
    """Reads one checkpoint. Its methods raise CheckpointError: a file is missing, damaged, or more than data."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The description of the checkpoint."""
        if self._metadata is None:
            if os.path.lexists(self._folder / FORMER_COMMON_FILE):
                raise CheckpointError(
                    f"{self._folder / FORMER_COMMON_FILE}: no part of a checkpoint that this program writes, and may "
                    "hold code. It was not read. Remove it if you know where it came from."
                )
            with self._checked(METADATA_FILE), open_inside(self._folder, METADATA_FILE) as file:
                if os.fstat(file.fileno()).st_size > MAX_METADATA_BYTES:
                    raise UnreadableError(f"it has more than {MAX_METADATA_BYTES >> 20} MiB")
                metadata = read_metadata(file.read())
                for info in metadata.storage_data.values():
                    if not PARTS.fullmatch(info.relative_path):
                        raise UnreadableError(f"it names the file {info.relative_path[:80]!r}")
            self._metadata = metadata
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Give the planner what it asks for."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with self._checked(name):
                file = open_inside(self._folder, name)
            with file:
                for item in items:
                    self._read_item(file, name, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: IO[bytes], name: str, item: ReadItem, planner: LoadPlanner) -> None:
        index = item.storage_index
        place = self.storage_data[index]
        with self._checked(name, index.fqn):
            value = self._entry(file, place)
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(_plain_entry(index.fqn, value), stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
                return
            self._check_tensor(item, value)
        tensor = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise AssertionError(f"{index.fqn}: shape mismatch {tuple(target.size())} and {tuple(tensor.size())}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _entry(self, file: IO[bytes], place: _StorageInfo) -> Any:
        if place.offset + place.length > os.fstat(file.fileno()).st_size:
            raise UnreadableError("it ends too early")
        return read_archive(io.BufferedReader(_Part(file, place.offset, place.length)), place.length)

    def _check_tensor(self, item: ReadItem, value: object) -> None:
        index = item.storage_index
        entry = self.read_metadata().state_dict_metadata[index.fqn]
        if not isinstance(value, torch.Tensor) or not isinstance(entry, TensorStorageMetadata):
            raise UnreadableError("it is no tensor")
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        if value.size() != sizes or value.dtype != entry.properties.dtype:
            raise UnreadableError(f"it is of {value.dtype} and {tuple(value.size())}, not what {METADATA_FILE} says")

    @contextmanager
    def _checked(self, name: str, entry: str | None = None) -> Iterator[None]:
        path = f"{self._folder / name}" + ("" if entry is None else f" ({entry[:80]})")
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        except UnreadableError as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error
        except ForbiddenNameError as error:
            raise CheckpointError(
                f"{path} names {error}, which no checkpoint of this program does and which may run code. Nothing of it "
                "was run. Take a checkpoint from those whom you trust."
            ) from error


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        place += {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if place < 0:
            raise ValueError("a place before the beginning")
        self._at = place
        return place

    def readinto(self, target: Any) -> int:
        block = os.pread(
            self._file.fileno(), max(0, min(len(target), self._length - self._at)), self._offset + self._at
        )
        target[: len(block)] = block
        self._at += len(block)
        return len(block)


def _plain_entry(name: str, value: object) -> object:
    """What may go on to the model and the optimizer."""
    if name.startswith(f"{COMMON}/"):
        (common,) = value if isinstance(value, list) else (value,)
        if not isinstance(common, dict) or not common.keys() <= COMMON_PARTS:
            raise UnreadableError(f"it is not made of {', '.join(sorted(COMMON_PARTS))}")
    if EXTRA_STATE in name:
        return _map_tensors(value, _plain_extra_state)
    return value


def _plain_extra_state(state: torch.Tensor) -> torch.Tensor:
    """What a layer of Transformer Engine unpickles; without that, nobody looks at it."""
    if state.numel() == 0:
        return state
    if state.dtype != torch.uint8:
        raise UnreadableError("a layer's extra state is no array of bytes")
    try:
        data = rewritten_extra_state(state.contiguous().numpy().tobytes())
    except ImportError:
        return state.new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [_map_tensors(each, change) for each in value]
    if value is not None:
        raise UnreadableError(f"a layer's extra state is of {type(value).__name__}")
    return None
