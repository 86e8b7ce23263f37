"""Writes what `doctor` measures as the file that `plan --gpu FILE` reads."""

from pathlib import Path

import yaml

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.observability.doctor import measure_link
from nemo_rl_offload.observability.topology import read_gpus
from nemo_rl_offload.offload.host_memory import free_host_bytes
from nemo_rl_offload.runs.output import check_writable, write_text
from nemo_rl_offload.runs.run_directory import check_not_of_run
from nemo_rl_offload.specs.devices import recognise
from nemo_rl_offload.units import GIB


def write_device_file(path: Path) -> None:
    """Measure the GPUs that torch sees, and write the least that one of them has.

    Raises:
        ConfigError: there is no GPU, the planner does not know it, or the file cannot be written there.
        ResourceError: it could not be written in the end; what it held before is still there.
    """
    given = f"--write-device {path}"
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{given}: name a .yaml file, by which `plan --gpu` tells it from a device's name.")
    check_not_of_run(path)
    check_writable(path, given)
    try:
        name, measured = _measure()
    except (ConfigError, RuntimeError) as error:
        raise ConfigError(f"{given}: {str(error).splitlines()[0]}.") from error
    write_text(path, f"# {name}, measured by `nemo-rl-offload doctor`.\n{yaml.safe_dump(measured, sort_keys=False)}")


def _measure() -> tuple[str, dict[str, str | float]]:
    """Return the driver's name of the GPUs and fields of `Device`."""
    gpus, reason = read_gpus()
    if not gpus:
        raise ConfigError(f"there is no GPU to measure ({reason})")
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ConfigError("NVML lists a GPU, but torch cannot use it, so that there is nothing to measure")
    found = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    smallest = min(found, key=lambda gpu: gpu.total_memory)
    like = recognise(smallest.name, smallest.total_memory).name
    gbps = [measure_link(index) for index in range(num_gpus)]
    return smallest.name, {
        "like": like,
        "memory_gib": round(smallest.total_memory / GIB, 2),
        "link_out_gb_per_s": round(min(rates["out"] for rates in gbps), 1),
        "link_in_gb_per_s": round(min(rates["in"] for rates in gbps), 1),
        "host_memory_gib": round(free_host_bytes() / num_gpus / GIB, 1),
        "devices_per_node": num_gpus,
    }
