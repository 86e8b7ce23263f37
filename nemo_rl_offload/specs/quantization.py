"""Which linears of a model are quantized in quantization-aware training, in the language of ModelOpt's configurations.

A configuration is a list of entries: a pattern of quantizers' names, and whether they are on and with which format. A
later entry counts over an earlier one. A linear has a quantizer of its weight and one of its input, by Megatron's name
of the linear: `decoder.layers.0.mlp.linear_fc1.weight_quantizer`, where layers are counted over all pipeline stages.

Of the formats NVFP4 is known: numbers of E2M1, of which 16 or 32 neighbours share a scale of E4M3, and all of a weight
a further one in float32.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.documents import read_yaml

WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
BLOCKS = (16, 32)
_ELEMENTS, _SCALES = ("e2m1", [2, 1], (2, 1)), ("e4m3", [4, 3], (4, 3))
OUTPUT = "output_quantizer"
OF_ATTENTION = {
    "q_bmm_quantizer": "attention's queries",
    "k_bmm_quantizer": "the key/value cache",
    "v_bmm_quantizer": "the key/value cache",
}
"""Further quantizers that a pattern may name, of `self_attention.core_attention`, and what they quantize."""

_SECTION = ("quant_cfg", "algorithm")
_OTHER_CLASSES = ("nn.BatchNorm1d", "nn.BatchNorm2d", "nn.BatchNorm3d", "nn.LeakyReLU", "nn.Embedding")


@dataclass(frozen=True)
class Entry:
    """`block` is the number of neighbours that share a scale; None: these quantizers are off."""

    pattern: str
    block: int | None


@dataclass(frozen=True)
class Quantization:
    entries: Sequence[Entry]

    def block(self, quantizer: str) -> int | None:
        """How many neighbours share a scale, by a quantizer's name; None: it is off."""
        found = [entry.block for entry in self.entries if fnmatchcase(quantizer, entry.pattern)]
        return found[-1] if found else None


def _nvfp4(*patterns: str, block: int = 16) -> Sequence[Entry]:
    return [Entry(pattern, block) for pattern in patterns]


_ALL_OFF = [Entry("*", None)]
_WIDE = [
    Entry(pattern, None)
    for pattern in (
        *("*block_sparse_moe.gate*", "*linear_attn.conv1d*", "*self_attention.conv1d*", "*mixer.conv1d*"),
        *(
            "*linear_attn.in_proj_a*",
            "*linear_attn.in_proj_b*",
            "*lm_head*",
            "*mlp.gate.*",
            "*mlp.shared_expert_gate.*",
        ),
        *("*output_layer*", "*proj_out.*", "*router*", "mtp.*", "output.*"),
    )
]
"""What ModelOpt's own configurations leave wide, of language models."""
_MLP = ("*mlp*", "*block_sparse_moe*")
NAMED: Mapping[str, Quantization] = {
    "NVFP4_DEFAULT_CFG": Quantization([*_ALL_OFF, *_nvfp4(f"*{WEIGHT}", f"*{INPUT}"), *_WIDE]),
    "W4A16_NVFP4_CFG": Quantization([*_ALL_OFF, *_nvfp4(f"*{WEIGHT}"), *_WIDE]),
    "NVFP4_MLP_ONLY_CFG": Quantization(
        [*_ALL_OFF, *_nvfp4(*(f"{part}{each}" for part in _MLP for each in (WEIGHT, INPUT))), *_WIDE]
    ),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": Quantization(
        [*_ALL_OFF, *_nvfp4(*(f"{part}{WEIGHT}" for part in _MLP), block=32), *_WIDE]
    ),
}
"""ModelOpt's configurations of these names (0.47)."""


def find_quantization(name: str) -> Quantization:
    """That of a name, or of a file's path, whole. Raises ConfigError as `read_quantization`."""
    return NAMED[name] if name in NAMED else read_quantization(Path(name))


def read_quantization(path: Path) -> Quantization:
    """Return what a file says: `quant_cfg`, a list of entries, and `algorithm: max`, both below `quantize` or alone.

    Raises ConfigError for what is not known.
    """
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror or error}") from error
    section = content.get("quantize", content) if isinstance(content, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(entries := section.get("quant_cfg"), list):
        raise ConfigError(f"{path}: a list 'quant_cfg' of entries must stand there, alone or below 'quantize'")
    _check_keys(section, _SECTION if section is not content else (*_SECTION, "metadata"), str(path))
    if section is not content:
        _check_keys(content, ("metadata", "quantize"), str(path))
    if (algorithm := section.get("algorithm", "max")) not in ("max", {"method": "max"}):
        raise ConfigError(f"{path}: algorithm: {algorithm!r} is not known. Allowed: max")
    return Quantization([_entry(entry, f"{path}: quant_cfg[{number}]") for number, entry in enumerate(entries)])


def _check_keys(keys: Iterable[object], known: Sequence[str], place: str) -> None:
    for key in keys:
        if key not in known:
            raise ConfigError(f"{place}: unknown key '{key}'.{nearest(str(key), known)} Allowed: {', '.join(known)}")


def _entry(entry: object, place: str) -> Entry:
    known = ("quantizer_name", "parent_class", "enable", "cfg")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place}: must be a mapping with the keys {', '.join(known)}")
    if "$import" in entry:
        raise ConfigError(f"{place}: $import is not read here. Write the entries out.")
    _check_keys(entry, known, place)
    pattern, cfg = entry.get("quantizer_name"), entry.get("cfg")
    is_on = entry.get("enable", True)
    if not isinstance(pattern, str) or not isinstance(is_on, bool):
        raise ConfigError(f"{place}: quantizer_name must be a pattern of names, and enable true or false")
    if (owner := entry.get("parent_class")) is not None:
        if is_on or owner not in _OTHER_CLASSES:
            raise ConfigError(
                f"{place}: parent_class may only turn off {', '.join(_OTHER_CLASSES)}, which no linear is. Name "
                "quantizers by a pattern instead."
            )
        return Entry("", None)
    if not is_on:
        return Entry(pattern, None)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"{place}: quantizers that are turned on need cfg, their format")
    return Entry(pattern, _block(cfg, f"{place}.cfg"))


def _block(cfg: Mapping[Any, Any], place: str) -> int:
    sizes = cfg.get("block_sizes")
    wanted = "num_bits: e2m1, block_sizes: {-1: 16, type: dynamic, scale_bits: e4m3}"
    is_known = (
        isinstance(sizes, Mapping)
        and cfg.get("num_bits") in _ELEMENTS
        and {*cfg} <= {"num_bits", "block_sizes", "effective_bits"}
        and {*sizes} == {-1, "type", "scale_bits"}
        and (sizes[-1] in BLOCKS and sizes["type"] == "dynamic" and sizes["scale_bits"] in _SCALES)
    )
    if not is_known or not isinstance(sizes, Mapping):
        raise ConfigError(f"{place}: of formats NVFP4 alone is known: {wanted}, or blocks of 32")
    return int(sizes[-1])
