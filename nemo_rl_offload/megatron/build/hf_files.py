"""Which file of a Hugging Face folder holds which weight, chosen as transformers does.

`model.safetensors`, or else what its index names. Bridge takes the index first and without one every file, so that
another program's copy of the weights, or the parts of an earlier version, would count, or be read.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nemo_rl_offload.errors import ConfigError

WHOLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
TRAINED_TYPES = ("F64", "F32", "F16", "BF16")
"""Of weights that are read as they are, in the words of safetensors."""
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
        try:
            named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / INDEX} cannot be read: {error!r}. {_DOWNLOAD}") from error
        if missing := sorted(name for name in named if not (folder / name).is_file()):
            raise ConfigError(f"{folder}: files that {INDEX} names are not there: {', '.join(missing)}. {_DOWNLOAD}")
        return _in_files(folder, sorted(named), is_quantized)
    if not (names := sorted(file.name for file in folder.glob("model*.safetensors"))):
        others = sorted(file.name for file in folder.glob("*.bin"))
        of_pickle = f" It has {', '.join(others)}: save the model anew with save_pretrained." if others else ""
        raise ConfigError(f"{folder}: has neither {WHOLE} nor {INDEX}.{of_pickle or f' {_DOWNLOAD}'}")
    return _in_files(folder, names, is_quantized)


def _in_files(folder: Path, names: Iterable[str], is_quantized: bool) -> dict[str, str]:
    files: dict[str, str] = {}
    others: list[str] = []
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
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
