"""A job cut into pipeline stages: parts in forward order, and what each holds, moves and costs."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product

from nemo_rl_offload.offload.solver import Action, GroupRecord, Link
from nemo_rl_offload.planner.cost.activations import fused_layer, with_recomputation
from nemo_rl_offload.planner.cost.adapters import adapters_bytes
from nemo_rl_offload.planner.cost.flops import layer_costs, recompute_ms, recomputed_ms
from nemo_rl_offload.planner.cost.gradients import backward_bytes
from nemo_rl_offload.planner.cost.head import fused_head_bytes, logits_bytes
from nemo_rl_offload.planner.cost.memory import (
    EIGHT_BIT_COPIES,
    allowance_bytes,
    eight_bit_copies_bytes,
    stage_adapters,
    stage_parameters,
    state_bytes,
)
from nemo_rl_offload.planner.cost.storages import Storage
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.planner.simulate.pipeline_schedule import PipelinePass, pipeline_schedule
from nemo_rl_offload.planner.simulate.simulator import Segment
from nemo_rl_offload.specs.model_shape import LayerKind
from nemo_rl_offload.specs.parallel_layout import counted_layers, stage_layers


@dataclass(frozen=True)
class StorageGroup:
    """Storages that are kept, offloaded or recomputed together."""

    module: str
    num_bytes: int
    can_offload: bool
    recomputed_by: str | None
    recompute_ms: float | None


@dataclass(frozen=True)
class Part:
    """A module of a layer, or whole layers that are recomputed."""

    layer: int
    module: str
    forward_ms: float
    backward_ms: float
    kept_bytes: int = 0
    """What no choice changes."""
    groups: tuple[StorageGroup, ...] = ()
    recompute_ms: float = 0.0
    """Of `backward_ms`, what computes again what the job recomputes."""
    is_recomputed: bool = False
    """Whether nothing is left of what it saves."""

    def of_layer(self, layer: int) -> "Part":
        return Part(
            layer,
            self.module,
            self.forward_ms,
            self.backward_ms,
            self.kept_bytes,
            self.groups,
            self.recompute_ms,
            self.is_recomputed,
        )


@dataclass(frozen=True)
class Stage:
    """One pipeline rank."""

    rank: int
    layers: tuple[range, ...]
    """Of each chunk."""
    chunks: tuple[tuple[Part, ...], ...]
    static_bytes: dict[str, int]
    """Memory that is there throughout, or at the peak in any case, by name."""
    live: tuple[int, ...]
    """Microbatches that each chunk holds when the stage holds most."""
    stash_host_bytes: int = 0
    """Pinned pages for what the experts save."""

    def records(self) -> tuple[GroupRecord, ...]:
        """What `solve` takes: one record per group; a part's time stands on its first."""
        return self._records

    @cached_property
    def _records(self) -> tuple[GroupRecord, ...]:
        found = []
        for part, live in self._parts():
            groups = part.groups or (StorageGroup(part.module, 0, False, None, None),)
            for number, group in enumerate(groups):
                times = (part.forward_ms, part.backward_ms) if number == 0 else (0.0, 0.0)
                record = GroupRecord(
                    group.module, part.layer, group.num_bytes, *times, group.recompute_ms, live, group.can_offload
                )
                found.append(record)
        return tuple(found)

    def groups(self) -> list[StorageGroup | None]:
        """The group of each record; None for a part without one."""
        return [group for part, _ in self._parts() for group in part.groups or (None,)]

    def _parts(self) -> list[tuple[Part, int]]:
        return [(part, live) for parts, live in zip(self.chunks, self.live, strict=True) for part in parts]

    def kept_bytes(self) -> int:
        """Activations at the peak that no choice changes."""
        return sum(part.kept_bytes * live for part, live in self._parts())

    def segments(self, actions: Sequence[Action]) -> list[list[Segment]]:
        """What the simulator takes, by chunk; `actions` are in the order of `records`.

        One segment for each part that offloads, together with the parts before it that do not, and one for the rest.
        That changes no time: a copy is queued at the end of a segment, and wanted back at the start of its backward.
        """
        return [[segment for segment, _ in chunk] for chunk in self._segments(actions)]

    def owners(self, actions: Sequence[Action]) -> list[dict[int, int]]:
        """For each chunk, the segment of each part that offloads."""
        return [
            {part: number for number, (segment, part) in enumerate(chunk) if segment.offloaded_bytes}
            for chunk in self._segments(actions)
        ]

    def _segments(self, actions: Sequence[Action]) -> list[list[tuple[Segment, int]]]:
        remaining = iter(actions)
        found = []
        for parts in self.chunks:
            chunk: list[tuple[Segment, int]] = []
            waiting = Segment(0.0, 0.0)
            for index, part in enumerate(parts):
                waiting = _joined(waiting, _segment(part, remaining))
                if waiting.offloaded_bytes or index == len(parts) - 1:
                    chunk.append((waiting, index))
                    waiting = Segment(0.0, 0.0)
            found.append(chunk)
        return found


