import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from jobs import make_job
from rich.console import Console

from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.plan import JobPlan, make_plan
from nemo_rl_offload.planner.report import tables
from nemo_rl_offload.planner.report.data import plan_data
from nemo_rl_offload.planner.report.html import plan_html
from nemo_rl_offload.planner.report.overlay import plan_overlay
from nemo_rl_offload.planner.report.tables import plan_tables, summary_lines
from nemo_rl_offload.planner.search.to_config import ChoiceAsConfig
from nemo_rl_offload.planner.simulate.simulated_step import highest_peak, module_rows, run_whole_modules
from nemo_rl_offload.specs.parallel_layout import ParallelLayout
from nemo_rl_offload.units import GIB


@pytest.fixture(scope="module")
def plan() -> JobPlan:
    """A plan that has to offload, on two stages."""
    layout = ParallelLayout(8, pipeline=2)
    job = make_job("Qwen/Qwen3-8B", num_layers=8, layout=layout, micro_batch=2, reference_on_host=True)
    job = replace(job, num_microbatches=8)
    return make_plan(replace(job, memory_bytes=highest_peak(make_plan(job).baseline) - 2 * GIB))


@pytest.fixture(scope="module")
def short() -> JobPlan:
    """A plan that does not fit."""
    return make_plan(make_job("Qwen/Qwen3-8B", num_layers=20, memory_bytes=20 * GIB))


def shown(plan: JobPlan, width: int = 200) -> str:
    console = Console(width=width, record=True, markup=False, file=io.StringIO())
    console.print(plan_tables(plan))
    return console.export_text()


def test_data_is_json_and_adds_up(plan: JobPlan) -> None:
    data = json.loads(json.dumps(plan_data(plan)))
    assert data["fits"]
    assert set(data["outcomes"]) == {"nothing_offloaded", "chosen", "written"}
    assert data["outcomes"]["chosen"]["peak_bytes"] == max(stage["peak_bytes"] for stage in data["stages"])
    assert data["outcomes"]["chosen"]["peak_bytes"] <= data["budget_bytes"]
    host = data["host"]
    weights = max(stage["static_bytes"]["weights"] for stage in data["stages"])
    assert host["of_it_start_model_bytes"] == 8 * weights
    assert host["per_node_bytes"] == 8 * (host["per_rank_bytes"] + weights)
    for stage in data["stages"]:
        for row in stage["modules"]:
            assert (row["copies"] == "-") == ("host" not in row["goes"])
            assert (row["link_ms_per_microbatch"] > 0) == ("host" in row["goes"])
            is_recomputed = "recomputed" in row["goes"] or row["module"] in plan.written.recompute.modules
            assert (row["recompute_ms_per_microbatch"] > 0) == is_recomputed


