"""E6: the planner's predictions beside results. Measurements made of predictions have no error."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from predictions import ALLOWANCES, Figures, Run, compare, predict, predictions, table, worst

from nemo_rl_offload.planner.simulate.simulated_step import run_whole_modules
from nemo_rl_offload.specs.catalogue import CATALOGUE
from nemo_rl_offload.specs.devices import Device, find_device

ALL = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act"]
MODEL = {**CATALOGUE["Qwen/Qwen2.5-7B"], "num_hidden_layers": 4, "vocab_size": 8192}
OPTIMIZER_MS = 25.0
ABOUT = {"device": "NVIDIA H200", "device_memory_bytes": int(139.8 * 2**30)}


def entry(name: str, kind: str, modules: list[str] | str = (), recompute: str | None = None) -> dict[str, Any]:  # type: ignore[assignment]
    figures = {"peak_allocated_bytes": 40e9, "ms": 500.0}
    about = {"kind": kind, "offload_modules": modules, "recompute": recompute, "error": None}
    return {"name": name, **about, "medians": figures}


def e2() -> dict[str, Any]:
    shape = {"sequence": 8192, "num_microbatches": 2, "transformer_impl": "torch"}
    variants = [
        entry("ours: all", "ours", ALL),
        entry("nothing", "nothing"),
        entry("ours: auto 60%", "ours", "auto"),
        entry("recompute: full", "recompute", recompute="full"),
        entry("save_on_cpu", "hooks"),
        {"name": "TRL", "kind": "hooks", "error": "ImportError", "offload_modules": [], "recompute": None},
    ]
    return {
        "experiment": "E2",
        **ABOUT,
        "model": MODEL,
        "shape": shape,
        "optimizer_ms": OPTIMIZER_MS,
        "variants": variants,
    }


def e1() -> dict[str, Any]:
    model = {
        **CATALOGUE["deepseek-ai/DeepSeek-V3"],
        "num_hidden_layers": 4,
        "first_k_dense_replace": 0,
        "n_routed_experts": 16,
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
    }
    names = ["peak_allocated_bytes_off", "peak_allocated_bytes_on", "step_ms_off", "step_ms_on"]
    return {
        "experiment": "E1",
        **ABOUT,
        "model": model,
        "sequence": 4096,
        "microbatches": 8,
        "transformer_impl": "torch",
        "max_inflight_bytes": 1 << 30,
        "modules": ["attn_norm", "mlp_norm", "expert_fc1", "moe_act"],
        "figures": dict(zip(names, [80e9, 70e9, 2100.0, 2200.0], strict=True)),
    }


def e3() -> dict[str, Any]:
    """One variant stopped in the last step, and one is in it."""

    def variant(name: str, num_steps: int, total_ms: float, error: str | None = None) -> dict[str, Any]:
        figures = {"highest_peak_bytes": 30e9, "num_steps": num_steps, "total_ms": total_ms}
        modules = [] if name == "nothing" else ["core_attn"]
        about = {"kind": name.partition(":")[0], "offload_modules": modules, "error": error}
        return {"name": name, **about, "figures": figures}

    variants = [variant("nothing", 3, 600.0), variant("ours: core_attn", 3, 700.0)]
    unfinished = [variant("ours: all", 2, 500.0, "OutOfMemoryError"), variant("ours: norms", 2, 500.0)]
    return {
        "experiment": "E3",
        **ABOUT,
        "model": MODEL,
        "shape": {"transformer_impl": "transformer_engine"},
        "swiglu_is_fused": True,
        "optimizer_ms": OPTIMIZER_MS,
        "rollouts": [{"widths": [512, 512, 512]}, {"widths": [256, 4096]}, {"widths": [1024]}],
        "variants": [*variants, *unfinished, variant("megatron: core_attn", 3, 800.0)],
    }


def e4() -> dict[str, Any]:
    def sample(ms: float) -> dict[str, float]:
        return {"peak_allocated_bytes": 60e9, "ms": ms, "optimizer_ms": OPTIMIZER_MS}

    return {
        "experiment": "E4",
        **ABOUT,
        "model": MODEL,
        "num_layers": 4,
        "transformer_impl": "transformer_engine",
        "sequence": {
            "recompute: full": {"tried": {"8192": sample(9e9), "65536": {"out_of_memory": True}}},
            "ours: full recompute": {"tried": {"16384": sample(1.0), "8192": sample(8e9)}},
        },
        "compared": {
            "sequence": 8192,
            "samples": {"ours: full recompute": [sample(575.0)], "recompute: full": [sample(500.0), sample(550.0)]},
        },
    }


def write(folder: Path, result: dict[str, Any]) -> Path:
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_rates_are_fitted_to_the_run_without_anything_and_the_rest_is_predicted(tmp_path: Path) -> None:
    found = {each.variant: each for each in predictions(write(tmp_path, e2()))}
    assert found.keys() == {"nothing", "ours: all", "recompute: full"}
    assert found["nothing"].time_error is None
    assert found["nothing"].measured.ms == 500.0 - OPTIMIZER_MS
    assert found["recompute: full"].predicted_ms == pytest.approx(1.33 * 475, rel=0.02)
    assert found["nothing"].predicted_peak_bytes > found["ours: all"].predicted_peak_bytes
    assert found["ours: all"].predicted_peak_bytes > found["recompute: full"].predicted_peak_bytes - 2**30


def test_where_nothing_did_not_fit_rates_are_fitted_to_recomputation(tmp_path: Path) -> None:
    result = e2()
    result["variants"] = [each for each in result["variants"] if each["name"] != "nothing"]
    first, ours = predictions(write(tmp_path, result))
    assert (first.variant, first.time_error, ours.variant) == ("recompute: full", None, "ours: all")
    assert ours.time_error is not None


def test_e3_is_predicted_by_its_widest_microbatch_and_the_time_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours = _runs(monkeypatch, write(tmp_path, e3()))
    assert (ours.job.sequence, ours.job.num_microbatches, ours.modules) == (4096, 2, ("core_attn",))
    assert ours.measured == Figures(int(30e9), 700.0 - 3 * OPTIMIZER_MS)
    assert plain.widths == ours.widths == {512: 3, 256: 1, 4096: 1, 1024: 1}
    found = predictions(tmp_path)
    assert [each.variant for each in found] == ["nothing, all steps", "ours: core_attn, all steps"]
    assert [each.memory_error for each in found] == [
        pytest.approx(predict(run, run.job.device)[0] / 30e9 - 1) for run in (plain, ours)
    ]
    assert found[0].time_error is None
    assert found[1].predicted_ms == pytest.approx(plain.measured.ms), "attention's copies are hidden at these widths"
    assert not predictions(write(tmp_path, e3() | {"swiglu_is_fused": False}))


def test_times_of_microbatches_that_differ_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _runs(monkeypatch, write(tmp_path, e3()))[1]
    device, steps = run.job.device, replace(run, widths={})

    def alone_ms(width: int) -> float:
        return predict(replace(steps, job=replace(run.job, sequence=width, num_microbatches=1)), device)[1]

    peak_bytes, ms = predict(replace(run, widths={512: 3, 4096: 1}), device)
    assert ms == pytest.approx(3 * alone_ms(512) + alone_ms(4096))
    assert peak_bytes == predict(steps, device)[0]


def _runs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Run]:
    caught: list[Run] = []
    monkeypatch.setattr("predictions.compare", lambda runs: caught.extend(runs) or [])
    predictions(folder)
    monkeypatch.undo()
    return caught


@pytest.mark.parametrize("result", [e1(), e2(), e4()])
def test_what_was_measured_as_predicted_has_no_error(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = _runs(monkeypatch, write(tmp_path, result))
    faster = replace(runs[0].job.device, achieved=0.55, achieved_memory=0.7 * 0.55 / 0.4)
    truth = [replace(run, measured=Figures(*predict(run, faster))) for run in runs]
    errors = worst(compare(truth))
    assert errors["memory"] == 0
    assert errors["time"] == pytest.approx(0, abs=1e-9)
    last = replace(truth[-1].measured, peak_bytes=int(truth[-1].measured.peak_bytes / 1.1))
    wrong = [*truth[:-1], replace(truth[-1], measured=last)]
    assert worst(compare(wrong))["memory"] == pytest.approx(0.1, rel=1e-6)


def test_four_microbatches_of_e1_are_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = _runs(monkeypatch, write(tmp_path, e1()))
    device = off.job.device
    saved = predict(off, device)[0] - predict(on, device)[0]
    assert saved / 2**20 == pytest.approx(13055 - 1024, rel=0.08), "13055 MiB by hand, less what is on its way"


def test_e1_waits_for_the_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B of 8 microbatches over 4 stages takes as long as 11 microbatches of one."""
    off, _ = _runs(monkeypatch, write(tmp_path, e1()))
    alone_ms = predict(replace(off, num_ahead=1), off.job.device)[1]
    assert predict(off, off.job.device)[1] == pytest.approx(alone_ms * 11 / 8)


