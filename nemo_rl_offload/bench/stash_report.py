"""The stash bench's figures as tables, and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from nemo_rl_offload.bench.stash import CopyFigures, LayerFigures
from nemo_rl_offload.runs.output import written_aside
from nemo_rl_offload.units import GIB, human_bytes


def copies_table(figures: Sequence[CopyFigures]) -> Table:
    """One row a combination."""
    table = Table(title="Copies into pages and back, against a device copy")
    for name in ("row", "page", "live", "device copy", "stash", "restore", "stash / copy", "restore / copy"):
        table.add_column(name, justify="right")
    for each in figures:
        rates = (each.copy_gb_per_s, each.stash_gb_per_s, each.restore_gb_per_s)
        table.add_row(
            f"{each.row_bytes} B",
            f"{each.page_size} rows",
            f"{each.live_fraction:.0%}",
            *(f"{rate:.3g} GB/s" for rate in rates),
            f"{each.stash_ratio:.2f}",
            f"{each.restore_ratio:.2f}",
        )
    return table


def layers_table(figures: Sequence[LayerFigures]) -> Table:
    """One row a variant; times relative to the first."""
    table = Table(title="A stack of MoE layers")
    for name in ("variant", "step", "time", "peak", "stash", "stash / live", "same bits"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for each in figures:
        if each.error is not None:
            table.add_row(each.name, each.error)
            continue
        share = "-" if not each.live_bytes else f"{(each.stash_bytes or 0) / each.live_bytes:.3f}"
        table.add_row(
            each.name,
            f"{each.step_ms:.2f} ms",
            f"{each.step_ms / figures[0].step_ms:.3f}",
            human_bytes(each.peak_bytes),
            human_bytes(each.stash_bytes),
            share,
            "yes" if each.bit_identical else "NO",
        )
    return table


def plot(path: Path, data: Mapping[str, object], copies: Sequence[CopyFigures], layers: Sequence[LayerFigures]) -> None:
    """Ratios of the copies on the left, memory against time of the layers on the right.

    Raises:
        ResourceError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for page_size in sorted({each.page_size for each in copies}):
        of_page = [each for each in copies if each.page_size == page_size]
        labels = [f"{each.row_bytes} B\n{each.live_fraction:.0%}" for each in of_page]
        left.plot(labels, [each.stash_ratio for each in of_page], "o-", label=f"stash, {page_size} rows a page")
        left.plot(labels, [each.restore_ratio for each in of_page], "x--", label=f"restore, {page_size} rows a page")
    left.axhline(0.85, color="grey", linewidth=0.8)
    left.set_ylabel("rate over a device copy's")
    left.legend(fontsize=7)
    for each in (figures for figures in layers if figures.error is None):
        x_gib = (each.peak_bytes or each.stash_bytes or 0) / GIB
        right.plot(x_gib, each.step_ms, "o")
        right.annotate(each.name, (x_gib, each.step_ms), xytext=(4, 3), textcoords="offset points", fontsize=8)
    right.set_xlabel("peak device memory, GiB")
    right.set_ylabel("step, ms")
    figure.suptitle(data["device"])
    with written_aside(path) as file:
        figure.savefig(file, dpi=120, format="png")
    pyplot.close(figure)