def _segment(part: Part, actions: Iterator[Action]) -> Segment:
    kept, offloaded, backward_ms = part.kept_bytes, 0, part.backward_ms
    for group in part.groups:
        action = next(actions)
        if action is Action.KEEP:
            kept += group.num_bytes
        elif action is Action.OFFLOAD:
            offloaded += group.num_bytes
        else:
            assert group.recompute_ms is not None
            backward_ms += group.recompute_ms
    if not part.groups:
        next(actions)
    return Segment(part.forward_ms, backward_ms, kept, offloaded)


def _joined(first: Segment, second: Segment) -> Segment:
    return Segment(
        first.forward_ms + second.forward_ms,
        first.backward_ms + second.backward_ms,
        first.kept_bytes + second.kept_bytes,
        first.offloaded_bytes + second.offloaded_bytes,
    )


def job_link(job: Job) -> Link:
    """The link of one device."""
    return Link(job.device.link_out_gb_per_s * 1e6, job.device.link_in_gb_per_s * 1e6)


def job_schedule(job: Job, num_microbatches: int) -> Sequence[Sequence[PipelinePass]]:
    """The passes of each stage."""
    return pipeline_schedule(job.layout.pipeline, num_microbatches, job.layout.virtual)


def build_stages(job: Job, modules: Collection[str], may_recompute: Collection[str] = ()) -> tuple[Stage, ...]:
    """Cut a job into stages whose groups are those of `modules`: names that may be offloaded.

    What entries of `may_recompute`, some of `SEPARABLE`, give up may be recomputed; what they pin may not be offloaded.
    """
    if job.recompute.method is not None:
        may_recompute = ()  # Megatron-Core recomputes either modules or layers
    return _build_stages(job, tuple(modules), frozenset(may_recompute))


@lru_cache(maxsize=128)
def _build_stages(job: Job, modules: tuple[str, ...], may_recompute: frozenset[str]) -> tuple[Stage, ...]:
    layers = stage_layers(job.layout, job.shape.num_layers)
    # Twice the pipeline and its chunks is enough for every stage to reach its peak.
    enough = min(job.num_microbatches, 2 * job.layout.pipeline * job.layout.virtual)
    schedule = job_schedule(job, enough)
    builder = _Builder(job, modules, may_recompute)
    return tuple(builder.stage(rank, chunks, schedule[rank]) for rank, chunks in enumerate(layers))


type _KindOfLayer = tuple[LayerKind, bool]
"""With whether the layer is one of the counted ones."""


