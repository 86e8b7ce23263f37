"""Decisions on recorded machines (folders like sysfs), and the real system calls in processes of their own."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.megatron.runtime.affinity import Decision, bind, decide, own_gpu
from nemo_rl_offload.observability.topology import (
    Gpu,
    Topology,
    format_cpu_list,
    parse_cpu_list,
    read_topology,
    sysfs_address,
)

CONFIG = {"enabled": True, "bind_memory": True, "map": None}


def write_machine(root: Path, nodes: Mapping[int, str], threads_apart: int = 0, pci: Mapping[str, int] = {}) -> None:
    """Write what Linux shows of a machine: CPU lists of nodes, hardware threads `threads_apart` apart, PCI devices."""
    system = root / "sys/devices/system"
    for node, cpus in nodes.items():
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
        for cpu in parse_cpu_list(cpus):
            first = cpu % threads_apart if threads_apart else cpu
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            siblings = f"{first},{first + threads_apart}" if threads_apart else f"{cpu}"
            (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    (system / "node").mkdir(parents=True, exist_ok=True)
    (system / "node/possible").write_text("0-31\n")
    for address, pci_node in pci.items():
        (root / "sys/bus/pci/devices" / address).mkdir(parents=True)
        (root / "sys/bus/pci/devices" / address / "numa_node").write_text(f"{pci_node}\n")


def address(index: int) -> str:
    return f"0000:{16 * index + 11:02x}:00.0"


def gpus(number: int, **fields: Any) -> list[Gpu]:
    return [Gpu(index, uuid=f"GPU-{index}aa-bb", bus_id=address(index), **fields) for index in range(number)]


def choose(root: Path, devices: list[Gpu], mask: str, gpu: int = 0, **config: Any) -> Decision:
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return decide(read_topology(root), devices, parse_cpu_list(mask), CONFIG | config, environment)


def eight_gpus(root: Path) -> list[Gpu]:
    pci = {address(index): index // 4 for index in range(8)} | {"0000:00:1f.0": -1}
    write_machine(root, {0: "0-15,32-47", 1: "16-31,48-63"}, threads_apart=32, pci=pci)
    return gpus(8)


def test_eight_gpus_on_two_nodes_share_whole_cores(tmp_path: Path) -> None:
    devices = eight_gpus(tmp_path)
    decisions = [choose(tmp_path, devices, "0-63", gpu) for gpu in range(8)]
    assert [decision.node for decision in decisions] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [format_cpu_list(decision.cpus) for decision in decisions[3:6]] == [
        "12-15,44-47",
        "16-19,48-51",
        "20-23,52-55",
    ]
    assert decisions[5].describe() == (
        "CPU affinity: node 1, CPUs 20-23,52-55, memory preferred there. GPU 5 is on node 1 by sysfs; part 2 of 4."
    )


def test_two_nodes_one_gpu_each(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: "0-3", 1: "4-7"}, pci={address(0): 1, address(1): 0})
    decision = choose(tmp_path, gpus(2), "0-7", bind_memory=False)
    assert (decision.node, decision.cpus, decision.bind_memory) == (1, parse_cpu_list("4-7"), False)


def test_one_node_is_the_gpus_node_though_firmware_does_not_tell(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: "0-7"}, pci={address(0): -1, address(1): -1})
    decision = choose(tmp_path, gpus(2), "0-7", gpu=1)
    assert (decision.node, decision.cpus) == (0, parse_cpu_list("4-7"))
    assert "only one" in decision.describe()


@pytest.mark.parametrize("told", [{0: 0, 1: 0, 2: 1, 3: 1}, {0: 2, 1: 10, 2: 18, 3: 26}])
def test_nodes_of_memory_alone_are_never_chosen(tmp_path: Path, told: dict[int, int]) -> None:
    nodes = {0: "0-71", 1: "72-143"} | dict.fromkeys(range(2, 34), "")
    write_machine(tmp_path, nodes, pci={address(index): node for index, node in told.items()})
    near = [parse_cpu_list("0-71"), parse_cpu_list("72-143")]
    devices = [Gpu(index, bus_id=address(index), cpus=near[index // 2]) for index in range(4)]
    decisions = [choose(tmp_path, devices, "0-143", gpu) for gpu in range(4)]
    assert [decision.node for decision in decisions] == [0, 0, 1, 1]
    assert [format_cpu_list(decision.cpus) for decision in decisions] == ["0-35", "36-71", "72-107", "108-143"]
    assert ("which has no CPUs" in decisions[0].describe()) == (told[0] == 2)


def test_a_container_keeps_to_its_cpuset(tmp_path: Path) -> None:
    devices = eight_gpus(tmp_path)
    decisions = [choose(tmp_path, devices, "2-9,34-41,60", gpu) for gpu in range(4)]
    assert [format_cpu_list(decision.cpus) for decision in decisions] == [
        "2-3,34-35",
        "4-5,36-37",
        "6-7,38-39",
        "8-9,40-41",
    ]
    crowded = [choose(tmp_path, devices, "2-9,34-41,60", gpu) for gpu in range(4, 8)]
    assert {decision.cpus for decision in crowded} == {frozenset({60})}
    assert "too few" in crowded[0].describe()


def test_a_mask_elsewhere_is_kept_with_a_warning(tmp_path: Path) -> None:
    decision = choose(tmp_path, eight_gpus(tmp_path), "16-19", gpu=0)
    assert (decision.cpus, decision.node, decision.bind_memory) == (parse_cpu_list("16-19"), None, False)
    assert decision.is_warning
    assert "none of node 0's CPUs (0-15,32-47)" in decision.describe()


@pytest.mark.parametrize(
    ("pci", "near", "node_map", "node", "source"),
    [
        (1, "0-3", {0: 0}, 1, "sysfs (NVML's CPU mask says 0; cpu_affinity.map says 0)"),
        (-1, "4-7", {0: 0}, 1, "NVML's CPU mask (cpu_affinity.map says 0)"),
        (-1, "", {0: 1}, 1, "cpu_affinity.map"),
        (-1, "", {"0": "1"}, 1, "cpu_affinity.map"),
        (-1, "2-5", {0: 1}, 1, "cpu_affinity.map"),
        (7, "", {0: 1}, 1, "cpu_affinity.map (sysfs says 7, which has no CPUs)"),
        (-1, "", {0: 5}, None, "(cpu_affinity.map says 5, which has no CPUs)"),
        (-1, "", None, None, "neither sysfs nor NVML nor cpu_affinity.map names its node"),
    ],
)
def test_the_first_source_that_answers_counts(
    tmp_path: Path, pci: int, near: str, node_map: Any, node: int | None, source: str
) -> None:
    write_machine(tmp_path, {0: "0-3", 1: "4-7"}, pci={address(0): pci})
    decision = choose(tmp_path, gpus(1, cpus=parse_cpu_list(near)), "0-7", map=node_map)
    assert decision.node == node
    assert decision.is_warning == (node is None)
    assert decision.steps[0].endswith(source)


def test_without_nvml_the_map_names_the_gpus(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: "0-3", 1: "4-7"})
    decision = choose(tmp_path, [], "0-7", gpu=3, map={1: 0, 2: 1, 3: 1})
    assert (decision.node, decision.cpus) == (1, frozenset({6, 7}))


def test_without_gpu_or_sysfs_nothing_changes(tmp_path: Path) -> None:
    for devices, words in (([], "no GPU"), (gpus(1), "no NUMA nodes")):
        decision = choose(tmp_path, devices, "1,3")
        assert (decision.cpus, decision.node, decision.is_warning) == (frozenset({1, 3}), None, False)
        assert words in decision.describe()


@pytest.mark.parametrize(
    ("visible", "local_rank", "place"),
    [
        (None, None, 0),
        (None, "2", 2),
        (None, "9", None),
        ("", "0", None),
        ("-1", "0", None),
        ("NoDevFiles", "0", None),
        ("1", "3", 1),
        ("4, 1", "1", 1),
        ("1,9,0", "1", 1),
        ("GPU-1", "0", 1),
        ("GPU-1aa-bb,GPU-0", "1", 0),
        ("MIG-f", "0", 3),
        ("MIG-eeee,MIG-ffff", "1", 3),
        ("2", "0", 2),
    ],
)
def test_own_gpu(visible: str | None, local_rank: str | None, place: int | None) -> None:
    split = [Gpu(2, uuid="GPU-2aa-bb", mig_uuid=mig) for mig in ("MIG-eeee", "MIG-ffff")]
    devices = [*gpus(2), *split, Gpu(4, uuid="GPU-4aa-bb")]
    environment = {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": local_rank}
    found = own_gpu(devices, {name: value for name, value in environment.items() if value is not None})
    assert found == (None if place is None else devices[place])


def test_instances_of_a_split_gpu_share_its_cores(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: "0-3"}, pci={address(0): 0})
    devices = [Gpu(0, mig_uuid=f"MIG-{letter}", bus_id=address(0)) for letter in "ab"]
    masks = [
        decide(read_topology(tmp_path), devices, frozenset(range(4)), CONFIG, {"CUDA_VISIBLE_DEVICES": mig}).cpus
        for mig in ("MIG-a", "MIG-b")
    ]
    assert masks == [{0, 1}, {2, 3}]


@given(st.frozensets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(format_cpu_list(cpus).replace("-", "", not cpus)) == cpus


def test_nvml_addresses_are_written_as_in_sysfs() -> None:
    assert sysfs_address(b"00000000:1B:00.0") == "0000:1b:00.0"
    assert sysfs_address("00010008:C1:00.0") == "10008:c1:00.0"


@settings(max_examples=150, deadline=None)
@given(
    cores_of_nodes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    num_threads=st.integers(1, 2),
    gpu_nodes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    data=st.data(),
)
def test_any_machine(cores_of_nodes: list[int], num_threads: int, gpu_nodes: list[int], data: st.DataObject) -> None:
    num_cores = sum(cores_of_nodes)
    nodes, start = {}, 0
    for node, count in enumerate(cores_of_nodes):
        nodes[node] = frozenset(
            core + thread * num_cores for core in range(start, start + count) for thread in range(num_threads)
        )
        start += count
    topology = Topology(
        nodes=nodes,
        cores={cpu: cpu % num_cores for cpus in nodes.values() for cpu in cpus},
        pci_nodes={address(index): node for index, node in enumerate(gpu_nodes)},
    )
    mask = data.draw(st.frozensets(st.integers(0, max(1, num_cores * num_threads) - 1), min_size=1))
    devices = gpus(len(gpu_nodes))
    decisions = [
        decide(topology, devices, mask, CONFIG, {"CUDA_VISIBLE_DEVICES": str(index)}) for index in range(len(devices))
    ]
    assert all(decision.cpus and decision.cpus <= mask for decision in decisions)
    for node, cpus in nodes.items():
        parts = [decision.cpus for decision in decisions if decision.node == node]
        local_cores = {cpu % num_cores for cpu in cpus & mask}
        if not parts:
            continue
        assert frozenset().union(*parts) == cpus & mask
        part_cores = [{cpu % num_cores for cpu in part} for part in parts]
        if len(local_cores) >= len(parts):
            assert sum(map(len, part_cores)) == len(local_cores), "a core belongs to one rank alone"
            assert max(map(len, part_cores)) - min(map(len, part_cores)) <= 1


@pytest.mark.parametrize(
    "config",
    [{}, CONFIG | {"map": {"0": "x"}}, CONFIG | {"map": [1]}, CONFIG | {"map": {"first": 0}}],
)
def test_bind_never_raises(tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    decision = bind(config, tmp_path)
    assert decision.is_warning
    assert [record.message for record in caplog.records] == [decision.describe()]
    assert os.sched_getaffinity(0) == decision.cpus == before


def test_bind_survives_a_broken_sysfs_and_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node0/cpulist").write_text("many\n")
    assert "failed with ValueError" in bind(CONFIG, tmp_path).describe()
    off = bind(CONFIG | {"enabled": False}, tmp_path)
    assert not off.is_warning
    assert "switched off" in off.describe()


def test_bind_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.INFO):
        decision = bind(CONFIG, tmp_path)
    assert [record.message for record in caplog.records] == [decision.describe()]


SCRIPT = """
import json, os, sys, threading
from pathlib import Path
from nemo_rl_offload.megatron.runtime import affinity

