"""What of this machine helps or hinders a run: findings, each in order or with what to do about it.

Nothing here imports torch unless there is a GPU to measure, so that the answer comes at once on a laptop. What reads
the system is apart from what judges: each finding is a function of values, or of a folder that stands for `/`.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

from nemo_rl_offload.observability.topology import (
    Gpu,
    Topology,
    describe_gpus,
    format_cpu_list,
    gpu_node,
    read_gpus,
    read_topology,
)
from nemo_rl_offload.offload.host_memory import cgroup_memory, free_host_bytes
from nemo_rl_offload.specs.generation import HOW_TO_INSTALL, VLLM_VERSION, installed_vllm, is_tested
from nemo_rl_offload.specs.process_limits import addresses, open_files
from nemo_rl_offload.units import GIB, human_bytes

PROJECT = "nemo-rl-offload"
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "ray", "transformers")

MIN_WORKER_BYTES = 2 * GIB  # what Python, torch and Megatron take before the first tensor
MIN_SHM_BYTES = GIB  # Ray's object store (512 MiB here) and NCCL's buffers
MIN_DISK_BYTES = 10 * GIB
MIN_LINK_GBPS = 10.0  # PCIe 3.0 x16 gives 12
LINK_BYTES = 256 << 20
NUM_LINK_REPEATS = 5

OPTIONAL_PACKAGES = ("apex", "flash_attn")
_IMPORT = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    lines = str(error).strip().splitlines()
    sys.exit("\\n" + (f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__))
"""

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `fix` says what to do and is empty only where the status is ok."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def findings(root: Path = Path("/"), folder: Path = Path()) -> list[Finding]:
    """Look at this machine; at `folder` for disk space. On a GPU, or where one of the packages is installed that
    Megatron-Core can use, this takes seconds, else well under two.

    Args:
        root: the folder that holds `sys`, `proc` and `dev`.
    """
    import psutil

    gpus, no_gpu_reason = read_gpus()
    cgroup = cgroup_memory(root)
    total_bytes = min([psutil.virtual_memory().total, *([cgroup[0]] if cgroup else [])])
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        python_version(platform.python_version()),
        *(package_version(package) for package in PACKAGES),
        transformer_engine(has_gpu=bool(gpus)),
        *filter(None, map(optional_package, OPTIONAL_PACKAGES)),
        vllm_version(),
        c_compiler(),
        devices(gpus, no_gpu_reason, root),
        numa_map(read_topology(root), gpus),
        host_memory(free_host_bytes(root), total_bytes, max(1, len(gpus))),
        memory_limit(cgroup),
        locked_memory(locked_bytes, total_bytes, has_gpu=bool(gpus)),
        *process_limits(),
        shared_memory(root),
        disk_space(folder),
        *(host_links() if gpus else []),
    ]


def report(found: Sequence[Finding], form: Literal["table", "json"]) -> str:
    """All findings as a table as wide as the terminal, or as a JSON list of objects with the fields of `Finding`."""
    if form == "json":
        return json.dumps([asdict(finding) for finding in found], indent=2)
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(name, overflow="fold") for name in ("what", "status", "detail")), title="doctor")
    for finding in found:
        detail = f"{finding.detail}\n-> {finding.fix}" if finding.fix else finding.detail
        table.add_row(finding.name, finding.status, Text(detail))
    console = Console(width=shutil.get_terminal_size((100, 24)).columns, color_system=None)
    with console.capture() as captured:  # so that lines are drawn in the encoding of standard output
        console.print(table)
    return captured.get()


def python_version(version: str) -> Finding:
    try:
        wanted = importlib.metadata.metadata(PROJECT)["Requires-Python"]
    except importlib.metadata.PackageNotFoundError:
        wanted = ""
    return _version("python", version, wanted, "Let uv choose the interpreter: uv run nemo-rl-offload doctor")


def package_version(package: str) -> Finding:
    """Whether a package is there in the version that this project asks for, without importing it."""
    from packaging.requirements import Requirement

    fix = "Install what the project pins: uv sync"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "error", "not installed", fix)
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or []]
    except importlib.metadata.PackageNotFoundError:  # runs from a source folder
        requirements = []
    wanted = [str(requirement.specifier) for requirement in requirements if requirement.name == package]
    return _version(package, version, wanted[0] if wanted else "", fix)