class _Builder:
    def __init__(self, job: Job, modules: Collection[str], may_recompute: frozenset[str]) -> None:
        self.job = job
        self.modules = modules
        self.kinds = job.shape.all_kinds
        self.layers: dict[_KindOfLayer, tuple[Part, ...]] = {}
        self.workspace: dict[_KindOfLayer, int] = {}
        self.alive_bytes = self.host_bytes = 0
        for kind, is_counted in product(dict.fromkeys(self.kinds), (True, False)):
            self.layers[kind, is_counted] = self._layer(kind, is_counted, may_recompute)

    def _layer(self, kind: LayerKind, is_counted: bool, may_recompute: frozenset[str]) -> tuple[Part, ...]:
        job, fp8 = self.job, self.job.numbers.fp8 is not None
        recompute_modules, is_frozen = job.recompute.of_layer(is_counted), job.adapters is not None
        storages = with_recomputation(fused_layer(job.context, kind), recompute_modules)
        times = {
            work.module: (work.forward_ms(job.device, fp8), work.backward_ms(job.device, fp8, is_frozen=is_frozen))
            for work in layer_costs(job.context, kind)
        }
        if kind.mlp == "experts":
            self.alive_bytes = job.expert_buffers.alive_bytes(storages)
            self.host_bytes = job.expert_buffers.host_bytes(storages)
            storages = job.expert_buffers.saved(storages)
        self.workspace[kind, is_counted] = sum(
            storage.num_bytes
            for storage in storages
            if job.recompute.method or not storage.live or not may_recompute.isdisjoint(storage.recomputed_by)
        )
        if {"experts": "moe", "dense": "mlp"}.get(kind.mlp or "") in recompute_modules:
            # Backward holds the output that it computed again.
            self.workspace[kind, is_counted] += job.context.hidden_bytes
        extra = recomputed_ms(job.context, kind, recompute_modules, job.device)
        for module, extra_ms in extra.items():
            forward_ms, backward_ms = times[module]
            times[module] = forward_ms, backward_ms + extra_ms
        parts = _layer_parts(job, storages, times, self.modules, may_recompute)
        gone, left = ({s.modules[0] for s in storages if s.modules and s.live == live} for live in (False, True))
        return tuple(
            replace(part, recompute_ms=extra.get(part.module, 0.0), is_recomputed=part.module in gone - left)
            for part in parts
        )

    def stage(self, rank: int, chunks: Sequence[range], passes: Sequence[PipelinePass]) -> Stage:
        job, is_last = self.job, rank == self.job.layout.pipeline - 1
        parts = [self._chunk(chunk) for chunk in chunks]
        if is_last:
            parts[-1] = (*parts[-1], *self._end(self._counted_layers(chunks[-1])))
        parameters = stage_parameters(job.shape, job.layout, chunks, rank)
        adapters = None
        if job.adapters is not None:
            adapters = stage_adapters(job.shape, job.layout, chunks, rank, job.adapters)
        static = state_bytes(parameters, job.layout, job.optimizer, job.numbers.element_bytes, adapters)
        if job.numbers.fp8 is not None:
            static[EIGHT_BIT_COPIES] = eight_bit_copies_bytes(job.shape, job.layout, chunks, rank)
        if is_last:
            without_logits = partial(
                fused_head_bytes, is_frozen=job.adapters is not None, adapter_dim=job.head_adapter_dim
            )
            head_bytes = logits_bytes if job.makes_logits else without_logits
            static[job.head_name] = head_bytes(
                job.shape,
                job.layout,
                job.context.tokens.count,
                job.numbers.element_bytes,
                job.head_chunk_tokens(job.micro_batch),
            )
        # At the end of the pipeline, what was there for the loss is gone when the layers' backward begins.
        gone = static.get(job.head_name, 0) + (parts[-1][-1].kept_bytes if is_last else 0)
        backward = self._backward_bytes(chunks)
        if any(self.workspace.values()):
            static["recomputation"] = max(0, self._recomputation_bytes(chunks) - max(0, gone - backward))
        static["backward"] = max(0, backward - gone)
        num_expert_layers = [sum(self.kinds[layer].mlp == "experts" for layer in chunk) for chunk in chunks]
        if self.alive_bytes and any(num_expert_layers):
            static["experts' buffers"] = self.alive_bytes
        static |= allowance_bytes(job.device)
        sizes = [sum(p.kept_bytes + sum(g.num_bytes for g in p.groups) for p in chunk) for chunk in parts]
        live = live_at_peak(passes, sizes)
        host_bytes = self.host_bytes * sum(count * each for count, each in zip(live, num_expert_layers, strict=True))
        return Stage(rank, tuple(chunks), tuple(parts), static, live, host_bytes)

    def _recomputation_bytes(self, chunks: Sequence[range]) -> int:
        """What is recomputed at a time: some of a layer, or a group of layers, with its output instead of its input,
        which was kept.

        When backward comes to another layer than the chunk's last, what that one kept on the device is gone.
        """
        recompute, largest = self.job.recompute, max(self.workspace.values())
        if recompute.method is None:
            last = next((chunk for chunk in reversed(chunks) if self._with_mtp(chunk)), None)
            if last is None:  # the loss alone
                return 0
            layer = self._with_mtp(last)[-1]
            kind = self.kinds[layer], layer in self._counted_layers(last)
            return max(self.workspace[kind], largest - sum(part.kept_bytes for part in self.layers[kind]))
        longest_chunk = max(map(len, chunks))
        return largest * (min(recompute.num_layers, longest_chunk) if recompute.method == "uniform" else 1)

    def _backward_bytes(self, chunks: Sequence[range]) -> int:
        """Beside saved activations, of a layer's backward, or of its forward where adapters make that the larger."""
        context, adapters = self.job.context, self.job.adapters
        kinds = {self.kinds[layer] for chunk in chunks for layer in self._with_mtp(chunk)}
        backward = (backward_bytes(context, kind, is_frozen=adapters is not None) for kind in kinds)
        forward = (adapters_bytes(context, kind, adapters, saves=True) for kind in kinds)
        return max([*backward, *forward], default=0)

    def _chunk(self, layers: range) -> tuple[Part, ...]:
        job, found = self.job, []
        counted = self._counted_layers(layers)
        for number, layer in enumerate(layers):
            parts = self.layers[self.kinds[layer], layer in counted]
            method = job.recompute.method
            if method == "uniform" or (method == "block" and number < job.recompute.num_layers):
                is_input = method == "block" or number % job.recompute.num_layers == 0
                parts = (_recomputed(job, parts, self.modules, is_input),)
            found += [part.of_layer(layer) for part in parts]
        return tuple(found)

    def _counted_layers(self, layers: range) -> set[int]:
        """Those of a chunk for which `num_counted_layers` is."""
        every, ends_with_loss = self._with_mtp(layers), layers.stop == self.job.shape.num_layers
        is_dense = [self.kinds[layer].mlp == "dense" for layer in every]
        return {every[i] for i in counted_layers(is_dense, self.job.recompute.num_counted_layers, ends_with_loss)}

    def _with_mtp(self, layers: range) -> range:
        """Those of multi-token prediction come behind the others."""
        return range(layers.start, len(self.kinds) if layers.stop == self.job.shape.num_layers else layers.stop)

    def _end(self, counted: Collection[int]) -> tuple[Part, ...]:
        """Multi-token prediction, and the final norm with the output layer."""
        job, context = self.job, self.job.context
        hidden = context.hidden_bytes
        found = []
        is_recomputed = job.recompute.method == "uniform"  # with block, Megatron-Core recomputes none of these
        for layer in range(job.shape.num_layers, len(self.kinds)):
            if (layer - job.shape.num_layers) % len(job.shape.mtp_kinds) == 0:
                # Inputs of the two norms, and of the projection of both to one, which is recomputed with the layer.
                kept_bytes = (2 if is_recomputed else 4) * hidden
                found.append(Part(layer, "mtp_projection", 0.0, 0.0, kept_bytes=kept_bytes))
            parts = self.layers[self.kinds[layer], layer in counted]
            found += [part.of_layer(layer) for part in ([_whole(parts)] if is_recomputed else parts)]
        forward_ms, backward_ms = output_layer_ms(job)
        end = Part(job.shape.num_layers, "output_layer", forward_ms, backward_ms, kept_bytes=2 * hidden)
        return (*found, end)


