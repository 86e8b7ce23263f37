import io
from typing import Any

import pytest
from rich.console import Console

from nemo_rl_offload.observability.summary_table import summary_table


def summary(**changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "steps": 1200,
        "seed": 1,
        "world_size": 2,
        "wall_seconds": 3725.4,
        "validation_metric": "accuracy",
        "validation": {"first": None, "last": None},
        "train": {"loss": -0.01234567},
        "paged_stash": None,
        "offload": {
            "engine": "native",
            "modules": ["core_attn", "mlp_norm"],
            "bytes_out": 3 << 20,
            "bytes_in": 2 << 20,
            "peak_host_bytes": 1 << 30,
            "denied_bytes": 0,
            "ineffective_bytes": None,
            "demand_reloads": 3,
            "stall_out_ms": 12.3,
            "stall_in_ms": 4500.0,
            "overlap": 0.98765,
            "per_module": {"core_attn": {"bytes_out": 5 << 10, "bytes_in": 4 << 10, "num_groups": 2}},
        },
        "memory": {"peak_device_bytes": None},
        "run_dir": "results/" + "long_name_" * 12,
    } | changes


def rows(content: dict[str, Any]) -> tuple[dict[str, str], str]:
    stream = io.StringIO()
    Console(file=stream, width=200).print(summary_table(content))
    text = stream.getvalue()
    cells = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in cells}, text


def test_a_single_validation_is_no_change() -> None:
    once = summary(validation={"first": 0.5, "last": 0.5}, num_validations=1)
    assert rows(once)[0]["validation accuracy"] == "0.5, measured once"
    assert rows(once | {"num_validations": 2})[0]["validation accuracy"] == "0.5 -> 0.5"


def test_every_figure_is_shown() -> None:
    shown, text = rows(summary(run_dir="results/x"))
    assert shown == {
        "validation accuracy": "none",
        "training loss": "-0.01235",
        "wall time": "1:02:05",
        "workers": "2",
        "seed": "1",
        "offload engine": "native",
        "offloaded modules": "core_attn, mlp_norm",
        "offloaded": "3.00 MiB out, 2.00 MiB in",
        "core_attn": "5.00 KiB out, 4.00 KiB in",
        "peak host memory": "1.00 GiB",
        "denied (host budget)": "0 B",
        "reloads on demand": "3",
        "waits for copies": "0.0123 s out, 4.5 s in",
        "copies behind compute": "98.8%",
        "run directory": "results/x",
    }
    assert "grpo: 1,200 steps" in text


def test_phases_and_what_waits_on_the_host() -> None:
    memory = {
        "peak_device_bytes": 5 << 30,
        "peak_reserved_bytes": 6 << 30,
        "peak_device_bytes_by_phase": {"loading": 4 << 30, "train": 5 << 30, "between phases": 1 << 30},
        "host_bytes": {"activations": 3 << 20, "reference_weights": 2 << 30},
    }
    shown, _ = rows(summary(run_dir="x", memory=memory, phase_seconds={"generation": 1234.56, "train": 2.0}))
    assert {
        name: value for name, value in shown.items() if name.startswith(("phase", "host memory", "peak device", "kept"))
    } == {
        "peak device memory": "5.00 GiB",
        "kept for it by torch": "6.00 GiB",
        "phase generation": "1,234.6 s",
        "phase train": "2.0 s, peak 5.00 GiB",
        "phase loading": "peak 4.00 GiB",
        "host memory of activations": "3.00 MiB",
        "host memory of reference weights": "2.00 GiB",
    }


def test_fits_80_columns_without_losing_text() -> None:
    content = summary()
    shown, text = rows(content)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert content["run_dir"] in "".join(line.strip("│").split("│")[1].strip() for line in text.splitlines()[-4:-1])
    assert "peak device memory" not in shown


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_fits_a_narrow_terminal_without_losing_text(width: int) -> None:
    stream = io.StringIO()
    content: Any = summary(memory={"peak_device_bytes": None, "host_bytes": {"reference_weights": 2048}})
    Console(file=stream, width=width, soft_wrap=True).print(summary_table(content, width))
    lines = stream.getvalue().splitlines()[1:]
    assert {len(line) for line in lines} == {min(width, 80)}
    cells = ([cell.strip() for cell in line.split("│")[1:3]] for line in lines if "│" in line)
    columns = list(zip(*cells, strict=True))
    assert "host memory of reference weights" in " ".join(columns[0])
    assert content["run_dir"] in "".join(columns[1])


def test_without_offloading() -> None:
    nothing = dict.fromkeys(summary()["offload"]) | {"per_module": {}}
    shown, _ = rows(summary(offload=nothing))
    assert not any(name.startswith("offload") or "copies" in name or "host" in name for name in shown)


def test_with_an_engine_that_counts_nothing() -> None:
    theirs = dict.fromkeys(summary()["offload"]) | {"engine": "megatron", "modules": ["core_attn"], "per_module": {}}
    shown, _ = rows(summary(offload=theirs))
    assert shown["offloaded modules"] == "core_attn"
    assert shown["offloaded"] == "not counted by Megatron-Core's engine"
    assert "denied (host budget)" not in shown


def test_steps_that_ran_again_and_pages_are_shown() -> None:
    stash = {"reruns": 3, "over_budget": 2, "overflows": 1, "needed_capacity_factor": 1.25}
    shown, _ = rows(summary(paged_stash=stash))
    assert shown["steps run again"] == "3 (2 buffers, 1 pages too few)"
    assert shown["needed capacity factor"] == "1.25"
    assert "paged stash" not in shown
    sizes = {"peak_bytes": 1 << 20, "device_bytes": 2 << 20, "host_bytes": 0}
    shown, _ = rows(summary(paged_stash=stash | sizes))
    assert shown["paged stash"] == "1.00 MiB of 2.00 MiB"
