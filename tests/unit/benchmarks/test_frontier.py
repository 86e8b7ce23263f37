"""E2: step times at equal peaks."""

import pytest
from frontier import Point, figures, levels, peaks_of_same_modules

FOUND = [
    Point("nothing", "nothing", 100, 50.0),
    Point("ours: norms", "ours", 90, 51.0),
    Point("ours: all", "ours", 60, 58.0),
    Point("recompute: full", "recompute", 60, 65.0),
    Point("recompute: mlp", "recompute", 80, 60.0),
    Point("save_on_cpu", "hooks", 55, 200.0),
    Point("megatron: all", "megatron", 65, 58.0),
]


def test_each_level_takes_the_best_of_both_sides_with_no_higher_peak() -> None:
    first, second, third = levels(FOUND, ("recompute", "hooks"))
    assert (first.peak_bytes, first.rival, first.ours) == (80, "recompute: mlp", "ours: all")
    assert first.ratio == pytest.approx(58 / 60)
    assert (second.peak_bytes, second.rival, second.ratio) == (60, "recompute: full", pytest.approx(58 / 65))
    assert (third.peak_bytes, third.ours, third.ratio) == (55, None, None)


def test_a_rival_that_another_beats_with_less_memory_stands_for_that_one() -> None:
    slow = Point("recompute: slow", "recompute", 70, 90.0)
    level = levels([*FOUND, slow], ("recompute", "hooks"))[1]
    assert (level.peak_bytes, level.rival, level.rival_ms) == (70, "recompute: full", 65.0)


def test_a_rival_that_saves_nothing_is_no_level() -> None:
    worse = Point("recompute: core_attn", "recompute", 101, 70.0)
    assert levels([*FOUND, worse], ("recompute",))[0].peak_bytes == 80


def test_peaks_are_compared_for_the_same_modules_alone() -> None:
    assert peaks_of_same_modules(FOUND) == {"all": pytest.approx(60 / 65)}


def test_figures_have_no_worst_ratio_where_a_level_is_not_reached() -> None:
    def entry(point: Point) -> dict[str, object]:
        medians = {"ms": point.step_ms, "peak_allocated_bytes": point.peak_bytes}
        return {"name": point.name, "kind": point.kind, "error": None, "medians": medians}

    failed = {"name": "TRL", "kind": "hooks", "error": "ImportError: no module", "samples": []}
    failed_later = entry(Point("recompute: core_attn", "recompute", 70, 1.0)) | {"error": "OutOfMemoryError"}
    found = figures([*map(entry, FOUND), failed, failed_later])
    against = found["against recomputation and hooks"]
    assert (len(against["levels"]), against["num_levels_not_reached"], against["worst_ratio"]) == (3, 1, None)
    assert found["against engines"]["worst_ratio"] == pytest.approx(1.0)
    without = figures([entry(point) for point in FOUND if point.kind != "hooks"])["against recomputation and hooks"]
    assert without["worst_ratio"] == pytest.approx(58 / 60)
