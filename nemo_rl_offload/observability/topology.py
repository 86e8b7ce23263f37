"""Which GPUs this machine has, and on which of its NUMA nodes each sits: what Linux and NVML tell, read once.

A node without CPUs (a GPU's own memory on Grace-Hopper and Grace-Blackwell, CXL memory) is kept, with an empty set:
whoever looks for a place to run on must be able to see that it is none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_NUM_MASK_WORDS = 128  # NVML fills 64-bit words: room for the 8192 CPUs that Linux knows at most


@dataclass(frozen=True)
class Topology:
    """The machine as sysfs describes it; all empty where there is no sysfs."""

    nodes: Mapping[int, frozenset[int]]
    """NUMA node to its online CPUs, none for a node that is memory alone."""
    cores: Mapping[int, int]
    """CPU to the lowest-numbered hardware thread of its core."""
    pci_nodes: Mapping[str, int]
    """PCI address such as `0000:1b:00.0` to NUMA node; absent where the firmware does not tell."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML describes it; where it is split by MIG, one of its instances."""

    index: int
    """NVML's index of the GPU, as in `nvidia-smi`."""
    name: str = "GPU"
    uuid: str = ""
    mig_uuid: str = ""
    bus_id: str = ""
    """PCI address as sysfs writes it."""
    cpus: frozenset[int] = frozenset()
    """The CPUs that NVML calls near; empty where it does not tell, as in some Slurm jobs."""
    memory_bytes: int | None = None


def read_topology(root: Path = Path("/")) -> Topology:
    """Read NUMA nodes, cores and the nodes of PCI devices from `sys` under `root`.

    Raises:
        ValueError: a file there does not hold what Linux writes into it.
    """
    system = root / "sys/devices/system"
    nodes = {int(node.name[4:]): parse_cpu_list(_text(node / "cpulist")) for node in system.glob("node/node[0-9]*")}
    siblings = {
        int(cpu.name[3:]): parse_cpu_list(_text(cpu / "topology/thread_siblings_list"))
        for cpu in system.glob("cpu/cpu[0-9]*")
    }
    devices = {device.name: _text(device / "numa_node") for device in root.glob("sys/bus/pci/devices/*")}
    return Topology(
        nodes=dict(sorted(nodes.items())),
        cores={cpu: min(threads) for cpu, threads in siblings.items() if threads},
        pci_nodes={address: int(node) for address, node in devices.items() if node and int(node) >= 0},
    )


def read_gpus() -> tuple[list[Gpu], str]:
    """Return what NVML lists, whatever CUDA_VISIBLE_DEVICES says; where it lists no GPU, also the reason.

    Makes no CUDA context.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"NVML: {error}"
    try:
        ask = partial(_ask, pynvml)
        gpus = [gpu for index in range(ask("Count") or 0) for gpu in _instances(ask, index)]
    finally:
        pynvml.nvmlShutdown()
    return gpus, "" if gpus else "NVML lists none"


def _ask(pynvml: Any, what: str, *args: Any) -> Any:
    """What NVML answers; None where it does not, as drivers and permissions differ in what they tell."""
    try:
        return getattr(pynvml, f"nvmlDeviceGet{what}")(*args)
    except pynvml.NVMLError:
        return None


def _instances(ask: Callable[..., Any], index: int) -> list[Gpu]:
    handle = ask("HandleByIndex", index)
    if handle is None:  # fell off the bus
        return []
    pci = ask("PciInfo", handle)
    words = ask("CpuAffinity", handle, _NUM_MASK_WORDS) or ()
    migs = [ask("MigDeviceHandleByIndex", handle, place) for place in range(ask("MaxMigDeviceCount", handle) or 0)]
    gpus = []
    for device in [mig for mig in migs if mig is not None] or [handle]:
        memory = ask("MemoryInfo", device)
        gpu = Gpu(
            index=index,
            name=ask("Name", device) or Gpu.name,
            uuid=ask("UUID", handle) or "",
            mig_uuid="" if device is handle else ask("UUID", device) or "",
            bus_id=sysfs_address(pci.busId) if pci else "",
            cpus=frozenset(
                64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1
            ),
            memory_bytes=memory.total if memory else None,
        )
        gpus.append(gpu)
    return gpus


def sysfs_address(bus_id: str | bytes) -> str:
    """NVML's `00000000:1B:00.0` as sysfs writes it: `0000:1b:00.0`."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def gpu_node(topology: Topology, gpu: Gpu, node_map: Mapping[int, int]) -> tuple[int | None, str]:
    """Return the node with CPUs that is nearest to a GPU, or None, and in words how that came about.

    The first that answers: the PCI device's node in sysfs, NVML's CPU mask, `node_map` (GPU index to node), and the
    only node with CPUs, if there is but one. A mask that spans several nodes and a node without CPUs are no answers.
    """
    with_cpus = [node for node, cpus in topology.nodes.items() if cpus]
    near = [node for node, cpus in topology.nodes.items() if cpus & gpu.cpus]
    answers = {
        "sysfs": topology.pci_nodes.get(gpu.bus_id),
        "NVML's CPU mask": near[0] if len(near) == 1 else None,
        "cpu_affinity.map": node_map.get(gpu.index),
        "being the only one with CPUs": with_cpus[0] if len(with_cpus) == 1 else None,
    }
    found = next(((node, source) for source, node in answers.items() if node in with_cpus), None)
    contradictions = [
        f"{source} says {node}" + ("" if node in with_cpus else ", which has no CPUs")
        for source, node in answers.items()
        if node is not None and (found is None or node != found[0])
    ]
    aside = f" ({'; '.join(contradictions)})" if contradictions else ""
    if found is None:
        return None, f"GPU {gpu.index}: neither sysfs nor NVML nor cpu_affinity.map names its node{aside}"
    return found[0], f"GPU {gpu.index} is on node {found[0]} by {found[1]}{aside}"


def describe_gpus(gpus: Iterable[Gpu], human: Callable[[float | None], str]) -> str:
    """All GPUs in one line, equal ones counted, with `human` to write their memory."""
    counts = Counter(f"{gpu.name} ({human(gpu.memory_bytes)})" for gpu in gpus)
    return ", ".join(f"{count} x {model}" for model, count in counts.items())


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPU numbers of Linux's list format: `0-3,8` is 0, 1, 2, 3, 8.

    Raises:
        ValueError: the text has another format.
    """
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, *last in ranges for cpu in range(int(first), int(last[0] if last else first) + 1))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The inverse of `parse_cpu_list`; `-` for none."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "-"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # CPUs that are offline and virtual devices lack files
        return ""