def output_layer_ms(job: Job) -> tuple[float, float]:
    """Of a microbatch, forward and backward, with those for further tokens."""
    operations = 2.0 * job.context.tokens.count * job.shape.hidden_size * job.shape.vocabulary_rows(job.layout.tensor)
    forward_ms = operations * (1 + job.shape.num_mtp_layers) / (job.device.bf16_tflops * job.device.achieved) / 1e9
    num_products = (2 if job.makes_logits else 3) - (job.adapters is not None)
    return forward_ms, num_products * forward_ms


def _recomputed(job: Job, parts: Sequence[Part], modules: Collection[str], is_input: bool) -> Part:
    """A layer that saves its input at most, which `attn_norm` stands for; in 8 bits it stays on the device."""
    whole = _whole(parts)
    num_elements = job.context.norm_tokens * job.shape.hidden_size if is_input else 0
    num_bytes = num_elements * job.numbers.element_bytes
    may_leave = "attn_norm" in modules and job.numbers.fp8 is None
    if num_bytes and may_leave and num_elements >= job.min_elements:
        return replace(whole, groups=(StorageGroup("attn_norm", num_bytes, True, None, None),))
    return replace(whole, kept_bytes=num_bytes)


def _whole(parts: Sequence[Part]) -> Part:
    """A layer that is computed again in backward, without what it saves."""
    forward_ms = sum(part.forward_ms for part in parts)
    return Part(0, "recomputed_layer", forward_ms, forward_ms + sum(part.backward_ms for part in parts))


