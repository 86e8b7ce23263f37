"""A plan as data: what `--format json` prints, and what the tables and the page show."""

from typing import TypedDict

from nemo_rl_offload.offload.solver import Action
from nemo_rl_offload.planner.phases import PhasesOfStage, fullest, host_use
from nemo_rl_offload.planner.plan import JobPlan
from nemo_rl_offload.planner.search.layout_keys import to_paste
from nemo_rl_offload.planner.search.to_config import PlannedKeys, planned_keys
from nemo_rl_offload.planner.simulate.simulated_step import ModuleRow, SimulatedStep, module_rows
from nemo_rl_offload.planner.simulate.stages import job_link


class StepData(TypedDict):
    """A simulated step; bytes of the fullest rank."""

    step_ms: float
    peak_bytes: int
    host_bytes: int
    exposed_share: float


class HostData(TypedDict):
    """Host memory that the choice needs, and that there is."""

    parts: dict[str, int]
    """Of a rank's pinned memory, what waits there."""
    beside: dict[str, int]
    """Of a rank, beside its budget."""
    budget_per_rank_bytes: int
    per_rank_bytes: int
    """For activations."""
    per_node_bytes: int
    of_it_start_model_bytes: int
    pinned_limit_per_rank_bytes: int
    """For activations, beside what stays there."""
    memory_per_node_bytes: int
    stash_per_rank_bytes: int


class MoveData(TypedDict):
    """What crosses the link in a phase of a step."""

    what: str
    out_bytes: int
    in_bytes: int
    ms: float


class PhaseData(TypedDict):
    """A phase of a step, on the stage where it takes most."""

    phase: str
    stage: int
    peak_bytes: int
    parts: dict[str, int]
    moves: list[MoveData]


class ModuleData(TypedDict):
    """One module on one stage."""

    module: str
    bytes_per_microbatch: int
    bytes_at_peak: int
    goes: str
    link_ms_per_microbatch: float
    recompute_ms_per_microbatch: float
    exposed_ms: float
    copies: str


class StageData(TypedDict):
    """One pipeline stage under the choice."""

    stage: int
    layers: list[list[int]]
    live_microbatches: list[int]
    static_bytes: dict[str, int]
    peak_bytes_before: int
    peak_bytes: int
    host_bytes: int
    exposed_share: float
    shortfall_bytes: int
    other_bytes_at_peak: int
    modules: list[ModuleData]


class PointData(TypedDict):
    """Memory against step time."""

    peak_bytes: int
    step_ms: float


class PlanData(TypedDict):
    """Everything in a plan."""

    device: str
    budget_bytes: int
    world: int
    microbatches: int
    fits: bool
    """Everything."""
    training_fits: bool
    lacking: list[str]
    """What is missing beside the training step."""
    phases: list[PhaseData]
    shortfall_bytes: int
    """Of the training step."""
    changes: list[str]
    """What would make it fit, a layout among them where these were searched."""
    outcomes: dict[str, StepData]
    """nothing_offloaded, as_configured (where something is), chosen, written."""
    without_recomputation: StepData | None
    """Nothing offloaded or recomputed, where recomputation is configured and this fits."""
    megatron_cfg: PlannedKeys
    host: HostData
    least_optimizer_offload_fraction: float | None
    """With which the choice fits too, where that is less than is configured."""
    recommended_factors: dict[str, float]
    stages: list[StageData]
    frontier: list[PointData]
    frontier_megatron_cfg: list[PlannedKeys]
    """What gives each of its points."""


