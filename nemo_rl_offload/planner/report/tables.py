"""A plan in sentences, and as tables on a terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.plan import JobPlan
from nemo_rl_offload.planner.report.data import PhaseData, StageData, plan_data
from nemo_rl_offload.planner.search.layout_keys import to_paste
from nemo_rl_offload.planner.search.layout_search import FoundLayout, LayoutAdvice
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig, excess_bytes
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS
from nemo_rl_offload.units import MIB, gib

COLUMNS = ("module", "microbatch", "at peak", "goes", "link", "recompute", "copies")
PHASE_COLUMNS = ("phase", "peak", "link", "GiB")
FRONTIER_COLUMNS = ("memory", "step", "ratio", "", "with")
_RIGHT = ("microbatch", "at peak", "link", "recompute", "peak", "memory", "step", "ratio")
_WRAPPED = ("goes", "GiB", "with")
TO_PASTE = "to paste: "
WIDTH = 80
"""From so many columns on, what is not `_WRAPPED` stands on one line."""


def summary_lines(plan: JobPlan) -> list[str]:
    """The plan in sentences: whether it fits, what it costs, what the host needs, what to change."""
    data, job = plan_data(plan), plan.job
    outcomes, host = data["outcomes"], data["host"]
    base = outcomes["nothing_offloaded"]
    size = f"{job.micro_batch} x {job.sequence}" if job.micro_batch_tokens is None else f"{job.micro_batch_tokens}"
    lines = [
        f"{job.device.name}, {counted(job.layout.world, 'device', 's')}, "
        f"{counted(job.num_microbatches, 'microbatch', 'es')} of {size} tokens; {gib(job.budget_bytes)} each",
        *(f"not enough: {text}" for text in data["lacking"]),
    ]
    titles = {
        "nothing_offloaded": "nothing offloaded",
        "as_configured": "as configured",
        "chosen": "chosen for the budget",
        "written": "as whole modules",
    }
    recomputed = {"chosen": plan.choice.recompute, "written": plan.written.recompute}
    for name, outcome in outcomes.items():
        recompute = _recomputed(recomputed.get(name, job.recompute))
        change = 100 * (outcome["step_ms"] / base["step_ms"] - 1)
        lines.append(
            f"{titles[name]}: peak {gib(outcome['peak_bytes'])}, step {shown_time(outcome['step_ms'])} "
            f"({change:+.1f} %), host {gib(outcome['host_bytes'])} per rank{recompute and f'; {recompute}'}"
        )
    fullest = max(data["phases"], key=lambda phase: phase["peak_bytes"])
    if fullest["peak_bytes"] > outcomes["chosen"]["peak_bytes"]:
        most = f"{fullest['phase']}, {gib(fullest['peak_bytes'])}"
        lines.append(f"these peaks are of training; what is chosen takes most in {most}")
    parts = {name: size for name, size in host["parts"].items() if name != "activations"}
    lines.append(
        f"host memory per node: {gib(host['per_node_bytes'])} of {gib(host['memory_per_node_bytes'])}; per rank "
        + "".join(f"{name} {gib(size)}, " for name, size in parts.items())
        + f"activations {gib(host['per_rank_bytes'])} of at most {gib(host['pinned_limit_per_rank_bytes'])}"
    )
    if teacher_bytes := host["beside"].get("teacher"):
        lines.append(f"teacher: {gib(teacher_bytes)} of pinned memory per rank besides")
    if host["stash_per_rank_bytes"]:
        lines.append(f"paged stash: {gib(host['stash_per_rank_bytes'])} of pinned pages per rank besides")
    if factors := data["recommended_factors"]:
        lines.append("for this routing: " + "; ".join(f"{key}: {factor}" for key, factor in factors.items()))
    if job.any_implementation:
        lines.append("transformer_impl: auto is planned as torch, with modules that Transformer Engine has too")
    return lines + _verdict(plan)


def _recomputed(recompute: Recompute) -> str:
    if recompute.method is not None:
        number = f"{recompute.num_layers} of each chunk" if recompute.method == "block" else ""
        return f"recomputes whole layers{number and f' ({number})'}"
    if not recompute.modules:
        return ""
    counted = recompute.keys["recompute_num_layers"]
    return f"recomputes {', '.join(sorted(recompute.modules))}{f' ({counted} layers)' if counted else ''}"


def _verdict(plan: JobPlan) -> list[str]:
    if plan.shortfall_bytes:
        rank = plan.shortfalls.index(plan.shortfall_bytes)
        decimals = max(
            _decimals(plan.chosen.peak_bytes(rank), plan.job.budget_bytes), _decimals(plan.shortfall_bytes, 0)
        )
        short = (
            f"does not fit: stage {rank} needs {gib(plan.chosen.peak_bytes(rank), decimals)}, "
            f"{gib(plan.shortfall_bytes, decimals)} more than there is."
        )
        return [short, *changes_lines(plan)]
    keys = plan.keys
    words = [f"offload_modules: {_yaml(keys['offload_modules'])}"] if keys["offload_modules"] else []
    if keys.get("activation_offload_fraction", 1.0) != 1.0:
        words.append(f"activation_offload_fraction: {keys['activation_offload_fraction']}")
    if "activation_offload" in keys:
        words.append(f"gpu_memory_budget: {keys['activation_offload']['gpu_memory_budget']}")
    words += [f"{key}: {_yaml(value)}" for key, value in keys.items() if key in RECOMPUTE_KEYS and value is not None]
    fits = "the training step alone fits" if plan.lacking else "fits"
    said = [f"{fits} with {'; '.join(words)}" if words else f"{fits} without offloading"]
    if plan.choice.is_auto:
        whole = plan.written.step
        missing = "fit"
        if excess := excess_bytes(plan.job, whole):
            missing = f"need {gib(excess, _decimals(excess, 0))} more than there is"
        share = whole.step_ms / plan.chosen.step_ms - 1
        times = f"take {abs(share):.0%} {'longer' if share >= 0 else 'less time'}"
        said.append(f"whole modules ({_yaml(plan.written.offload_modules)}) would {missing} and {times}")
    if (least := plan.least_optimizer_share) is not None:
        said.append(f"{fits} with policy.megatron_cfg.optimizer.optimizer_offload_fraction={least:g} too")
    said += changes_lines(plan)
    if without := plan.without_recomputation:
        said.append(
            f"{fits} without recomputation too: nothing offloaded, peak {gib(without.peak_bytes)}, step "
            f"{shown_time(without.step_ms)}, with recompute_granularity and activation_checkpointing null"
        )
    return said


def changes_lines(plan: JobPlan) -> list[str]:
    """Changes of a key or two, and the best of the layouts where these were searched."""
    lines = [f"changes that would do: {'; or '.join(plan.suggestions)}"] if plan.suggestions else []
    if plan.advice is None:
        return lines
    if not plan.advice.found:
        return [*lines, nothing_found(plan.advice)]
    best = plan.advice.found[0]
    where = "instead, a layout with room" if plan.advice.fits else nothing_found(plan.advice)
    return [*lines, f"{where}: {found_words(best)}", f"{TO_PASTE}{to_paste(best.keys)}"]


def nothing_found(advice: LayoutAdvice) -> str:
    """That no layout does on the given devices."""
    on_more = ""
    if advice.found:
        on_more = f"; on {advice.found[0].job.layout.world}"
    elif advice.most_world > advice.world:
        on_more = f", nor on up to {advice.most_world}"
    has_room = f"has room for more than training ({' '.join(advice.blocked)})" if advice.blocked else "has room"
    return f"no layout that was tried {has_room} on {counted(advice.world, 'device', 's')}{on_more}"


def found_words(found: FoundLayout) -> str:
    """A layout, and what comes of it."""
    job = found.job
    size = f"{job.micro_batch} x {job.sequence}" if job.micro_batch_tokens is None else f"{job.micro_batch_tokens}"
    on_host = f"optimizer's copies {shown_time(found.optimizer_ms)}, " if found.optimizer_ms else ""
    return (
        f"{layout_words(job.layout)}, {counted(job.num_microbatches, 'microbatch', 'es')} of {size} tokens: peak "
        f"{gib(found.choice.peak_bytes)}, step {shown_time(found.choice.step_ms)}, messages "
        f"{shown_time(found.messages_ms)}, {on_host}host {gib(found.host_node_bytes)} per node"
    )


def layout_words(layout: ParallelLayout) -> str:
    """Sizes of the groups of ranks above 1, by their usual initials."""
    sizes = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual,
        "CP": layout.context,
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
        "DP": layout.data,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"


def _decimals(size: int, other: int) -> int:
    """So many that the two sizes do not look alike."""
    return next((number for number in range(1, 4) if gib(size, number) != gib(other, number)), 4)


def counted(number: int, what: str, plural: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else plural}"


def shown_time(ms: float) -> str:
    """Seconds, or milliseconds where these are few."""
    return f"{ms / 1e3:.2f} s" if ms >= 100 else f"{ms:.3g} ms"


def _parts(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {gib(size).removesuffix(' GiB')}" for name, size in sizes.items() if size)


def _yaml(value: object) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Prose:
    """A line that is wrapped between words, where lines are; keys stay whole, and so does what is to paste."""

    line: str
    wraps: bool = True

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [self.line]
        if self.wraps and not options.no_wrap:
            lines = wrap(self.line, options.max_width, break_long_words=False, break_on_hyphens=False)
        yield from (Text(each, no_wrap=True, overflow="ignore") for each in lines)


def plan_tables(plan: JobPlan, width: int = WIDTH) -> RenderableType:
    """What a terminal of so many columns shows."""
    said = (Prose(line, wraps=not line.startswith(TO_PASTE)) for line in summary_lines(plan))
    shown: list[RenderableType] = [*said, *_phase_table(plan, width), *_frontier_table(plan, width)]
    for stage in plan_data(plan)["stages"]:
        shown += [f"\n{line}" for line in stage_lines(stage)] + [_table(COLUMNS, stage_cells(stage), width)]
    return Group(*shown)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> Table:
    """Without the columns that say nothing."""
    rows = list(rows)
    filled = [place for place in range(len(columns)) if any(cells[place] not in ("", "-") for cells in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (columns[place] for place in filled):
        table.add_column(
            name,
            justify="right" if name in _RIGHT else "left",
            no_wrap=width >= WIDTH and name not in _WRAPPED,
            overflow="fold",
        )
    for cells in rows:
        table.add_row(*(cells[place] for place in filled))
    return table


def _phase_table(plan: JobPlan, width: int) -> Iterator[RenderableType]:
    """Each phase of a step on the stage where it takes most."""
    yield "\ndevice memory by phase, of the fullest stage"
    yield _table(PHASE_COLUMNS, phase_cells(plan_data(plan)["phases"]), width)


def phase_cells(phases: Sequence[PhaseData]) -> Iterator[tuple[str, ...]]:
    """The rows of the table of phases, in `PHASE_COLUMNS`."""
    for phase in phases:
        ms = sum(move["ms"] for move in phase["moves"])
        yield phase["phase"], gib(phase["peak_bytes"]), shown_time(ms) if ms else "", _parts(phase["parts"])


def _frontier_table(plan: JobPlan, width: int) -> Iterator[RenderableType]:
    """What was tried; the choice is marked."""
    rows = []
    chosen = (plan.choice.peak_bytes, plan.choice.step_ms)
    for point in plan.frontier:
        mark = "chosen" if (point.peak_bytes, point.step_ms) == chosen else ""
        ratio = point.step_ms / plan.baseline.step_ms
        rows.append((gib(point.peak_bytes), shown_time(point.step_ms), f"{ratio:.3f}", mark, choice_words(point)))
    yield "\nmemory against time, of what was tried; ratio to the step with nothing offloaded"
    yield _table(FRONTIER_COLUMNS, rows, width)


def choice_words(choice: ChoiceAsConfig) -> str:
    """What it offloads and recomputes."""
    share = "" if choice.fraction == 1 else f" (fraction {choice.fraction:g})"
    offloaded = "auto" if choice.is_auto else ", ".join(choice.offload_modules)
    return "; ".join(filter(None, (f"{offloaded or 'nothing offloaded'}{share}", _recomputed(choice.recompute))))


def stage_lines(stage: StageData) -> list[str]:
    """What stands above a stage's table."""
    layers = ", ".join(f"{start}-{stop - 1}" for start, stop in stage["layers"] if stop > start) or "none"
    return [
        f"stage {stage['stage']}: layers {layers}; peak {gib(stage['peak_bytes_before'])} -> "
        f"{gib(stage['peak_bytes'])}, host {gib(stage['host_bytes'])}, waits {100 * stage['exposed_share']:.1f} %\n"
        f"  not activations, GiB: {_parts(stage['static_bytes'])}"
    ]


def stage_cells(stage: StageData) -> Iterator[tuple[str, ...]]:
    """The rows of a stage's table, in `COLUMNS`."""
    for row in stage["modules"]:
        yield (
            row["module"],
            f"{row['bytes_per_microbatch'] / MIB:.0f} MiB",
            gib(row["bytes_at_peak"]),
            row["goes"],
            *(
                f"{ms:.1f} ms" if ms else ""
                for ms in (row["link_ms_per_microbatch"], row["recompute_ms_per_microbatch"])
            ),
            row["copies"],
        )
    yield "other", "", gib(stage["other_bytes_at_peak"]), "stays", "", "", "-"
