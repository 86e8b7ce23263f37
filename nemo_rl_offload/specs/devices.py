"""Devices by name: memory, rates and the way to the host.

Memory is what the driver reports as usable, peak rates are dense (no sparsity) from NVIDIA's data sheets. What a run
reaches of them is a stated fraction, not a promise: replace any number by a measurement in a file.
"""

import re
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.documents import DocumentError, read_yaml
from nemo_rl_offload.units import GIB

LEAST, MOST = 1e-6, 1e9
"""Of any number that a file gives: what is made of them is finite."""


@dataclass(frozen=True)
class Device:
    """One GPU and its share of the machine."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    """None: no 8-bit floating point."""
    memory_gb_per_s: float
    """Bandwidth of the device's own memory."""
    link_out_gb_per_s: float
    """To the host's pinned memory; reached, not nominal."""
    link_in_gb_per_s: float
    host_memory_gib: float
    """Host memory per device."""
    devices_per_node: int = 8
    achieved: float = 0.4
    """Share of the peak rate that matrix products and attention reach in training, communication included."""
    achieved_memory: float = 0.7
    """Share of the memory bandwidth that norms and activations reach."""
    peers_gb_per_s: float = 360
    """To other devices of the machine, each way; 80 % of what the data sheets say of NVLink."""
    network_gb_per_s: float = 40
    """To other machines, each way: a device's share of the network."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 39.4, 312, None, 1555, 25, 25, 120, peers_gb_per_s=240, network_gb_per_s=20),
        Device("a100-80gb", 79.1, 312, None, 2039, 25, 25, 120, peers_gb_per_s=240, network_gb_per_s=20),
        Device("l40s-48gb", 44.5, 362, 733, 864, 25, 25, 96, peers_gb_per_s=25, network_gb_per_s=20),
        Device("h100-80gb", 79.1, 989, 1979, 3350, 55, 55, 240),
        Device("h200-141gb", 139.8, 989, 1979, 4800, 55, 55, 240),
        Device("b200-180gb", 178.4, 2250, 4500, 8000, 55, 55, 240, peers_gb_per_s=720),
        Device("gb200-186gb", 184.0, 2450, 4900, 8000, 350, 350, 230, devices_per_node=4, peers_gb_per_s=720),
    )
}

_ALIASES = {name.partition("-")[0]: name for name in DEVICES}
"""A name without its memory stands for the last of that name."""


def recognise(driver_name: str, memory_bytes: int) -> Device:
    """Return the device that the driver calls so, as "NVIDIA H100 80GB HBM3"; of several, that of the nearest memory.

    Raises ConfigError for one that is not in the table.
    """
    words = re.split(r"[\s-]+", driver_name.lower())
    alike = [device for device in DEVICES.values() if device.name.split("-")[0] in words]
    if not alike:
        raise ConfigError(f"the device {driver_name} is not among the known: {', '.join(DEVICES)}")
    return min(alike, key=lambda device: abs(device.memory_bytes - memory_bytes))


_OR_A_FILE = "; or a YAML file with its numbers"


def find_device(name: str | None) -> Device:
    """Return a device by name, or from a YAML file that gives fields of `Device`.

    A file starts from the device that it names under `like`, or gives every field. Raises ConfigError; also for None.
    """
    if name is None:
        raise ConfigError(f"--gpu: missing value. Known: {', '.join(DEVICES)}{_OR_A_FILE}.")
    path = Path(name)
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return _read_device(path)
    return _known_device(name, "--gpu", _OR_A_FILE)


def _known_device(name: str, where: str, or_what: str = "") -> Device:
    key = name.lower()
    if device := DEVICES.get(_ALIASES.get(key, key)):
        return device
    raise ConfigError(
        f"{where} {name}: unknown device.{nearest(key, [*DEVICES, *_ALIASES])} Known: {', '.join(DEVICES)}{or_what}."
    )


def _read_device(path: Path) -> Device:
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--gpu {path}: cannot be read: {error.strerror}") from error
    except DocumentError as error:
        place = "" if error.line is None else f"line {error.line}: "
        raise ConfigError(f"--gpu {path}: cannot be read: {place}{error.reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--gpu {path}: must hold 'key: value' lines.")
    values: dict[str, Any] = {str(key): value for key, value in content.items()}
    like = values.pop("like", None)
    base = None if like is None else _known_device(str(like), f"--gpu {path}: like:")
    values.setdefault("name", path.stem)
    known = {field.name for field in fields(Device)}
    problems = [f"{key}: unknown key.{nearest(key, known)}" for key in values if key not in known]
    problems += [f"{key}: {text}" for key, value in values.items() if key in known and (text := _wrong(key, value))]
    optional = {each.name for each in fields(Device) if each.default is not MISSING}
    if base is None and (missing := sorted(known - set(values) - optional)):
        problems.append(f"missing: {', '.join(missing)}. Give them, or a device to start from: like: h100-80gb.")
    if problems:
        raise ConfigError("\n".join(f"--gpu {path}: {problem}" for problem in problems))
    if "devices_per_node" in values:
        values["devices_per_node"] = int(values["devices_per_node"])
    return replace(base, **values) if base else Device(**values)


def _wrong(key: str, value: Any) -> str | None:
    if key == "name":
        return None if isinstance(value, str) else f"{value!r} is not a name."
    if key == "fp8_tflops" and value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST <= value <= MOST:
        return f"{value!r} is not a positive number, from {LEAST:g} to {MOST:g}."
    if key in ("achieved", "achieved_memory") and value > 1:
        return f"{value!r} is a share of the peak rate: at most 1."
    if key == "devices_per_node" and value != int(value):
        return f"{value!r} is not a whole number."
    return None
