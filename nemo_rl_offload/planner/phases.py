"""What a step's phases take of the device, what of the job waits in host memory, and what crosses the link for it.

A training step's peak is the simulation's. The other phases run without gradients: what is there throughout, one
layer's forward, and the output head. Sizes are of one rank of a pipeline stage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nemo_rl_offload.planner.cost.activations import forward_bytes, generation_bytes
from nemo_rl_offload.planner.cost.adapters import adapters_bytes
from nemo_rl_offload.planner.cost.head import forward_logits_bytes, fused_head_forward_bytes
from nemo_rl_offload.planner.cost.memory import (
    EIGHT_BIT_COPIES,
    optimizer_host_bytes,
    optimizer_parameters,
    trained_parameters,
)
from nemo_rl_offload.planner.cost.storages import LayerContext, Tokens
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.simulate.simulated_step import SimulatedStep, highest_peak
from nemo_rl_offload.planner.simulate.stages import job_link
from nemo_rl_offload.specs.lora import Adapters
from nemo_rl_offload.specs.model_shape import LayerKind
from nemo_rl_offload.units import GIB, MIB, gib

UPDATE = "optimizer step"
OF_LAYOUT = (UPDATE, "host memory")
"""How the sentences of `lacking` begin that a layout decides."""
OF_MODEL = "No smaller pass helps"
"""What stands in those sentences that a layout decides as well."""
EXCHANGE_BYTES = 128 * MIB
"""Device memory that holds pieces of weights on their way: `offload.waiting_weights`."""
GRADIENT_COPIES = "gradients in float32"
LEAVING = "what leaves between two trainings"
OWN_OF_UPDATE = "the update's own"
UPDATE_BYTES = 4
"""That torch's Adam needs for each parameter while it updates all of them at once."""
BUCKETS_BYTES = 1024 * MIB
"""Likewise for an optimizer on the host: `policy.residency.streamed_optimizer`."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step on one rank."""

    name: str
    parts: dict[str, int]
    """Device memory at its peak, in bytes, by what it is for."""

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class HostUse:
    """Host memory of one rank, in bytes: at each place that of the fullest stage."""

    parts: dict[str, int]
    """Pinned, within the budget, by what waits there."""
    beside: dict[str, int]
    """Beside the budget: the stash's pages, and the teacher's weights in workers of their own."""
    budget_bytes: int
    node_ranks: int
    node_bytes: int
    """That a machine has."""

    @property
    def pinned_bytes(self) -> int:
        """Within the budget."""
        return sum(self.parts.values())

    @property
    def used_node_bytes(self) -> int:
        """Of all ranks of a machine."""
        return (self.pinned_bytes + sum(self.beside.values())) * self.node_ranks


FREED = ("gradients", EIGHT_BIT_COPIES)
"""What is freed between two trainings, and not moved."""


@dataclass(frozen=True)
class Move:
    """Bytes that cross the link in one phase of a step."""

    phase: str
    what: str
    out_bytes: int
    in_bytes: int
    ms: float
    """With both directions busy at once, but for what comes in when all is out."""