def test_a_phase_that_takes_more_than_training_is_said_beside_its_peaks(
    plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = plan_data(plan)
    most = data["outcomes"]["chosen"]["peak_bytes"]
    for size, count in ((most, 0), (most + GIB, 1)):
        phases = [{**data["phases"][0], "phase": "optimizer step", "peak_bytes": size}]
        monkeypatch.setattr(tables, "plan_data", lambda _, phases=phases: {**data, "phases": phases})
        said = [line for line in summary_lines(plan) if "takes most in optimizer step" in line]
        assert len(said) == count, said


def test_the_terminal_shows_every_module_of_every_stage(plan: JobPlan) -> None:
    text = shown(plan)
    for stage in plan_data(plan)["stages"]:
        assert f"stage {stage['stage']}: layers" in text
        assert all(row["module"] in text for row in stage["modules"])
    assert f"fits with offload_modules: [{', '.join(plan.written.offload_modules)}]" in text


def test_the_terminal_shows_time_at_other_budgets(plan: JobPlan, short: JobPlan) -> None:
    for each in (plan, short):
        text = shown(each)
        for point in each.frontier:
            ratio = point.step_ms / each.baseline.step_ms
            assert re.search(rf"{point.peak_bytes / GIB:.1f} GiB +{point.step_ms / 1e3:.2f} s +{ratio:.3f}", text)
        (marked,) = [line for line in text.splitlines() if " chosen " in line]
        assert f"{highest_peak(each.chosen) / GIB:.1f} GiB" in marked


@pytest.fixture(scope="module")
def tight() -> list[JobPlan]:
    """Plans of layers by tens: one module of the first goes three ways, and whole modules do not say the second."""
    dense = make_job("Qwen/Qwen2.5-7B", layout=ParallelLayout(8), sequence=8192)
    experts = make_job("deepseek-ai/DeepSeek-V3", num_layers=30, layout=ParallelLayout(64, expert=32), sequence=8192)
    plans = []
    for job, less, rate in ((dense, 15, 5.0), (experts, 80, 55.0)):
        device = replace(job.device, memory_gib=1000.0, link_out_gb_per_s=rate, link_in_gb_per_s=rate)
        most = highest_peak(run_whole_modules(replace(job, device=device), ()))
        plans.append(make_plan(replace(job, device=device, memory_bytes=most - less * GIB)))
    return plans


@pytest.mark.slow
def test_tables_are_not_cut_where_modules_go_three_ways(tight: list[JobPlan]) -> None:
    assert max(len(row.places) for row in module_rows(tight[0].chosen, 0)) == 3
    for each in tight:
        text = shown(each, 110)
        assert "…" not in text
        rows = [row for row in plan_data(each)["stages"][0]["modules"] if row["recompute_ms_per_microbatch"]]
        assert all(f"{row['recompute_ms_per_microbatch']:.1f} ms" in text for row in rows)


@pytest.mark.slow
def test_whole_modules_are_said_to_take_longer_or_less_time(tight: list[JobPlan]) -> None:
    nothing = ChoiceAsConfig(tight[1].baseline, (), tight[1].job.recompute)
    for each, words in ((tight[1], "longer"), (replace(tight[1], written=nothing), "less time")):
        (said,) = re.findall(r"take (-?\d+)% (longer|less time)", " ".join(summary_lines(each)))
        share = each.written.step.step_ms / each.chosen.step_ms - 1
        assert said == (f"{100 * abs(share):.0f}", words)


def test_what_does_not_fit_is_told_with_a_change(short: JobPlan) -> None:
    text = shown(short)
    gib = short.shortfall_bytes / GIB
    assert f"does not fit: stage 0 needs {20 + gib:.1f} GiB, {gib:.1f} GiB more than there is." in text
    assert f"changes that would do: {'; or '.join(short.suggestions)}" in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else(plan: JobPlan) -> None:
    text = plan_html(plan)
    tags = Tags()
    tags.feed(text)
    assert tags.links == []
    assert not re.search(r"https?://|@import|url\(|<script", text)
    assert tags.seen.count("circle") == len(plan.frontier)
    assert tags.seen.count("table") == 1 + len(plan.chosen.stages)


def test_the_picture_stays_in_its_frame(plan: JobPlan, short: JobPlan) -> None:
    for each in (plan, short):
        points = re.findall(r"cx='([\d.-]+)' cy='([\d.-]+)'", plan_html(each))
        assert all(0 <= float(x) <= 640 and 0 <= float(y) <= 320 for x, y in points)


def test_the_overlay_adds_the_chosen_keys(plan: JobPlan, tmp_path: Path) -> None:
    base = tmp_path / "mine" / "base.yaml"
    base.parent.mkdir()
    base.touch()
    text = plan_overlay(plan, base, tmp_path / "planned.yaml", ["a.b=1"])
    assert "# planned with: a.b=1" in text
    content = yaml.safe_load(text)
    assert content["defaults"] == "mine/base.yaml"
    section = content["policy"]["megatron_cfg"]
    assert section == plan.keys
    assert section["fine_grained_activation_offloading"] is True


def test_full_recomputation_is_left_as_configured() -> None:
    job = make_job("Qwen/Qwen2.5-1.5B", recompute=Recompute(method="uniform"))
    text = plan_overlay(make_plan(job), Path("a.yaml"), Path("b.yaml"), [])
    assert "recompute" not in yaml.safe_load(text)["policy"]["megatron_cfg"]
