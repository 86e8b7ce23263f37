"""Keeps a worker, and the host memory it allocates, on the NUMA node of its GPU.

Copies between a GPU and the memory of another node cross the link between the processors: they are slower, and all
ranks share that link. So a worker runs on the CPUs of its GPU's node, and its host arena is allocated there. Both must
be arranged before the CUDA context starts its threads and the arena pins its slabs.

Rules:
- The CPUs are always taken from the mask that the process was given, by the user, Slurm or a container. A mask that
  holds none of the node's CPUs stays as it is: whoever set it knew more than we do.
- The GPUs of a node get equal parts of its cores, whole cores with all their hardware threads. Every rank computes the
  same parts from the same facts, so that no rank has to ask another. The parts count all the GPUs that NVML lists, not
  the job's own, which leaves other jobs on the node theirs.
- Memory is *preferred* on the node (MPOL_PREFERRED), not bound to it: offloading may need more than one node has, and
  with MPOL_BIND the kernel would kill the process although other nodes have memory free.
- No GPU, no change: without copies to a device there is nothing to be near to.
- Placement makes a run faster and never possible, so whatever goes wrong here is reported and the run goes on.

Limits: an integer in CUDA_VISIBLE_DEVICES is taken as NVML's index, which differs from CUDA's on machines with unlike
GPUs unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Ranks that were each given a mask of their own, but see all GPUs, get a part
of that part: turn the section off there.
"""

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_offload.observability.topology import (
    Gpu,
    Topology,
    format_cpu_list,
    gpu_node,
    read_gpus,
    read_topology,
)

logger = logging.getLogger(__name__)

# linux/mempolicy.h
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_NUM_NODE_BITS = 1024


@dataclass(frozen=True)
class Decision:
    """Where a worker runs, and why."""

    given: frozenset[int]
    """The CPUs that the process was given."""
    cpus: frozenset[int]
    """The CPUs to run on, a part of `given`."""
    node: int | None = None
    """The NUMA node to be on; None: left as it was."""
    bind_memory: bool = False
    """Whether host memory is to come from `node` as long as it has some."""
    steps: tuple[str, ...] = ()
    is_warning: bool = False

    def describe(self) -> str:
        """One line for a log."""
        if self.node is None:
            what = f"left as it is, CPUs {format_cpu_list(self.cpus)}"
        else:
            memory = ", memory preferred there" if self.bind_memory else ""
            what = f"node {self.node}, CPUs {format_cpu_list(self.cpus)}{memory}"
        return f"CPU affinity: {what}. {'; '.join(self.steps)}."

    def with_step(self, step: str, **changes: Any) -> "Decision":
        return replace(self, steps=(*self.steps, step), **changes)


def bind(config: Mapping[str, Any], root: Path = Path("/")) -> Decision:
    """Move this process to its GPU's node as the section `cpu_affinity` says, log one line, and return what was done.

    Call it from the thread that will allocate host memory, before the CUDA context and the arena exist: a memory policy
    holds for the calling thread and those it starts. CPUs are set for all threads that have the process's mask. The
    rank's GPU is known from CUDA_VISIBLE_DEVICES and, where that leaves several, LOCAL_RANK. Never raises.

    Args:
        config: `enabled`; `bind_memory`; `map`, from a GPU's index on its machine (as in `nvidia-smi`) to its node, for
            machines that do not tell, or None.
        root: the folder that holds `sys`.
    """
    all_cpus = range(os.cpu_count() or 1)
    given = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else all_cpus)
    decision = Decision(given, given, steps=("switched off by cpu_affinity.enabled",))
    try:
        if config["enabled"]:
            gpus, reason = read_gpus()
            decision = decide(read_topology(root), gpus, given, config, os.environ)
            if reason:
                decision = decision.with_step(reason)
            decision = _apply(decision)
    except Exception as error:
        decision = Decision(given, given, steps=(f"failed with {type(error).__name__}: {error}",), is_warning=True)
        logger.warning("%s", decision.describe(), exc_info=True)
    else:
        logger.log(logging.WARNING if decision.is_warning else logging.INFO, "%s", decision.describe())
    return decision