class PhasesOfStage:
    """The phases of one pipeline stage's rank under a simulated step."""

    def __init__(self, job: Job, step: SimulatedStep, rank: int) -> None:
        self._job, self._step, self._rank = job, step, rank
        self._static = step.stages[rank].static_bytes
        self._is_last = rank == job.layout.pipeline - 1
        self._kinds = [job.shape.layer_kinds[layer] for chunk in step.stages[rank].layers for layer in chunk]
        names = ("weights", EIGHT_BIT_COPIES, "gradients", "optimizer", "runtime", "fragmentation")
        self._resident = {name: self._static[name] for name in names if self._static.get(name)}
        self._asleep = dict(self._resident)
        if job.frees_gradients:
            self._asleep = {name: size for name, size in self._asleep.items() if name not in FREED}
        leaves = job.optimizer_leaves_for_logprob and job.passes.logprob_tokens and job.teacher is None
        self._leaves_for_logprobs = ["optimizer"] if leaves and "optimizer" in self._asleep else []

    def phases(self) -> list[Phase]:
        """In the order of a step."""
        job, passes, rank = self._job, self._job.passes, self._rank
        found = []
        if passes.generation_rows:
            found.append(Phase("generation", self._asleep | self._generation()))
        elif passes.engine_share:
            found.append(Phase("generation", self._beside_engine()[0] | self._engine()))
        copies = {name: self._resident[name] for name in (EIGHT_BIT_COPIES,) if name in self._resident}
        if job.teacher is not None:
            teacher = {"teacher": job.teacher_bytes[self._rank], **self._teachers_forward()}
            if size := job.teacher_copies_bytes[self._rank]:
                teacher["teacher's copies in 8 bits"] = size
            found.append(Phase("teacher's logits", self._asleep | teacher))
        elif passes.logprob_tokens:
            forward = self._forward(passes.logprob_tokens)
            gone = {*self.leaving, *FREED} - {"weights"} if self.leaving else set()
            asleep = {name: size for name, size in self._asleep.items() if name not in gone} | copies
            found.append(Phase("log-probabilities", asleep | forward))
            if job.reference_on_host:
                exchanged = {"weights on their way": min(EXCHANGE_BYTES, self._static["weights"])}
                found.append(Phase("reference log-probabilities", asleep | forward | exchanged))
        others = {name: size for name, size in self._static.items() if name not in self._resident and size}
        activations = {"activations": self._step.times[rank].peak_bytes}
        found.append(Phase("training", self._resident | others | activations))
        found.append(Phase(UPDATE, self._resident | update_bytes(job, rank, self._step.stages[rank].layers)))
        return found

    def _engine(self) -> dict[str, int]:
        return {"vLLM's engine": int(self._job.passes.engine_share * self._job.device.memory_bytes)}

    @property
    def leaving(self) -> dict[str, int]:
        """What goes to the host between two trainings."""
        return self._for_engine | {name: self._asleep[name] for name in self._leaves_for_logprobs}

    @property
    def _for_engine(self) -> dict[str, int]:
        """What does while vLLM's engine has the device."""
        return self._beside_engine()[1] if self._job.passes.engine_share else {}

    def _beside_engine(self) -> tuple[dict[str, int], dict[str, int]]:
        """What stays on the device and what leaves it, as far as the engine lacks room, in `away_state`'s order.

        What leaves for log-probabilities in any case leaves here already.
        """
        room = self._job.budget_bytes - sum(self._engine().values())
        stays, leaves = dict(self._asleep), dict[str, int]()
        in_any_case = (*FREED, *self._leaves_for_logprobs) if self._leaves_for_logprobs else ()
        for name in (*FREED, "optimizer", "weights"):
            leaves_now = name in in_any_case or sum(stays.values()) > room
            if leaves_now and (size := stays.pop(name, 0)) and name not in FREED:
                leaves[name] = size
        return stays, leaves

    def _forward(self, tokens: int) -> dict[str, int]:
        return _forward_of(self._job, tokens, self._kinds, is_last=self._is_last)

    def _teachers_forward(self) -> dict[str, int]:
        teacher = self._job.of_teacher
        kinds = [teacher.shape.layer_kinds[layer] for chunk in teacher.stages[self._rank] for layer in chunk]
        return _forward_of(teacher, self._job.passes.teacher_tokens, kinds, is_last=self._is_last)

    def _generation(self) -> dict[str, int]:
        job, passes = self._job, self._job.passes
        layout = replace(job.layout, sequence_parallel=False, context=1)  # a step has one position of each row
        tokens = passes.generation_rows * passes.generation_length
        whole = replace(job.context, layout=layout, tokens=Tokens(tokens, passes.generation_length))
        prompts = replace(whole, tokens=Tokens(passes.generation_rows * passes.prompt_length, passes.prompt_length))
        found = {
            **generation_bytes(whole, self._kinds),
            "one layer's forward": _one_layer(prompts, self._kinds, job.adapters),
        }
        if self._is_last:
            rows, element_bytes = passes.generation_rows, job.numbers.element_bytes
            found["logits"] = forward_logits_bytes(job.shape, layout, rows, element_bytes)
        return found

    def moves(self) -> list[Move]:
        """What crosses the link in a step, but for activations, which the simulation times."""
        found, host = [], self._job.resident_host_bytes[self._rank]
        if size := host.get("reference weights"):
            found.append(self._move("reference log-probabilities", "reference weights in and out", 2 * size, 2 * size))
        late = {name: size for name, size in self.leaving.items() if name not in self._for_engine}
        for phase, leaving in (("generation", self._for_engine), ("log-probabilities", late)):
            if size := sum(leaving.values()):
                link = job_link(self._job)
                ms = size / link.out_bytes_per_ms + size / link.in_bytes_per_ms
                found.append(Move(phase, f"{' and '.join(leaving)} out and in again", size, size, ms))
        if size := self._job.teacher_bytes[self._rank]:
            found.append(self._move("teacher's logits", "teacher's weights in", 0, size))
        if size := host.get("optimizer"):
            found.append(self._move(UPDATE, "optimizer through the device", size, size))
        return found

    def _move(self, phase: str, what: str, out_bytes: int, in_bytes: int) -> Move:
        link = job_link(self._job)
        ms = max(out_bytes / link.out_bytes_per_ms, in_bytes / link.in_bytes_per_ms)
        return Move(phase, what, out_bytes, in_bytes, ms)


