"""The bars that results are held against, and whether they are met: from the results alone. Pure Python."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from constants import NUM_AHEAD
from frontier import RIVALS
from predictions import BARS as PREDICTION_BARS
from predictions import predictions, whole_runs, worst

from nemo_rl_offload.units import gib

MET, MISSED, NOT_YET, NO_BAR = "met", "missed", "not yet measured", "no bar"
PUBLISHED_SAVED_SHARE = 17.8
PUBLISHED_LAYER_MB = 855.6
"""Inputs of two norms, 4096 x 7168, and of 32768 token copies 7168 and 4096 values, two bytes each."""

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A figure and its bar."""

    experiment: str
    figure: str
    bar: str
    measured: str
    state: str
    source: str
    """The result's name."""
    value: float | None = None
    """What was measured; None where it is no number, or was not reached."""
    beside: str = ""
    """Whom the figure is compared with, where rows of one figure differ in that."""


@dataclass(frozen=True)
class Bar:
    """`limit` is the most that is allowed, or with `at_least` the least."""

    experiment: str
    figure: str
    text: str
    limit: float
    unit: str = ""
    at_least: bool = False
    digits: int = 3

    def row(self, source: str, value: float | None, note: str = "", beside: str = "") -> Row:
        """Hold a value against the bar; None: it could not be reached, as the note says."""
        if value is None:
            return Row(self.experiment, self.figure, self.text, note, MISSED, source, None, beside)
        is_met = value >= self.limit if self.at_least else value <= self.limit
        shown = f"{value:.{self.digits}f}{self.unit}{f' ({note})' if note else ''}"
        return Row(self.experiment, self.figure, self.text, shown, MET if is_met else MISSED, source, value, beside)

    def without_result(self) -> Row:
        """No result has it."""
        return Row(self.experiment, self.figure, self.text, "-", NOT_YET, "-")


E1_TIME = Bar("E1", "throughput lost", "at most 0.5 % (published: 1.9 %)", 0.5, " %", digits=2)
E1_BESIDE = {
    "throughput_lost_to_copies_percent": ("throughput lost to the same copies without an engine", "{:.2f} %"),
    "megatrons_throughput_lost_percent": ("throughput lost with Megatron-Core's engine", "{:.2f} %"),
    "megatrons_saved_of_offloaded": ("saved of those bytes by Megatron-Core's engine", "{:.3f}"),
    "offloaded_share_of_activations": ("share of a microbatch's activations that is offloaded", "{:.3f}"),
}
"""Figures of E1 without a bar, where a result has them."""
E1_MEMORY = Bar("E1", "saved of the offloaded bytes alive at the peak", "at least 0.998", 0.998, at_least=True)
E2_TIME = {
    "recomputation and hooks": Bar(
        "E2", "step time at equal peak memory, beside recomputation, `save_on_cpu`, TRL", "at most 0.87", 0.87
    ),
    "engines": Bar(
        "E2",
        "step time at equal peak memory, beside Megatron-Core's and Transformer Engine's offloading",
        "at most 1.00",
        1.0,
    ),
}
E2_RIVALS = {
    "recompute: full": "full recomputation",
    "recompute: mlp": "recomputed MLPs",
    "recompute: core_attn": "recomputed attention",
    "save_on_cpu": "`save_on_cpu`",
    "TRL": "TRL's `OffloadActivations`",
    "megatron": "Megatron-Core's engine",
    "Transformer Engine": "Transformer Engine's offloading",
}
"""By what names of variants begin with."""
E2_PEAK = Bar("E2", "peak beside Megatron-Core's engine, same modules", "at most 1.00", 1.0)
E3_PEAK = Bar("E3", "highest device peak over the largest step's own", "at most 1.02", 1.02)
E3_HOST = Bar("E3", "host memory less one slab over the largest step's own", "at most 1.10", 1.1)
E4_LENGTH = Bar(
    "E4", "longest sequence with recomputation, over recomputation alone", "at least 1.5", 1.5, at_least=True
)
E4_TIME = Bar("E4", "time per token at recomputation's longest, over its own", "at most 1.00", 1.0)
E5_COPIES = Bar("E5", "slowest of stash and restore, over a device copy", "at least 0.85", 0.85, at_least=True)
E5_MEMORY = Bar("E5", "pages taken over live bytes", "at most 1.15", 1.15)
STASH_ROW_BYTES, STASH_PAGE_SIZE = 14336, 64
"""Of the copies that the bar is for: 7168 values of two bytes, pages of 64 rows."""
E6 = {
    kind: Bar("E6", f"worst error of predicted {kind}", f"at most {100 * limit:.0f} %", 100 * limit, " %", digits=1)
    for kind, limit in PREDICTION_BARS.items()
}
BITS = "losses and gradients bit for bit as without"