def masks():
    return [sorted(os.sched_getaffinity(int(task.name))) for task in sorted(Path("/proc/self/task").iterdir())]

def policies():
    try:
        return sorted({line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()})
    except OSError:
        return None

root, node_map, own_cpu = json.loads(sys.argv[1])
affinity.read_gpus = lambda: ([], "no NVML here")
end = threading.Event()
started = threading.Semaphore(0)
def wait(cpu):
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    started.release()
    end.wait()
for cpu in (None, own_cpu):
    threading.Thread(target=wait, args=(cpu,)).start()
    started.acquire()
before = masks(), policies()
config = {"enabled": True, "bind_memory": True, "map": node_map}
decision = affinity.bind(config, Path(root))
print(json.dumps({
    "before": before, "after": (masks(), policies()),
    "again": affinity.bind(config, Path(root)).describe(), "node": decision.node, "cpus": sorted(decision.cpus),
    "bind_memory": decision.bind_memory, "line": decision.describe(),
    "heavy": [name for name in ("torch", "megatron", "pydantic") if name in sys.modules],
}))
end.set()
"""


def run_bind(root: Path, visible: str, node_map: dict[str, int] | None, own_cpu: int | None = None) -> dict[str, Any]:
    arguments = json.dumps([str(root), node_map, own_cpu])
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def test_on_this_machine_without_a_gpu_nothing_changes() -> None:
    result = run_bind(Path("/"), "", None)
    assert result["after"] == result["before"]
    assert result["heavy"] == []
    assert "no GPU" in result["line"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_all_threads_move_but_those_bound_by_themselves(tmp_path: Path) -> None:
    other, target, *_ = sorted(os.sched_getaffinity(0))
    allowed = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    node = min(parse_cpu_list(allowed.get("Mems_allowed_list", "0")))
    write_machine(tmp_path, {node: f"{target}", node + 1: f"{other}"})
    result = run_bind(tmp_path, "0", {"0": node, "1": node + 1}, own_cpu=other)
    assert result["cpus"] == [target]
    assert result["after"][0] == [[target], [target], [other]]
    policies = result["after"][1]
    assert policies is None or result["bind_memory"] == (f"prefer:{node}" in policies)
    assert result["bind_memory"] or "memory not bound" in result["line"]
    assert ("a memory policy, which stays" in result["again"]) == result["bind_memory"]
    assert os.strerror(errno.EINVAL) not in result["line"], "a container may forbid it, but the node exists"


def test_what_the_system_refuses_is_reported(tmp_path: Path) -> None:
    mask = format_cpu_list(os.sched_getaffinity(0))
    write_machine(tmp_path, {1000: mask})
    result = run_bind(tmp_path, "0", {"0": 1000})
    assert (result["node"], result["bind_memory"]) == (1000, False)
    assert "memory not bound" in result["line"]
    assert result["after"] == result["before"]