def plan_data(plan: JobPlan) -> PlanData:
    """Everything in a plan; bytes and milliseconds, by names that say so."""
    job, layout = plan.job, plan.job.layout
    hosts = [plan.chosen.host_bytes(rank) for rank in range(layout.pipeline)]
    host, missing = host_use(plan.chosen_job, plan.chosen), plan.lacking
    return {
        "device": job.device.name,
        "budget_bytes": job.budget_bytes,
        "world": layout.world,
        "microbatches": job.num_microbatches,
        "fits": plan.shortfall_bytes == 0 and not missing,
        "training_fits": plan.shortfall_bytes == 0,
        "lacking": missing,
        "phases": _phases(plan),
        "shortfall_bytes": plan.shortfall_bytes,
        "changes": [*plan.suggestions, *(to_paste(each.keys) for each in plan.layouts)],
        "outcomes": {
            name: _step_data(step)
            for name, step in {
                "nothing_offloaded": plan.baseline,
                "as_configured": plan.configured,
                "chosen": plan.chosen,
                "written": plan.written.step,
            }.items()
            if step is not None
        },
        "without_recomputation": None if (without := plan.without_recomputation) is None else _step_data(without.step),
        "megatron_cfg": plan.keys,
        "host": {
            "parts": host.parts,
            "beside": host.beside,
            "budget_per_rank_bytes": host.budget_bytes,
            "per_rank_bytes": max(hosts),
            "per_node_bytes": host.used_node_bytes,
            "of_it_start_model_bytes": host.parts.get("reference weights", 0) * job.node_ranks,
            "pinned_limit_per_rank_bytes": job.activations_host_budget_bytes,
            "memory_per_node_bytes": host.node_bytes,
            "stash_per_rank_bytes": max(stage.stash_host_bytes for stage in plan.chosen.stages),
        },
        "least_optimizer_offload_fraction": plan.least_optimizer_share,
        "recommended_factors": job.expert_buffers.recommended(),
        "stages": [_stage_data(plan, rank) for rank in range(layout.pipeline)],
        "frontier": [{"peak_bytes": point.peak_bytes, "step_ms": point.step_ms} for point in plan.frontier],
        "frontier_megatron_cfg": [planned_keys(job, point) for point in plan.frontier],
    }


def _phases(plan: JobPlan) -> list[PhaseData]:
    job, step = plan.chosen_job, plan.chosen
    found: list[PhaseData] = []
    for rank, phase in fullest(job, step):
        moves: list[MoveData] = [
            {"what": move.what, "out_bytes": move.out_bytes, "in_bytes": move.in_bytes, "ms": round(move.ms, 3)}
            for move in PhasesOfStage(job, step, rank).moves()
            if move.phase == phase.name
        ]
        found.append(
            {
                "phase": phase.name,
                "stage": rank,
                "peak_bytes": phase.peak_bytes,
                "parts": phase.parts,
                "moves": moves,
            }
        )
    return found


def _step_data(step: SimulatedStep) -> StepData:
    ranks = range(len(step.stages))
    return {
        "step_ms": round(step.step_ms, 3),
        "peak_bytes": max(step.peak_bytes(rank) for rank in ranks),
        "host_bytes": max(step.host_bytes(rank) for rank in ranks),
        "exposed_share": round(max(step.exposed_share(rank) for rank in ranks), 4),
    }


def _stage_data(plan: JobPlan, rank: int) -> StageData:
    stage = plan.chosen.stages[rank]
    return {
        "stage": rank,
        "layers": [[chunk.start, chunk.stop] for chunk in stage.layers],
        "live_microbatches": list(stage.live),
        "static_bytes": stage.static_bytes,
        "peak_bytes_before": plan.baseline.peak_bytes(rank),
        "peak_bytes": plan.chosen.peak_bytes(rank),
        "host_bytes": plan.chosen.host_bytes(rank),
        "exposed_share": round(plan.chosen.exposed_share(rank), 4),
        "shortfall_bytes": plan.shortfalls[rank],
        "other_bytes_at_peak": stage.kept_bytes(),
        "modules": [_row_data(plan, row) for row in module_rows(plan.chosen, rank)],
    }


def _row_data(plan: JobPlan, row: ModuleRow) -> ModuleData:
    link = job_link(plan.job)
    return {
        "module": row.module,
        "bytes_per_microbatch": row.num_bytes,
        "bytes_at_peak": row.live_bytes,
        "goes": _goes(row),
        "link_ms_per_microbatch": round(
            row.offloaded_bytes / link.out_bytes_per_ms + row.offloaded_bytes / link.in_bytes_per_ms, 3
        ),
        "recompute_ms_per_microbatch": round(row.recompute_ms, 3),
        "exposed_ms": round(row.exposed_ms, 3),
        "copies": _exposure(row),
    }


def _goes(row: ModuleRow) -> str:
    words = {Action.KEEP: "stays", Action.OFFLOAD: "host", Action.RECOMPUTE: "recomputed"}
    taken = [(words[action], len(places)) for action, places in sorted(row.places.items())]
    if len(taken) == 1:
        return taken[0][0]
    return f"{', '.join(f'{word} {count}' for word, count in taken)} of {row.num_layers}"


def _exposure(row: ModuleRow) -> str:
    if Action.OFFLOAD not in row.places:
        return "-"
    return "exposed" if row.exposed_ms > 0.01 else "hidden"