def test_the_peak_is_without_the_planners_allowances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _runs(monkeypatch, write(tmp_path, e2()))[0]
    outcome = run_whole_modules(run.job, ())
    allowed = sum(outcome.stages[0].static_bytes[name] for name in ALLOWANCES)
    assert predict(run, run.job.device)[0] == outcome.peak_bytes(0) - allowed


def test_of_e4_only_the_compared_steps_have_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are first steps of cold processes."""
    found = {each.variant: each for each in predictions(write(tmp_path, e4()))}
    assert list(found) == [
        "recompute: full, 8192 tokens, warm",
        "ours: full recompute, 8192 tokens, warm",
        "recompute: full, 8192 tokens",
        "ours: full recompute, 8192 tokens",
        "ours: full recompute, 16384 tokens",
    ]
    fitted, ours, *attempts = found.values()
    assert (fitted.measured.ms, fitted.time_error) == (500.0, None)
    assert ours.time_error == pytest.approx(500 / 550 - 1)
    assert all(each.measured.ms is None and each.time_error is None for each in attempts)
    lines = table(list(found.values()))
    assert lines[2].endswith("| 500.0 ms | fitted | - |")
    assert lines[4].endswith("| - | - | - |")
    assert all(run.job.transformer_engine for run in _runs(monkeypatch, tmp_path))


def test_without_compared_steps_e4_has_memory_alone(tmp_path: Path) -> None:
    result = e4()
    del result["compared"]
    found = predictions(write(tmp_path, result))
    assert len(found) == 3
    assert worst(found)["time"] is None


def test_measured_rates_of_the_link_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def device() -> Device:
        return _runs(monkeypatch, tmp_path)[0].job.device

    write(tmp_path, e2())
    assert device() == find_device("h200")
    (tmp_path / "link.json").write_text(
        json.dumps({"copies_gb_per_s": {"1 MiB": {}, "1024 MiB": {"out": 50, "in": 51}}})
    )
    assert (device().link_out_gb_per_s, device().link_in_gb_per_s) == (50, 51)


def test_results_of_a_cpu_and_of_other_experiments_are_left_out(tmp_path: Path) -> None:
    assert predictions(write(tmp_path, e2() | {"device": "cpu", "device_memory_bytes": 0})) == []
    assert predictions(write(tmp_path, {"device": "NVIDIA H200"})) == []


def test_the_table_says_what_was_fitted(tmp_path: Path) -> None:
    lines = table(predictions(write(tmp_path, e2())))
    assert "fitted" in lines[2]
    assert all(line.count("|") == lines[0].count("|") for line in lines)