def decide(
    topology: Topology,
    gpus: Sequence[Gpu],
    given: AbstractSet[int],
    config: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Decision:
    """Choose for the process with this mask and environment; `config` as for `bind`.

    Without GPUs from NVML, the indices in `map` stand for them.

    Raises:
        ValueError: `map` or LOCAL_RANK does not hold integers.
    """
    node_map = {int(index): int(node) for index, node in (config["map"] or {}).items()}
    gpus = gpus or [Gpu(index) for index in sorted(node_map)]
    unchanged = Decision(frozenset(given), frozenset(given))
    gpu = own_gpu(gpus, environment)
    if gpu is None:
        return unchanged.with_step("no GPU to be near to")
    if not any(topology.nodes.values()):
        return unchanged.with_step("the system describes no NUMA nodes")
    node, how = gpu_node(topology, gpu, node_map)
    if node is None:
        return unchanged.with_step(how, is_warning=True)
    peers = [peer for peer in gpus if gpu_node(topology, peer, node_map)[0] == node]
    share = (peers.index(gpu), len(peers))
    decision = choose_affinity(topology, node, given, share, bind_memory=config["bind_memory"])
    return replace(decision, steps=(how, *decision.steps))


def own_gpu(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Gpu | None:
    """The GPU of this rank: the one that CUDA_VISIBLE_DEVICES leaves, or of several the LOCAL_RANK-th.

    Entries are indices or prefixes of `GPU-` and `MIG-` identifiers; like CUDA, it stops at the first that is unknown.
    (CUDA C++ Programming Guide, "CUDA Environment Variables".)
    """
    visible = list(gpus)
    if "CUDA_VISIBLE_DEVICES" in environment:
        visible = []
        for entry in environment["CUDA_VISIBLE_DEVICES"].split(","):
            named = [gpu for gpu in gpus if _is_named(gpu, entry.strip())]
            if not named:
                break
            visible.append(named[0])
    position = int(environment.get("LOCAL_RANK", "0")) if len(visible) > 1 else 0
    return visible[position] if position < len(visible) else None


def _is_named(gpu: Gpu, entry: str) -> bool:
    if entry.isdecimal():
        return int(entry) == gpu.index
    return entry.startswith(("GPU-", "MIG-")) and (gpu.uuid.startswith(entry) or gpu.mig_uuid.startswith(entry))


def choose_affinity(
    topology: Topology, node: int, given: AbstractSet[int], share: tuple[int, int], *, bind_memory: bool
) -> Decision:
    """Choose this rank's part of a node's CPUs among those in `given`.

    Args:
        node: one with CPUs.
        given: CPUs that the process may use, at least one.
        share: this rank's place among the GPUs of the node, from zero, and their number.
    """
    unchanged = Decision(frozenset(given), frozenset(given))
    local = topology.nodes[node] & given
    if not local:
        there = format_cpu_list(topology.nodes[node])
        return unchanged.with_step(f"the mask given holds none of node {node}'s CPUs ({there})", is_warning=True)
    cores: dict[int, set[int]] = {}
    for cpu in sorted(local):
        cores.setdefault(topology.cores.get(cpu, cpu), set()).add(cpu)
    decision = replace(unchanged, cpus=frozenset(local), node=node, bind_memory=bind_memory)
    position, count = share
    if count == 1:
        return decision
    if len(cores) < count:
        return decision.with_step(f"{len(cores)} cores are too few to split among {count} GPUs")
    parts = list(cores.values())
    mine = parts[len(parts) * position // count : len(parts) * (position + 1) // count]
    return decision.with_step(f"part {position + 1} of {count}", cpus=frozenset[int]().union(*mine))


def _apply(decision: Decision) -> Decision:
    if decision.node is None:
        return decision
    try:
        if decision.cpus != decision.given:
            _set_cpus(decision.cpus, decision.given)
    except OSError as error:
        step = f"the system refused the CPUs {format_cpu_list(decision.cpus)}: {error.strerror}"
        return decision.with_step(step, cpus=decision.given, node=None, bind_memory=False, is_warning=True)
    problem = _prefer_memory(decision.node) if decision.bind_memory else ""
    return decision.with_step(problem, bind_memory=False) if problem else decision


def _set_cpus(cpus: frozenset[int], given: frozenset[int]) -> None:
    """Set the CPUs of every thread that has the process's mask; one that was bound by itself stays."""
    seen: set[int] = set()
    # Again until no thread is new: one that started meanwhile may have inherited the old mask.
    while new := {int(task.name) for task in Path("/proc/self/task").iterdir()} - seen:
        for thread in new:
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) == given:
                    os.sched_setaffinity(thread, cpus)
        seen |= new


def _prefer_memory(node: int) -> str:
    """Let the kernel take this thread's memory from `node` while it has some; returns why not, or ""."""
    try:
        libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
        get_mempolicy, set_mempolicy = libnuma.get_mempolicy, libnuma.set_mempolicy
    except (OSError, AttributeError):
        return "memory not bound: libnuma.so.1 is not installed"
    mode = ctypes.c_int()
    if get_mempolicy(ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)):
        return f"memory not bound: {os.strerror(ctypes.get_errno())}"
    if mode.value != _MPOL_DEFAULT:
        return "memory not bound: the process was given a memory policy, which stays"
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_NUM_NODE_BITS // word_bits))()
    mask[node // word_bits] = 1 << node % word_bits
    if set_mempolicy(_MPOL_PREFERRED, mask, ctypes.c_ulong(_NUM_NODE_BITS)):
        return f"memory not bound: {os.strerror(ctypes.get_errno())}"
    return ""