def _layer_parts(
    job: Job,
    storages: Sequence[Storage],
    times: dict[str, tuple[float, float]],
    modules: Collection[str],
    may_recompute: Collection[str],
) -> tuple[Part, ...]:
    """Put each storage to the part whose module is charged, and what cannot be chosen to the layer's first part."""
    kept: Counter[str] = Counter()
    elsewhere = "mlp_norm" if "mlp_norm" in times else next(iter(times))
    grouped: dict[tuple[str, str], Counter[tuple[bool, str | None]]] = {}
    for storage in storages:
        if not storage.live:
            continue
        module = storage.charged_to(modules, job.min_elements) if storage.leaves(modules) else None
        by = next((name for name in storage.recomputed_by if name in may_recompute), None)
        place = module or (storage.modules[0] if storage.modules and storage.modules[0] in times else elsewhere)
        if module is None and by is None:
            kept[place] += storage.num_bytes
        else:
            label = module or storage.name
            grouped.setdefault((place, label), Counter())[module is not None, by] += storage.num_bytes
    found = []
    for name, (forward_ms, backward_ms) in times.items():
        groups = tuple(
            StorageGroup(
                label, size, can_offload, by, None if by is None else recompute_ms(job.context, by, job.device)
            )
            for (place, label), sizes in grouped.items()
            if place == name
            for (can_offload, by), size in sizes.items()
        )
        found.append(Part(0, name, forward_ms, backward_ms, kept[name], groups))
    return tuple(found)


def live_at_peak(passes: Sequence[PipelinePass], chunk_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return how many microbatches each chunk holds at the moment at which a stage holds most bytes."""
    live = [0] * len(chunk_bytes)
    most, peak = -1, tuple(live)
    for each in passes:
        live[each.chunk] += 1 if each.forward else -1
        total = sum(count * size for count, size in zip(live, chunk_bytes, strict=True))
        if total > most:
            most, peak = total, tuple(live)
    return peak
