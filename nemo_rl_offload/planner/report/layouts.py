"""Layouts that were found, as data, on a terminal, and as a configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from rich.console import Group, RenderableType

from nemo_rl_offload.planner.report.overlay import overlay_text
from nemo_rl_offload.planner.report.tables import (
    Prose,
    choice_words,
    counted,
    found_words,
    nothing_found,
)
from nemo_rl_offload.planner.search.layout_keys import to_paste
from nemo_rl_offload.planner.search.layout_search import FoundLayout, LayoutAdvice
from nemo_rl_offload.specs.parallel_layout import KEYS
from nemo_rl_offload.units import gib


class LayoutData(TypedDict):
    """A layout; bytes of the fullest rank."""

    fits: bool
    layout: dict[str, int]
    """Numbers of ranks, and virtual stages of each, by the configuration's names; data-parallel ranks too."""
    micro_batch_rows: int
    num_microbatches: int
    peak_bytes: int
    step_ms: float
    messages_ms: float
    """Between ranks. Layouts are in the order of this, `step_ms` and `optimizer_ms` together."""
    optimizer_ms: float
    """That the optimizer's part on the host takes through the device."""
    host_per_node_bytes: int
    keys: dict[str, object]
    """All that differs from the configuration, by paths."""
    overrides: str
    """The same, for a shell."""


class LayoutsData(TypedDict):
    """What a search found."""

    device: str
    budget_bytes: int
    world: int
    """Devices that are configured."""
    fits: bool
    """Whether these layouts are for so many."""
    most_world: int
    """Devices for which layouts were searched last."""
    configured: LayoutData | None
    """As it is; null where that cannot be planned."""
    layouts: list[LayoutData]
    """Those that have room, the fastest first."""


def layouts_data(advice: LayoutAdvice) -> LayoutsData:
    """Everything that was found; bytes and milliseconds, by names that say so."""
    return {
        "device": advice.device.name,
        "budget_bytes": advice.budget_bytes,
        "world": advice.world,
        "fits": advice.fits,
        "most_world": advice.most_world,
        "configured": None if advice.configured is None else _layout_data(advice.configured),
        "layouts": [_layout_data(each) for each in advice.found],
    }


def _layout_data(found: FoundLayout) -> LayoutData:
    job = found.job
    sizes = {key: getattr(job.layout, name) for name, key in KEYS.items()}
    return {
        "fits": found.fits,
        "layout": {**sizes, "data_parallel_size": job.layout.data},
        "micro_batch_rows": job.micro_batch,
        "num_microbatches": job.num_microbatches,
        "peak_bytes": found.choice.peak_bytes,
        "step_ms": found.choice.step_ms,
        "messages_ms": round(found.messages_ms, 3),
        "optimizer_ms": round(found.optimizer_ms, 3),
        "host_per_node_bytes": found.host_node_bytes,
        "keys": dict(found.keys),
        "overrides": to_paste(found.keys),
    }


def layouts_text(advice: LayoutAdvice) -> RenderableType:
    """What a terminal shows; the configured layout stands where it belongs among those found, or behind them."""
    lines = [f"{advice.device.name}, {counted(advice.world, 'device', 's')}; {gib(advice.budget_bytes)} each"]
    if not advice.fits:
        lines.append(nothing_found(advice))
    named = [(f"{number}.", each) for number, each in enumerate(advice.found, 1)]
    if (configured := advice.configured) is not None:
        faster = [each for each in advice.found if not configured.fits or each.total_ms <= configured.total_ms]
        named.insert(len(faster), ("as configured:" if configured.fits else "as configured, does not fit:", configured))
    for name, each in named:
        lines += [f"{name} {found_words(each)}", f"   {_with(each)}"]
    said = [Prose(line) for line in lines]
    if advice.found:
        said += [Prose("the first, to paste:"), Prose(to_paste(advice.found[0].keys), wraps=False)]
    return Group(*said)


def _with(found: FoundLayout) -> str:
    share = found.job.optimizer.share_on_host
    verb = "offloads " if found.choice.offload_modules else ""
    return f"{verb}{choice_words(found.choice)}" + (f"; {share:.0%} of the optimizer on the host" if share else "")


def layouts_overlay(
    advice: LayoutAdvice,
    config: Path,
    overlay: Path,
    overrides: Sequence[str],
    changed: Mapping[str, object],
) -> str:
    """A configuration that inherits `config` and has what the first layout and the `overrides` changed."""
    return overlay_text([found_words(advice.found[0])], changed, config, overlay, overrides)