def _forward_of(job: Job, tokens: int, kinds: Sequence[LayerKind], *, is_last: bool) -> dict[str, int]:
    """Of a pass over so many tokens through a stage of these layers."""
    context = replace(job.context, tokens=Tokens(max(1, tokens // job.layout.context), job.sequence))
    found = {"one layer's forward": _one_layer(context, kinds, job.adapters)}
    if is_last:
        head_bytes = forward_logits_bytes if job.makes_logits else fused_head_forward_bytes
        element_bytes, chunk = job.numbers.element_bytes, job.head_chunk_tokens(max(1, tokens // job.sequence))
        count, dim = context.tokens.count, job.head_adapter_dim
        head = head_bytes(job.shape, job.layout, count, element_bytes, chunk, adapter_dim=dim)
        return {job.head_name: max(head, *found.values())}  # one after the other
    return found


def _one_layer(context: LayerContext, kinds: Sequence[LayerKind], adapters: Adapters | None) -> int:
    each = (forward_bytes(context, kind) + adapters_bytes(context, kind, adapters, saves=False) for kind in set(kinds))
    return max(each, default=0)


def update_bytes(job: Job, rank: int, layers: Sequence[range]) -> dict[str, int]:
    """Device memory of an optimizer's step beside what is there throughout, on the stage that has these layers.

    torch's own optimizers make square roots of all second moments at once; Transformer Engine's make none. Megatron
    copies narrower gradients to float32, all of a rank's part at once, for an optimizer that reads no others.
    """
    parameters = trained_parameters(job.shape, job.layout, layers, rank, job.adapters)
    on_host = optimizer_host_bytes(parameters, job.layout, job.optimizer)
    found = {"buckets on their way": min(BUCKETS_BYTES, on_host)} if on_host else {}
    number = optimizer_parameters(parameters, job.layout, job.optimizer)
    if copies := job.optimizer.gradient_copy_bytes * number:
        found[GRADIENT_COPIES] = copies
    if job.transformer_engine or job.optimizer.state_bytes < 8:
        return found
    return found | {OWN_OF_UPDATE: round(UPDATE_BYTES * number * (1 - job.optimizer.share_on_host))}


def host_use(job: Job, step: SimulatedStep) -> HostUse:
    """What a job needs of the host under a simulated step."""
    ranks = range(len(step.stages))
    parts = {"activations": max(map(step.host_bytes, ranks))}
    leaving = [{LEAVING: sum(PhasesOfStage(job, step, rank).leaving.values())} for rank in ranks]
    for each in (*job.resident_host_bytes, *leaving):
        for name, size in each.items():
            parts[name] = max(size, parts.get(name, 0))
    beside = {
        "paged stash": max(stage.stash_host_bytes for stage in step.stages),
        "teacher": max(job.teacher_bytes),
    }
    node_bytes = int(job.device.host_memory_gib * GIB) * job.node_ranks
    parts, beside = ({name: size for name, size in sizes.items() if size} for sizes in (parts, beside))
    return HostUse(parts, beside, job.host_budget_bytes, job.node_ranks, node_bytes)


def update_lacks(job: Job, step: SimulatedStep) -> int:
    """Bytes by which an optimizer's step, which no choice of modules changes, is above the budget."""
    ranks = range(job.layout.pipeline)
    peaks = [PhasesOfStage(job, step, rank).phases()[-1].peak_bytes for rank in ranks]
    return max(0, max(peaks) - job.budget_bytes)


def lacking(job: Job, step: SimulatedStep, *, training_fits: bool = True) -> Iterator[str]:
    """What is missing beside the training step: on the host, and in phases that no choice of modules changes. The
    optimizer's share on the host that its own step asks for is named where training asks for no other."""
    yield from _lacking_on_host(job, host_use(job, step))
    room_bytes = job.budget_bytes - highest_peak(step)
    for rank, phase in fullest(job, step):
        if phase.name != "training" and phase.peak_bytes > job.budget_bytes:
            yield (
                f"{phase.name} on stage {rank}: {gib(phase.peak_bytes)}, {gib(phase.peak_bytes - job.budget_bytes)} "
                f"more than there is. {_remedy(job, phase, training_fits, room_bytes)}"
            ).rstrip()


def _lacking_on_host(job: Job, host: HostUse) -> Iterator[str]:
    resident = {name: size for name, size in host.parts.items() if name != "activations"}
    less = ", or lower optimizer_offload_fraction" if "optimizer" in resident else ""
    if job.optimizer_leaves_for_logprob and job.teacher is None and LEAVING in resident:
        less += ", or leave out policy.offload_optimizer_for_logprob"
    if (needed_bytes := sum(resident.values())) > host.budget_bytes:
        yield (
            f"host memory: {_listed(resident)} per rank, {gib(needed_bytes - host.budget_bytes)} more than the "
            f"{gib(host.budget_bytes)} of activation_offload.host_memory_budget. Raise that{less}."
        )
    if (teacher_bytes := host.beside.get("teacher", 0)) > host.budget_bytes:
        yield (
            f"host memory: the teacher's weights {gib(teacher_bytes)} per rank, "
            f"{gib(teacher_bytes - host.budget_bytes)} more than the {gib(host.budget_bytes)} of "
            "activation_offload.host_memory_budget, which is its workers' too. Raise that."
        )
    if host.used_node_bytes > host.node_bytes:
        yield (
            f"host memory: {host.node_ranks} ranks take {gib(host.used_node_bytes)}, a machine has "
            f"{gib(host.node_bytes)}: {_listed(host.parts | host.beside)} each. Lower "
            f"activation_offload.host_memory_budget{less.replace(', or lower', ' or', 1)}."
        )


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())


def _remedy(job: Job, phase: Phase, training_fits: bool, room_bytes: int) -> str:
    """`room_bytes` is what training leaves."""
    if "vLLM's engine" in phase.parts:
        left = job.budget_bytes - phase.peak_bytes + phase.parts["vLLM's engine"]
        share = max(0.0, left / job.device.memory_bytes)
        return f"policy.generation.vllm_cfg.gpu_memory_utilization may be {int(share * 100) / 100:g}."
    if phase.name == "generation":
        return "Lower policy.generation_batch_size."
    if phase.name == UPDATE:
        return _remedy_of_update(job, phase, training_fits, room_bytes)
    of_pass = sum(phase.parts.get(name, 0) for name in ("one layer's forward", job.head_name))
    tokens = job.passes.teacher_tokens if "teacher" in phase.parts else job.passes.logprob_tokens
    fused = "set policy.megatron_cfg.use_fused_linear_logprobs=true" if job.makes_logits else ""
    if phase.peak_bytes - of_pass > job.budget_bytes or (tokens <= job.sequence and not fused):
        return f"{OF_MODEL}: divide the model over more ranks."
    if tokens <= job.sequence:
        return f"S{fused[1:]}."
    return f"Lower {_key_of_pass(job, phase)}{', or ' if fused else ''}{fused}."


def _remedy_of_update(job: Job, phase: Phase, training_fits: bool, room_bytes: int) -> str:
    path, gradients = "policy.megatron_cfg.optimizer", phase.parts["gradients"]
    without = Phase(phase.name, {name: size for name, size in phase.parts.items() if name != GRADIENT_COPIES})
    aware = f"{path}.use_precision_aware_optimizer=true"
    if job.optimizer.could_read_gradients and without.peak_bytes <= job.budget_bytes:
        return f"Set {aware}: gradients are then read as they are."
    if without != phase and gradients <= min(room_bytes, job.budget_bytes - without.peak_bytes):
        key = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32"
        return f"Set {key}=true: no copies then, and {gib(gradients)} more in training."
    both = f"{aware} " if job.optimizer.could_read_gradients else ""
    share = _least_share_on_host(job, phase)
    if share > 1 and both:
        share = _least_share_on_host(job, without)
    else:
        both = ""
    if share > 1:
        return "With all of the optimizer on the host there is too little too."
    sets = f"Set {both}{path}.optimizer_cpu_offload=true {path}.optimizer_offload_fraction={share:g} for that."
    return sets if training_fits else ""


def _key_of_pass(job: Job, phase: Phase) -> str:
    if job.micro_batch_tokens is not None:
        return f"policy.{'sequence_packing' if job.is_packed else 'dynamic_batching'}.logprob_mb_tokens"
    is_own = "teacher" in phase.parts and job.passes.teachers_own_rows
    return f"{'teacher' if is_own else 'policy'}.logprob_batch_size"


def _least_share_on_host(job: Job, phase: Phase) -> float:
    """Of the optimizer, in quarters, with which its own step finds room; above 1 where none does."""
    given, here = job.optimizer.share_on_host, sum(phase.parts.get(name, 0) for name in ("optimizer", OWN_OF_UPDATE))
    excess = phase.peak_bytes - job.budget_bytes + (0 if given else BUCKETS_BYTES)
    return least_share(given, excess, here) if here else math.inf


def least_share(given: float, lacking_bytes: float, here_bytes: float) -> float:
    """Of the optimizer on the host, in quarters, with which that much less is on the device, where `here_bytes` are."""
    return math.ceil(4 * (given + (1 - given) * lacking_bytes / here_bytes)) / 4


def fullest(job: Job, step: SimulatedStep) -> Sequence[tuple[int, Phase]]:
    """Each phase on the stage where it takes most, and that stage's number."""
    found: dict[str, tuple[int, Phase]] = {}
    for rank in range(len(step.stages)):
        for phase in PhasesOfStage(job, step, rank).phases():
            if phase.name not in found or phase.peak_bytes > found[phase.name][1].peak_bytes:
                found[phase.name] = (rank, phase)
    return list(found.values())
