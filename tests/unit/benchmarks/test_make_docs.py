"""The page of benchmarks: what is committed is fresh, and every bar says what the results say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bars import MET, MISSED, NOT_YET, Row, load, rows
from frontier import figures as e2_figures
from make_docs import DIGEST, DOCUMENT, device_page, digest, digest_page, document, draw_pictures, grpo_steps
from make_docs import e4 as page_of_e4

from nemo_rl_offload.specs.catalogue import CATALOGUE

GIB = 1 << 30
STASH_SIZES = ("live_bytes", "stash_bytes")
ABOUT = {"device": "NVIDIA H200", "device_memory_bytes": int(139.8 * GIB)}


def e1(lost_percent: float, saved: float) -> dict[str, Any]:
    figures = {
        "step_ms_off": 1000.0,
        "step_ms_on": 1000.0 / (1 - lost_percent / 100),
        "throughput_lost_percent": lost_percent,
        "saved_of_offloaded": saved,
        "saved_of_peak_percent": 18.1,
        "peak_allocated_bytes_off": 80 * GIB,
        "peak_allocated_bytes_on": 66 * GIB,
        "offloaded_bytes_alive_at_the_peak": 16 * GIB,
        "peak_reserved_bytes_off": 90 * GIB,
        "peak_reserved_bytes_on": 78 * GIB,
        "megatrons_peak_reserved_bytes": 81 * GIB,
    }
    model = {
        **CATALOGUE["deepseek-ai/DeepSeek-V3"],
        "num_hidden_layers": 4,
        "first_k_dense_replace": 0,
        "n_routed_experts": 16,
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
    }
    shape = {"layers": 4, "sequence": 4096, "microbatches": 8, "transformer_impl": "torch"}
    modules = ["attn_norm", "mlp_norm", "expert_fc1", "moe_act"]
    about = {"model": model, **shape, "modules": modules, "max_inflight_bytes": GIB, "bit_identical": True}
    waits = {"step_ms_spread": 0.01, "stall_in_ms": 3.0, "stall_out_ms": 0.0}
    samples = {way: [{"ms": 1000.0, "peak_allocated_bytes": 80 * GIB}] * 2 for way in ("off", "on", "copies")}
    return {"experiment": "E1", **ABOUT, **about, "samples": samples, "figures": figures | waits}


def e2() -> dict[str, Any]:
    points = [
        ("nothing", "nothing", 80, 500.0),
        ("ours: core_attn", "ours", 70, 505.0),
        ("recompute: full", "recompute", 70, 640.0),
        ("megatron: core_attn", "megatron", 72, 500.0),
    ]
    variants: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": kind,
            "error": None,
            "bit_identical": True,
            "offload_modules": ["core_attn"] if kind == "ours" else [],
            "recompute": None,
            "medians": {
                "ms": ms,
                "ms_spread": 0.01,
                "peak_allocated_bytes": peak * GIB,
                "peak_reserved_bytes": peak * GIB,
            },
        }
        for name, kind, peak, ms in points
    ]
    failed = {"bit_identical": None, "offload_modules": [], "recompute": None, "error": "ImportError: no trl"}
    variants.append({"name": "TRL OffloadActivations", "kind": "hooks", **failed})
    shape = {
        "num_layers": 4,
        "sequence": 8192,
        "num_microbatches": 2,
        "algorithm": "grpo",
        "transformer_impl": "transformer_engine",
    }
    model = {**CATALOGUE["Qwen/Qwen2.5-7B"], "num_hidden_layers": 4, "vocab_size": 8192}
    about = {"shape": shape, "model": model, "optimizer_ms": 20.0, "variants": variants}
    return {"experiment": "E2", **ABOUT, **about, "figures": e2_figures(variants)}


def e3() -> dict[str, Any]:
    def variant(name: str, kind: str, peak: float, host: float) -> dict[str, Any]:
        figures = {
            "num_steps": 300,
            "total_ms": 60_000.0,
            "highest_peak_bytes": peak * 10 * GIB,
            "largest_steps_own_peak_bytes": 10 * GIB,
            "host_bytes": host * GIB,
            "largest_steps_own_host_bytes": GIB,
            "peak_over_largest_steps_own": peak,
            "host_less_a_slab_over_largest_steps_own": host,
        }
        steps = [{"peak_allocated_bytes": 10 * GIB, "host_capacity_bytes": GIB}] * 2
        about = {"offload_modules": ["core_attn"], "error": None, "bit_identical": True, "steps": steps}
        return {"name": name, "kind": kind, **about, "figures": figures}

    variants = [variant("ours: attention", "ours", 1.01, 1.2), variant("megatron: attention", "megatron", 1.3, 19.1)]
    shape = {"transformer_impl": "transformer_engine", "algorithm": "grpo", "num_layers": 4, "sequence": 4096}
    model = {**CATALOGUE["Qwen/Qwen2.5-7B"], "num_hidden_layers": 4, "vocab_size": 8192}
    rollouts = [{"widths": [4096, 512]}] * 300
    return {"experiment": "E3", **ABOUT, "model": model, "shape": shape, "rollouts": rollouts, "variants": variants}


def e4(longer: float | None) -> dict[str, Any]:
    figures = {
        "longest_sequence": {"recompute: full": 50176, "ours: full recompute": 92160},
        "most_layers": {},
        "longer": longer,
        "time_per_token": None,
    }
    return {
        "experiment": "E4",
        **ABOUT,
        "model": {},
        "transformer_impl": "torch",
        "num_layers": 28,
        "sequence_of_layers": 16384,
        "sequence": {},
        "layers": {},
        "figures": figures,
    }


def stash(ratio: float, num_bytes: int) -> dict[str, Any]:
    def copies(row_bytes: int, page_size: int, restore_ratio: float) -> dict[str, Any]:
        rates = {f"{way}_gb_per_s": 1000.0 for way in ("copy", "stash", "restore")}
        ratios = {"stash_ratio": 0.9, "restore_ratio": restore_ratio}
        return {"row_bytes": row_bytes, "page_size": page_size, "live_fraction": 0.5, **rates, **ratios}

    sizes = {"stash": {"live_bytes": GIB, "stash_bytes": num_bytes}, "dynamic": dict.fromkeys(STASH_SIZES)}
    layers = [
        {"name": name, "step_ms": 9.0, "peak_bytes": GIB, "bit_identical": True, **own} for name, own in sizes.items()
    ]
    shape = {"num_layers": 4, "num_tokens": 8192}
    both = [copies(14336, 64, ratio), copies(2048, 64, 0.1), copies(14336, 16, 0.1)]
    return {"device": ABOUT["device"], "shape": shape, "microbatches": 2, "copies": both, "layers": layers}


def write(folder: Path, **results: dict[str, Any]) -> Path:
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def bars_of(folder: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows(load(folder), folder):
        found.setdefault(f"{row.experiment} {row.figure}", []).append(row)
    return found


def test_what_is_committed_is_fresh() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "python benchmarks/make_docs.py"
    assert DIGEST.read_text(encoding="utf-8") == digest_page(), "python benchmarks/make_docs.py"


def test_without_results_no_bar_is_met(tmp_path: Path) -> None:
    assert {row.state for found in bars_of(tmp_path).values() for row in found} == {NOT_YET}


@pytest.mark.parametrize(("lost_percent", "time"), [(0.5, MET), (0.51, MISSED), (-0.2, MET)])
@pytest.mark.parametrize(("saved", "memory"), [(0.998, MET), (0.997, MISSED)])
def test_e1(lost_percent: float, time: str, saved: float, memory: str, tmp_path: Path) -> None:
    found = bars_of(write(tmp_path, deepseek=e1(lost_percent, saved)))
    assert [row.state for row in found["E1 throughput lost"]] == [time]
    assert [row.state for row in found["E1 saved of the offloaded bytes alive at the peak"]] == [memory]
    assert found["E1 saved share of the peak"][0].measured == "18.1 %"
    reserved = "E1 saved share of the reserved peak"
    assert found[reserved][0].measured == "13.3 % (published: 17.8 %)"
    assert found[f"{reserved} by Megatron-Core's engine"][0].measured == "10.0 %"
    assert found["E1 offloaded of a layer, a microbatch"][0].measured.startswith("1073.7 MB (published")
    assert found["E1 the same over the offloaded bytes"][0].measured == "0.750"


def test_each_result_of_an_experiment_has_its_own_row(tmp_path: Path) -> None:
    found = bars_of(write(tmp_path, good=e1(0.1, 1.0), bad=e1(4.2, 0.8)))
    assert {(row.source, row.state) for row in found["E1 throughput lost"]} == {("good", MET), ("bad", MISSED)}


def test_e2_and_e3_and_e4(tmp_path: Path) -> None:
    found = bars_of(write(tmp_path, dense=e2(), rollouts=e3(), reach=e4(1.8)))
    states = {name: [row.state for row in each] for name, each in found.items()}
    assert states["E2 step time at equal peak memory, beside recomputation, `save_on_cpu`, TRL"] == [MET]
    engines = "E2 step time at equal peak memory, beside Megatron-Core's and Transformer Engine's offloading"
    assert states[engines] == [MISSED], "1.01 of its time"
    assert states["E2 peak beside Megatron-Core's engine, same modules"] == [MET]
    assert states["E3 highest device peak over the largest step's own"] == [MET]
    (host,) = found["E3 host memory less one slab over the largest step's own"]
    assert (host.state, host.measured) == (MISSED, "1.200 (Megatron-Core's: 19.100)")
    assert states["E4 longest sequence with recomputation, over recomputation alone"] == [MET]
    assert states["E4 time per token at recomputation's longest, over its own"] == [NOT_YET]
    assert {row.state for name, each in found.items() if name.startswith("E6") for row in each} <= {MET, MISSED}


def test_a_peak_that_nothing_of_ours_reaches_misses_the_bar(tmp_path: Path) -> None:
    result = e2()
    result["variants"][2]["medians"]["peak_allocated_bytes"] = 60 * GIB
    result["figures"] = e2_figures(result["variants"])
    (row,) = bars_of(write(tmp_path, dense=result))[
        "E2 step time at equal peak memory, beside recomputation, `save_on_cpu`, TRL"
    ]
    assert (row.state, row.measured) == (MISSED, "not reached (60.0 GiB, recompute: full)")


def test_the_digest_has_a_row_for_each_rival_and_counts_results(tmp_path: Path) -> None:
    slow, far = e2(), e2()
    slow["variants"][2]["medians"]["ms"] = 561.0
    far["variants"][2]["medians"]["peak_allocated_bytes"] = 60 * GIB
    for each in (slow, far):
        each["figures"] = e2_figures(each["variants"])
    folder = write(tmp_path, dense=e2(), slow=slow, far=far, rollouts=e3(), reach=e4(1.8))
    found = list(digest([row for row in rows(load(folder), folder) if row.state != NOT_YET]))
    same_peak = "| E2 | step time at equal peak memory"
    assert (
        f"{same_peak}, beside full recomputation | at most 0.87 | 0.789 to 0.900; not reached in 1 | 1 of 3 |" in found
    )
    assert f"{same_peak}, beside Megatron-Core's engine | at most 1.00 | 1.010 | 0 of 3 |" in found
    assert "| all | losses and gradients bit for bit as without | all | 4 of 4 | 4 of 4 |" in found
    assert (
        "| E4 | longest sequence with recomputation, over recomputation alone | at least 1.5 | 1.800 | 1 of 1 |"
        in found
    )
    assert not any("saved share" in line for line in found), "it has no bar"


def test_a_changed_bit_of_ours_is_missed(tmp_path: Path) -> None:
    result = e3()
    result["variants"][0]["bit_identical"] = False
    (row,) = bars_of(write(tmp_path, rollouts=result))["all losses and gradients bit for bit as without"]
    assert (row.state, row.measured) == (MISSED, "0 of 1")


def test_e3_is_not_met_by_a_run_that_stopped(tmp_path: Path) -> None:
    result = e3()
    result["variants"][0]["figures"]["num_steps"] = 25
    assert bars_of(write(tmp_path, rollouts=result))["E3 highest device peak over the largest step's own"][0].state == (
        NOT_YET
    ), "it goes on"
    result["variants"][0]["error"] = "OutOfMemoryError"
    (row,) = bars_of(write(tmp_path, rollouts=result))["E3 highest device peak over the largest step's own"]
    assert (row.state, row.measured) == (MISSED, "OutOfMemoryError")


@pytest.mark.parametrize("check_error", ["OutOfMemoryError: the device was shared", None])
def test_bits_that_were_not_checked_are_not_claimed(check_error: str | None, tmp_path: Path) -> None:
    result = e3()
    result["variants"][0] |= {"bit_identical": None, "check_error": check_error}
    assert "all losses and gradients bit for bit as without" not in bars_of(write(tmp_path, rollouts=result))


@pytest.mark.parametrize(("ratio", "copies"), [(0.85, MET), (0.84, MISSED)])
@pytest.mark.parametrize(("num_bytes", "memory"), [(int(1.15 * GIB), MET), (int(1.16 * GIB), MISSED)])
def test_e5(ratio: float, copies: str, num_bytes: int, memory: str, tmp_path: Path) -> None:
    found = bars_of(write(tmp_path, stash=stash(ratio, num_bytes)))
    assert found["E5 slowest of stash and restore, over a device copy"][0].state == copies
    assert found["E5 pages taken over live bytes"][0].state == memory


def test_results_of_a_cpu_are_none(tmp_path: Path) -> None:
    write(tmp_path, deepseek=e1(0.1, 1.0) | {"device": "cpu", "device_memory_bytes": 0})
    assert {row.state for found in bars_of(tmp_path).values() for row in found} == {NOT_YET}


def test_the_page_has_every_section(tmp_path: Path) -> None:
    results = {"deepseek": e1(0.1, 1.0), "dense": e2(), "rollouts": e3(), "reach": e4(1.8), "stash": stash(0.9, GIB)}
    page = "\n".join(device_page(write(tmp_path, **results)))
    assert page.startswith("# NVIDIA H200")
    assert "Not yet measured." not in page
    for words in ("ImportError: no trl", "At 70.00 GiB, beside recompute: full: ours: core_attn takes 0.789", "92160"):
        assert words in page
    assert "| deepseek | on |" in page, "the planner's prediction"
    assert "| this engine | 1001 ms | 0.10 % |" in page


def link() -> dict[str, Any]:
    rates = {"out": 50.0, "in": 51.0, "both": 90.0, "device": 4000.0}
    samples = {"1 MiB": {way: [0.9 * rate, rate] for way, rate in rates.items()}}
    about = {"pin_ms": {"4096 MiB": 1000.0}, "bf16_tflops": 700.0}
    return {**ABOUT, "copies_gb_per_s": {"1 MiB": rates}, "copies_gb_per_s_samples": samples, **about}


def test_every_experiment_has_the_picture_that_the_page_shows(tmp_path: Path) -> None:
    """`bench stash` draws its own."""
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    results = {"deepseek": e1(0.1, 1.0), "dense": e2(), "rollouts": e3(), "reach": e4(1.8), "link": link()}
    draw_pictures([write(folder, **results)])
    shown = re.findall(r"results/nvidia-h200/(\w+)\.png", "\n".join(device_page(folder)))
    assert sorted(shown) == sorted([*results, "predictions"])
    assert {path.stem for path in folder.glob("*.png")} == set(shown)
    assert all(path.stat().st_size > 10_000 for path in folder.glob("*.png"))


def test_the_committed_page_shows_pictures_that_are_there() -> None:
    shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", DOCUMENT.read_text(encoding="utf-8"))
    assert shown
    assert not [path for path in shown if not (DOCUMENT.parent / path).is_file()]


def test_a_search_that_has_not_ended_says_so() -> None:
    result = e4(1.8)
    result["figures"]["most_layers"] = {"recompute: full": 31, "ours: full recompute": None}
    result["layers"] = {"ours: full recompute": {"tried": {"28": {}, "30": {}, "32": {"out_of_memory": True}}}}
    rows = list(page_of_e4("reach", result))
    assert "| recompute: full | 50176 | 31 |" in rows
    assert "| ours: full recompute | 92160 | at least 30 |" in rows


def test_a_step_by_phase_and_the_engine_beside_it() -> None:
    medians = {"timing/refit_s": 0.3, "timing/train_s": 1.25, "timing/step_s": 2.0, "tokens_per_s": 9216.4}
    step = {"medians": medians, "first_step_s": 15.0, "until_first_step_s": 99.6}
    step["summary"] = {"memory": {"peak_device_bytes": 40 * GIB}}
    engine = {"tokens_per_s": [1.0, 3000.0, 4000.0], "seconds": {"wake_cache": [0.5, 0.1, 0.2]}}
    about = {"experiment": "grpo_step", **ABOUT, "overrides": ["policy.precision=bfloat16"]}
    results = {
        "grpo_step_a": {**about, "parts": {"step": step}},
        "grpo_step_b": {**about, "overrides": [], "parts": {"engine": engine, "step": {"failed": 2}}},
    }
    lines = list(grpo_steps(results, "card"))
    seconds = "0.30 s | - | - | - | 1.25 s | 2.00 s"
    row = f"| `grpo_step_a.json` | {seconds} | 9,216 | 40.0 GiB | 15.0 s | 100 s | `precision=bfloat16` |"
    assert [line for line in lines if "grpo_step_a" in line] == [row]
    assert not [line for line in lines if "grpo_step_b" in line and "| - |" in line], "a run that failed has no row"
    assert lines[-4:-1] == [
        "vLLM beside the policy that trains, 256 requests of 512 tokens (`grpo_step_b.json`):\n",
        "- 3,000 tokens/s in all",
        "- wake cache: 0.20 s",
    ]
