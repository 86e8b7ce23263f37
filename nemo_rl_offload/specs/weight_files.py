"""Which file of a Hugging Face folder holds which weight, chosen as transformers does.

`model.safetensors`, or else what its index names. Bridge takes the index first and without one every file, so that
another program's copy of the weights, or the parts of an earlier version, would count, or be read.
"""

from collections.abc import Iterable
from os.path import basename
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.documents import INDEX_BYTES, DocumentError, parse_json, read_json_object

WHOLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
TRAINED_TYPES = ("F64", "F32", "F16", "BF16")
"""Of weights that are read as they are, in the words of safetensors."""
MAX_HEADER_BYTES = 16 << 20
"""Of what stands before the weights of a file: some 100 bytes for each. The largest public models have 90,000."""
_DOWNLOAD = "Is the download complete?"


def weight_files(folder: Path, *, is_quantized: bool) -> dict[str, str]:
    """The file of each weight. Where weights are not quantized, all have to be numbers with a fraction.

    Raises:
        ConfigError: files are missing or cannot be read, or hold weights of another type.
    """
    if (folder / ADAPTER).is_file():
        raise ConfigError(
            f"{folder}: has {ADAPTER}, with which transformers changes the model. Merge the adapter into the "
            "weights, or take its files out."
        )
    if (folder / WHOLE).is_file():
        return _in_files(folder, [WHOLE], is_quantized)
    if (folder / INDEX).is_file():
        named = _named_in_index(folder / INDEX)
        there = {file.name for file in folder.iterdir()}
        if missing := [name for name in named if name not in there]:
            raise ConfigError(f"{folder}: files that {INDEX} names are not there: {', '.join(missing)}. {_DOWNLOAD}")
        return _in_files(folder, named, is_quantized)
    if not (names := sorted(file.name for file in folder.glob("model*.safetensors"))):
        others = sorted(file.name for file in folder.glob("*.bin"))
        of_pickle = f" It has {', '.join(others)}: save the model anew with save_pretrained." if others else ""
        raise ConfigError(f"{folder}: has neither {WHOLE} nor {INDEX}.{of_pickle or f' {_DOWNLOAD}'}")
    return _in_files(folder, names, is_quantized)


def _named_in_index(path: Path) -> list[str]:
    try:
        named = read_json_object(path, INDEX_BYTES)["weight_map"].values()
        strange = [name for name in named if not isinstance(name, str) or name in ("", ".", "..", INDEX)]
        if strange := strange or [name for name in named if basename(name) != name or not name.isprintable()]:
            raise ConfigError(f"{path}: names {str(strange[0])[:100]!r}, which is no file of its folder. {_DOWNLOAD}")
        return sorted(set(named))
    except DocumentError as error:
        raise ConfigError(f"{error}. {_DOWNLOAD}") from error
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}. {_DOWNLOAD}") from error


def _header(path: Path) -> bytes:
    """What stands before the weights. Raises ConfigError: it is too much, or there is no file."""
    if not path.is_file():
        raise ConfigError(f"{path}: is no file. {_DOWNLOAD}")
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if MAX_HEADER_BYTES < num_bytes < path.stat().st_size:
            raise ConfigError(
                f"{path}: its header has {num_bytes >> 20} MiB, more than {MAX_HEADER_BYTES >> 20}. Save the model "
                "anew with save_pretrained, in several files."
            )
        return file.read(min(num_bytes, MAX_HEADER_BYTES))


def _check_once(path: Path, header: bytes) -> None:
    """Of two entries of one name, the library takes the later one."""
    try:
        parse_json(header.decode())
    except (DocumentError, UnicodeDecodeError) as error:
        reason = error.reason
        raise ConfigError(f"{path}: its header {reason}. {_DOWNLOAD}") from error


def _in_files(folder: Path, names: Iterable[str], is_quantized: bool) -> dict[str, str]:
    files: dict[str, str] = {}
    others: list[str] = []
    for name in names:
        try:
            header = _header(folder / name)
            with safe_open(folder / name, framework="np") as file:
                _check_once(folder / name, header)
                for weight in file.keys():  # noqa: SIM118  # no mapping
                    files[weight] = name
                    if not is_quantized and (kind := file.get_slice(weight).get_dtype()) not in TRAINED_TYPES:
                        others.append(f"{weight} ({kind})")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{folder / name} cannot be read: {error}. {_DOWNLOAD} Git LFS leaves a short text in its place."
            ) from error
    if others:
        raise ConfigError(
            f"{folder}: {len(others)} weights are of a type that is not trained, and config.json has no "
            f"quantization_config that says how to read it; the first is {others[0]}. Take the model's plain weights."
        )
    return files
