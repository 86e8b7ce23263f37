"""The table at the end of a run."""

from collections.abc import Callable, Mapping

from rich.table import Table

from nemo_rl_offload.paged_stash.stats import StashStats
from nemo_rl_offload.runs.run_files import MemoryTotals, ModuleTotals, OffloadTotals, Summary
from nemo_rl_offload.units import human_bytes, human_duration

WIDTH = 80
"""Of tables, at most."""


def table_of_figures(title: str, width: int) -> Table:
    """A table for names and values, of at most 80 columns; names are broken only where there are fewer."""
    table = Table(title=title, show_header=False, width=min(width, WIDTH))
    if width >= WIDTH:
        table.add_column("what", no_wrap=True)
        table.add_column("value", overflow="fold", ratio=1)
    else:
        table.add_column("what", overflow="fold", ratio=1)
        table.add_column("value", overflow="fold", ratio=1)
    return table


def summary_table(summary: Summary, width: int = WIDTH) -> Table:
    """Return a table of at most 80 columns, or the terminal's ``width``, for a run's ``summary.json``.

    What is None, as what only a GPU has, has no row.
    """
    table = table_of_figures(f"{summary['algorithm']}: {_number(summary['steps'])} steps", width)
    _add_group(table, _run_rows(summary))
    _add_group(table, _offload_rows(summary["offload"]))
    if summary["paged_stash"] is not None:
        _add_group(table, _stash_rows(summary["paged_stash"]))
    memory = summary["memory"]
    kept = human_bytes(memory.get("peak_reserved_bytes"))
    peaks = {"peak device memory": human_bytes(memory["peak_device_bytes"]), "  kept for it by torch": kept}
    _add_group(table, {**peaks, **phase_rows(summary)})
    _add_group(table, host_rows(summary["memory"]))
    table.add_section()
    table.add_row("run directory", str(summary["run_dir"]))
    return table


def _run_rows(summary: Summary) -> dict[str, str]:
    return {
        f"validation {summary['validation_metric']}": validation_figures(summary, _number, " -> "),
        "training loss": _number(summary["train"]["loss"]),
        "wall time": human_duration(summary["wall_seconds"]),
        "workers": _number(summary["world_size"]),
        "seed": _number(summary["seed"]),
    }


def validation_figures(summary: Summary, shown: Callable[[float | None], str], arrow: str) -> str:
    """The first and the last, the only one, or that there was none."""
    if summary["validation"]["last"] is None:
        return "none"
    first, last = shown(summary["validation"]["first"]), shown(summary["validation"]["last"])
    return f"{last}, measured once" if summary.get("num_validations") == 1 else f"{first}{arrow}{last}"


def _offload_rows(offload: OffloadTotals) -> dict[str, str]:
    modules = offload["modules"]
    rows = {
        "offload engine": offload["engine"] or "-",
        "offloaded modules": ", ".join(modules) if modules else "-",
        "offloaded": _moved(offload) if offload["engine"] != "megatron" else "not counted by Megatron-Core's engine",
    }
    rows |= {f"  {name}": _moved(module) for name, module in offload["per_module"].items()}
    return rows | offload_figures(offload)


def offload_figures(offload: OffloadTotals) -> dict[str, str]:
    """What a run's table and page say of its copies, beside the modules."""
    out, back, overlap = offload.get("stall_out_ms"), offload.get("stall_in_ms"), offload.get("overlap")
    return {
        "peak host memory": human_bytes(offload["peak_host_bytes"]),
        "denied (host budget)": human_bytes(offload["denied_bytes"]),
        "ineffective": human_bytes(offload["ineffective_bytes"]),
        "reloads on demand": _number(offload["demand_reloads"]),
        "waits for copies": "-" if out is None or back is None else f"{out / 1000:.3g} s out, {back / 1000:.3g} s in",
        "copies behind compute": "-" if overlap is None else f"{overlap:.1%}",
    }


def phase_rows(summary: Summary) -> dict[str, str]:
    """Seconds of each phase of all steps, and its highest device memory where there is a device."""
    seconds, peaks = summary.get("phase_seconds", {}), summary["memory"].get("peak_device_bytes_by_phase", {})
    return {
        f"phase {phase}": ", ".join(
            [
                *([f"{seconds[phase]:,.1f} s"] if phase in seconds else []),
                *([f"peak {human_bytes(peaks[phase])}"] if phase in peaks else []),
            ]
        )
        for phase in [*seconds, *(peaks.keys() - seconds.keys() - {"between phases"})]
    }


def host_rows(memory: MemoryTotals) -> dict[str, str]:
    """Host memory of all workers by what waits there."""
    sizes = memory.get("host_bytes", {})
    return {f"host memory of {name.replace('_', ' ')}": human_bytes(size) for name, size in sizes.items()}


def _stash_rows(stash: StashStats) -> dict[str, str]:
    rows = {
        "steps run again": f"{stash['reruns']} ({stash['over_budget']} buffers, {stash['overflows']} pages too few)",
        "needed capacity factor": _number(stash["needed_capacity_factor"]),
    }
    if "peak_bytes" in stash:
        rows["paged stash"] = f"{human_bytes(stash['peak_bytes'])} of {human_bytes(stash['device_bytes'])}"
        rows["  and on the host"] = human_bytes(stash["host_bytes"])
    return rows


def _moved(stats: OffloadTotals | ModuleTotals) -> str:
    out, back = human_bytes(stats["bytes_out"]), human_bytes(stats["bytes_in"])
    return "-" if out == back == "-" else f"{out} out, {back} in"


def _add_group(table: Table, rows: Mapping[str, str]) -> None:
    table.add_section()
    for name, value in rows.items():
        if value != "-":
            table.add_row(name, value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