def load(folder: Path) -> dict[str, Result]:
    """Results of a device by name. Those that a CPU made are no results."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in found.items() if result.get("device") != "cpu"}


def of(results: Mapping[str, Result], experiment: str) -> dict[str, Result]:
    """The results of one experiment."""
    return {name: result for name, result in results.items() if result.get("experiment") == experiment}


def rows(results: Mapping[str, Result], folder: Path) -> list[Row]:
    """Every bar with every result that has its figure; a bar without any stays as not yet measured."""
    found = [*_e1(results), *_e2(results), *_e3(results), *_e4(results), *_e5(results), *_e6(folder), *_bits(results)]
    order = ["E1", "E2", "E3", "E4", "E5", "E6", "all"]
    return sorted(found, key=lambda row: order.index(row.experiment))


def _each(bar: Bar, found: Sequence[Row]) -> list[Row]:
    return list(found) or [bar.without_result()]


def _e1(results: Mapping[str, Result]) -> Iterator[Row]:
    found = of(results, "E1")
    own = {name: result["figures"] for name, result in found.items()}
    yield from _each(E1_TIME, [E1_TIME.row(name, each["throughput_lost_percent"]) for name, each in own.items()])
    yield from _each(E1_MEMORY, [E1_MEMORY.row(name, each["saved_of_offloaded"]) for name, each in own.items()])
    for name, each in own.items():
        yield Row("E1", "saved share of the peak", "-", f"{each['saved_of_peak_percent']:.1f} %", NO_BAR, name)
        yield from _e1_reserved(name, each)
        layer_bytes = each["offloaded_bytes_alive_at_the_peak"] / NUM_AHEAD / found[name]["layers"]
        shown = f"{layer_bytes / 1e6:.1f} MB (published run, by its shapes: {PUBLISHED_LAYER_MB} MB)"
        yield Row("E1", "offloaded of a layer, a microbatch", "-", shown, NO_BAR, name)
        for key, (figure, form) in E1_BESIDE.items():
            if key in each:
                yield Row("E1", figure, "-", form.format(each[key]), NO_BAR, name)


def _e1_reserved(name: str, figures: Mapping[str, float]) -> Iterator[Row]:
    """The published run's memory is the most that the allocator had reserved."""
    off, live = figures["peak_reserved_bytes_off"], figures["offloaded_bytes_alive_at_the_peak"]
    for whose, key, note in (
        ("", "peak_reserved_bytes_on", f" (published: {PUBLISHED_SAVED_SHARE} %)"),
        (" by Megatron-Core's engine", "megatrons_peak_reserved_bytes", ""),
    ):
        if key in figures:
            saved = off - figures[key]
            share = f"{100 * saved / off:.1f} %{note}"
            yield Row("E1", f"saved share of the reserved peak{whose}", "-", share, NO_BAR, name)
            yield Row("E1", f"the same over the offloaded bytes{whose}", "-", f"{saved / live:.3f}", NO_BAR, name)


def _e2(results: Mapping[str, Result]) -> Iterator[Row]:
    for kind in RIVALS:
        found = []
        for name, result in of(results, "E2").items():
            for level in result["figures"][f"against {kind}"]["levels"]:
                where = f"{gib(level['peak_bytes'])}, {level['rival']}"
                note = where if level["ours"] else f"not reached ({where})"
                found.append(E2_TIME[kind].row(name, level["ratio"], note, _whose(level["rival"])))
        yield from _each(E2_TIME[kind], found)
    peaks = [
        E2_PEAK.row(name, ratio, modules)
        for name, result in of(results, "E2").items()
        for modules, ratio in result["figures"]["peak_over_megatrons"].items()
    ]
    yield from _each(E2_PEAK, peaks)


def _whose(variant: str) -> str:
    """A rival without its settings; recomputation is named by what is recomputed."""
    return next(name for beginning, name in E2_RIVALS.items() if variant.startswith(beginning))


def _e3(results: Mapping[str, Result]) -> Iterator[Row]:
    keys = {E3_PEAK: "peak_over_largest_steps_own", E3_HOST: "host_less_a_slab_over_largest_steps_own"}
    for bar, key in keys.items():
        found = []
        for name, result in of(results, "E3").items():
            values = {each["kind"]: each["figures"][key] for each in whole_runs(result)}
            failed = [each["error"] for each in result["variants"] if each["kind"] == "ours" and each["error"]]
            if "ours" in values or failed:
                theirs = f"Megatron-Core's: {values['megatron']:.3f}" if "megatron" in values else ""
                found.append(bar.row(name, values.get("ours"), *failed or [theirs]))
        yield from _each(bar, found)


def _e4(results: Mapping[str, Result]) -> Iterator[Row]:
    for bar, key in ((E4_LENGTH, "longer"), (E4_TIME, "time_per_token")):
        values = {name: result["figures"][key] for name, result in of(results, "E4").items()}
        yield from _each(bar, [bar.row(name, value) for name, value in values.items() if value is not None])


def _e5(results: Mapping[str, Result]) -> Iterator[Row]:
    if "stash" not in results:
        yield from (bar.without_result() for bar in (E5_COPIES, E5_MEMORY))
        return
    copies = [
        min(each["stash_ratio"], each["restore_ratio"])
        for each in results["stash"]["copies"]
        if (each["row_bytes"], each["page_size"]) == (STASH_ROW_BYTES, STASH_PAGE_SIZE)
    ]
    yield E5_COPIES.row("stash", min(copies), "7168 bfloat16 values a row, pages of 64 rows")
    shares = [each["stash_bytes"] / each["live_bytes"] for each in results["stash"]["layers"] if each["live_bytes"]]
    yield E5_MEMORY.row("stash", max(shares))


def _e6(folder: Path) -> Iterator[Row]:
    for kind, error in worst(predictions(folder)).items():
        bar = E6[kind]
        yield bar.without_result() if error is None else bar.row("results of E1 to E4", 100 * error)


def _bits(results: Mapping[str, Result]) -> Iterator[Row]:
    """Of ours that were checked; others' may fail and change bits as they like."""
    for name, result in results.items():
        if "bit_identical" in result:
            claims = [result["bit_identical"]]
        else:
            entries = [each for each in result.get("variants", ()) if each["name"].startswith("ours")]
            checked = [each for each in entries if each["error"] is None and each["bit_identical"] is not None]
            claims = [each["bit_identical"] for each in checked]
        if claims:
            shown = f"{sum(claims)} of {len(claims)}"
            yield Row("all", BITS, "all", shown, MET if all(claims) else MISSED, name)