def _version(name: str, version: str, wanted: str, fix: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding(name, "ok", version)
    return Finding(name, "warning", f"{version}; tested with {wanted}", fix)


def transformer_engine(*, has_gpu: bool) -> Finding:
    """Whether Transformer Engine is installed, and imports; only with a GPU is it needed to."""
    name = "transformer engine"
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding(name, "ok", "not installed; transformer_impl: auto takes this project's torch layers")
    if not (reason := import_problem("transformer_engine.pytorch")):
        return Finding(name, "ok", "importable" if has_gpu else "importable; not used, as it needs a GPU")
    left_out = f"installed, but not importable: {reason}; transformer_impl: auto takes this project's torch layers"
    if not has_gpu:
        return Finding(name, "ok", f"{left_out}, as always without a GPU")
    fix = "Install the build for this torch and CUDA, or remove it"
    return Finding(name, "warning", left_out, fix)


def vllm_version() -> Finding:
    """Whether vLLM is there, which a run needs where it generates, and in the tested version; it is not imported."""
    found = installed_vllm()
    if found is None:
        return Finding("vllm", "ok", "not installed, which policy.generation.backend=vllm needs")
    name, version = found
    if is_tested(version):
        return Finding("vllm", "ok", f"{name} {version}")
    return Finding("vllm", "warning", f"{name} {version}; tested with {VLLM_VERSION} alone", HOW_TO_INSTALL)


def optional_package(package: str) -> Finding | None:
    """What is wrong with a package that Megatron-Core uses where it is there; None where nothing is."""
    if importlib.util.find_spec(package) is None or not (reason := import_problem(package)):
        return None
    detail = f"installed, but not importable: {reason}; a run leaves it out"
    return Finding(package, "warning", detail, "Install the build for this torch and CUDA, or remove it")


def import_problem(module: str) -> str:
    """Import a module in another process; return the type and the first line of what it raises, else ""."""
    process = subprocess.run([sys.executable, "-c", _IMPORT, module], capture_output=True, text=True, check=False)
    if process.returncode == 0:
        return ""
    lines = process.stderr.strip().splitlines()
    return lines[-1] if process.returncode == 1 and lines else f"it ended with exit code {process.returncode}"


def c_compiler() -> Finding:
    wanted = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    found = [path for name in wanted if (path := shutil.which(name))]
    if found:
        return Finding("C compiler", "ok", found[0])
    fix = "Install one, such as with: apt install build-essential; or set CC"
    return Finding("C compiler", "warning", f"no {' or '.join(wanted)}: torch.compile and Triton need one", fix)


def devices(gpus: Sequence[Gpu], no_gpu_reason: str, root: Path) -> Finding:
    if gpus:
        return Finding("devices", "ok", describe_gpus(gpus, human_bytes))
    if (root / "dev/nvidiactl").exists():
        fix = "See what nvidia-smi says; after an update of the driver, restart the machine or the container"
        return Finding("devices", "error", f"an NVIDIA driver is loaded, but does not answer ({no_gpu_reason})", fix)
    return Finding("devices", "ok", f"CPU only ({no_gpu_reason})")


def numa_map(topology: Topology, gpus: Sequence[Gpu]) -> Finding:
    """Each node with its CPUs and GPUs."""
    if not topology.nodes:
        return Finding("NUMA map", "ok", "the system describes no NUMA nodes")
    places = {gpu.index: gpu_node(topology, gpu, {})[0] for gpu in gpus}
    lines = []
    for node, cpus in topology.nodes.items():
        near = [str(index) for index, place in places.items() if place == node]
        what = f"CPUs {format_cpu_list(cpus)}" if cpus else "memory alone"
        lines.append(f"node {node}: {what}" + (f", GPUs {','.join(near)}" if near else ""))
    lost = [str(index) for index, place in places.items() if place is None]
    if not lost:
        return Finding("NUMA map", "ok", "; ".join(lines))
    fix = f"Say where they are (nvidia-smi topo -m may tell): policy.megatron_cfg.cpu_affinity.map={{{lost[0]}: NODE}}"
    return Finding("NUMA map", "warning", f"{'; '.join(lines)}; unknown for GPUs {','.join(lost)}", fix)


def host_memory(free_bytes: int, total_bytes: int, num_workers: int) -> Finding:
    """Memory that this machine or container can still give, and each of its workers' part."""
    per_worker_bytes = free_bytes // num_workers
    part = f"{human_bytes(per_worker_bytes)} for each of {num_workers} workers" if num_workers > 1 else "for one worker"
    detail = f"{human_bytes(free_bytes)} free of {human_bytes(total_bytes)}, {part}"
    if per_worker_bytes >= MIN_WORKER_BYTES:
        return Finding("host memory", "ok", detail)
    fix = (
        f"Free some, or use fewer workers (cluster.gpus_per_node): each takes {human_bytes(MIN_WORKER_BYTES)} at least"
    )
    return Finding("host memory", "warning", detail, fix)


def memory_limit(cgroup: tuple[int, int] | None) -> Finding:
    if cgroup is None:
        return Finding("memory limit", "ok", "no cgroup limit")
    limit_bytes, used_bytes = cgroup
    detail = f"{human_bytes(used_bytes)} used of the cgroup's {human_bytes(limit_bytes)}"
    if used_bytes <= 0.9 * limit_bytes:
        return Finding("memory limit", "ok", detail)
    fix = "Raise the limit (docker run --memory, Slurm --mem, Kubernetes resources.limits.memory) or free memory"
    return Finding("memory limit", "warning", detail, fix)


def locked_memory(limit_bytes: int, total_bytes: int, *, has_gpu: bool) -> Finding:
    """The limit of RLIMIT_MEMLOCK, which pinned memory may meet, against half of the memory."""
    unlimited = limit_bytes == resource.RLIM_INFINITY
    detail = "no limit" if unlimited else f"at most {human_bytes(limit_bytes)}"
    if not has_gpu:
        return Finding("locked memory", "ok", f"{detail}; matters with a GPU alone")
    if unlimited or limit_bytes >= total_bytes // 2:
        return Finding("locked memory", "ok", detail)
    fix = "Raise it to half of the memory: ulimit -l unlimited, docker run --ulimit memlock=-1, or limits.conf memlock"
    return Finding("locked memory", "warning", f"{detail} of {human_bytes(total_bytes)} may be pinned", fix)


def process_limits() -> list[Finding]:
    """The limits without which a run does not start."""
    named = (("open files", open_files()), ("address space", addresses()))
    return [Finding(name, "error" if fix else "ok", shown, fix) for name, (shown, fix) in named]


def shared_memory(root: Path) -> Finding:
    folder = root / "dev/shm"
    try:
        size_bytes = shutil.disk_usage(folder).total
    except OSError as error:
        return Finding("/dev/shm", "warning", f"cannot be read: {error.strerror}", "Mount a tmpfs on /dev/shm")
    return shared_memory_size(size_bytes)


def shared_memory_size(size_bytes: int) -> Finding:
    if size_bytes >= MIN_SHM_BYTES:
        return Finding("/dev/shm", "ok", human_bytes(size_bytes))
    fix = "Give the container more: docker run --shm-size=8g, or an emptyDir with medium: Memory in Kubernetes"
    return Finding(
        "/dev/shm", "warning", f"{human_bytes(size_bytes)}: Ray and NCCL need {human_bytes(MIN_SHM_BYTES)}", fix
    )


def disk_space(folder: Path) -> Finding:
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{human_bytes(free_bytes)} free in {folder.resolve()}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk space", "ok", detail)
    return Finding(
        "disk space", "warning", detail, "Free some, or put runs elsewhere with --run-dir: checkpoints are large"
    )


def host_links() -> list[Finding]:
    """Measure the link between the host and each GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        fix = f"Check CUDA_VISIBLE_DEVICES, and that the driver supports torch's CUDA version, {torch.version.cuda}"
        return [Finding("host link", "error", "NVML lists a GPU, but torch cannot use it", fix)]
    found = []
    for index in range(torch.cuda.device_count()):
        name = f"host link of cuda:{index}"
        try:
            found.append(judge_link(name, measure_link(index)))
        except RuntimeError as error:  # its memory is taken, or pinning is refused
            reason = str(error).splitlines()[0]
            fix = "End what else uses the GPU, or raise the limit of locked memory"
            found.append(Finding(name, "warning", f"not measured: {reason}", fix))
    return found


def judge_link(name: str, gbps: dict[str, float]) -> Finding:
    """Judge rates as `measure_link` returns them."""
    detail = ", ".join(f"{kind} {rate:.1f}" for kind, rate in gbps.items()) + " GB/s"
    if min(gbps["out"], gbps["in"]) >= MIN_LINK_GBPS:
        return Finding(name, "ok", detail)
    fix = "Check the slot's width and speed (lspci -vv: LnkSta) and the NUMA map; offload fewer modules on a slow link"
    return Finding(name, "warning", detail, fix)


@cache
def measure_link(index: int) -> dict[str, float]:
    """Median rates in 10^9 bytes per second between the host and `cuda:index`, by kind of copy.

    `out` and `in` copy from and to pinned memory, `both ways` counts the bytes of both at once, and the `pageable` ones
    use ordinary memory. They are measured once.

    Raises:
        RuntimeError: no memory on the device, or none that can be pinned.
    """
    import torch

    with torch.cuda.device(index):
        first, second = (torch.zeros(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        pinned_out, pinned_in = (torch.ones(LINK_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
        pageable = torch.ones(LINK_BYTES, dtype=torch.uint8)
        streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def both_ways() -> None:
            current = torch.cuda.current_stream()
            for stream, target, source in zip(streams, (pinned_out, second), (first, pinned_in), strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            for stream in streams:
                current.wait_stream(stream)

        return {
            "out": _gbps(lambda: pinned_out.copy_(first, non_blocking=True), LINK_BYTES),
            "in": _gbps(lambda: second.copy_(pinned_in, non_blocking=True), LINK_BYTES),
            "both ways": _gbps(both_ways, 2 * LINK_BYTES),
            "pageable out": _gbps(lambda: pageable.copy_(first), LINK_BYTES),
            "pageable in": _gbps(lambda: second.copy_(pageable), LINK_BYTES),
        }


def _gbps(copy: Callable[[], object], num_bytes: int) -> float:
    import torch

    times_ms: list[float] = []
    for _ in range(1 + NUM_LINK_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        copy()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return num_bytes / median(times_ms[1:]) / 1e6
