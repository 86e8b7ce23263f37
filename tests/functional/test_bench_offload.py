"""The offloading bench from the command line, as it runs on a CPU, and what it says of a device's memory."""

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import run_python
from rich.console import Console
from torch.autograd.graph import saved_tensors_hooks

from nemo_rl_offload.bench.offload import SMALL, Bench, Figures, Shape, run
from nemo_rl_offload.bench.report import table
from nemo_rl_offload.bench.run import run_offload_bench
from nemo_rl_offload.bench.variants import AUTO_BUDGETS, MODULE_SETS, TRANSFORMER_ENGINES, Variant, variants
from nemo_rl_offload.offload.memory_budget import FIRST_PLANS, MemoryBudgetController

OURS = [f"ours: {name}" for name in MODULE_SETS]
ENOUGH_TO_MOVE = Shape(4, 1024, 2816, 8, 4, 1024, 2048, 1, 2, "bfloat16")


@pytest.mark.slow
def test_every_variant_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_python("-m", "nemo_rl_offload.cli", "bench", "offload", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    assert path.with_suffix(".png").stat().st_size > 0
    figures = {each["name"]: each for each in json.loads(path.read_text())["variants"]}
    others = {"none", "recompute: layers", "recompute: mlp", "save_on_cpu"}
    assert figures.keys() == {*OURS, *(f"ours: auto {share:.0%}" for share in AUTO_BUDGETS), *others}
    assert all(each["bit_identical"] and each["step_ms"] > 0 and each["error"] is None for each in figures.values())
    assert all((each["bytes_out"] > 0) == name.startswith("ours") for name, each in figures.items())


@pytest.mark.slow
def test_an_unknown_variant_is_named_with_the_nearest() -> None:
    done = run_python("-m", "nemo_rl_offload.cli", "bench", "offload", "--variant", "ours: nroms")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no variant 'ours: nroms' here" in done.stderr
    assert "Did you mean 'ours: norms'?" in done.stderr


def test_what_is_away_is_what_the_host_has_after_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's memory is played by a number, from which what the host has is missing."""
    device = torch.device("cpu")
    bench = Bench(SMALL, device)
    (_, variant) = variants(device, 0, ["ours: all"])
    figures = Figures(variant.name)
    on_the_host = []
    with variant.enter(bench.model) as offload:
        assert offload is not None
        for _ in range(2):
            bench.step(offload)

        def memory_stats() -> dict[str, int]:
            on_the_host.append(offload.stats().host_bytes)
            return {"requested_bytes.all.current": (1 << 30) - on_the_host[-1]}

        monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
        bench._add_held(figures, offload)
        assert offload.stats().host_bytes == 0, "the graph is gone"
    assert figures.held_bytes == (1 << 30) - on_the_host[0]
    assert 0 < figures.away_bytes <= on_the_host[0] < 1.2 * figures.away_bytes  # blocks are of whole units


@pytest.mark.slow
def test_a_rival_whose_library_does_not_load_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(model: object) -> object:
        raise OSError("libcudnn_cnn.so.9: undefined symbol")

    plain, layers = variants(torch.device("cpu"), 0, ["recompute: layers"])
    broken = dataclasses.replace(layers, enter=enter)
    monkeypatch.setattr("nemo_rl_offload.bench.offload.variants", lambda *_: [plain, broken])
    figures = run(SMALL, torch.device("cpu"), num_rounds=1, num_warmup=0, num_steps=1)
    assert [each.error for each in figures] == [None, "OSError: libcudnn_cnn.so.9: undefined symbol"]


@pytest.mark.slow
def test_hooks_that_a_failed_rival_leaves_take_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Transformer Engine's context does, which fails after it has set its hooks."""
    packed: list[torch.Tensor] = []
    plain, layers = variants(torch.device("cpu"), 0, ["recompute: layers"])

    def enter(model: object) -> contextlib.AbstractContextManager[None]:
        saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor).__enter__()
        raise ValueError("must be contiguous")

    broken = dataclasses.replace(layers, enter=enter)
    monkeypatch.setattr("nemo_rl_offload.bench.offload.variants", lambda *_: [plain, broken])
    figures = run(SMALL, torch.device("cpu"), num_rounds=1, num_warmup=0, num_steps=1)
    assert [each.error for each in figures] == [None, "ValueError: must be contiguous"]
    assert packed == []


@pytest.mark.slow
def test_the_steps_that_count_are_all_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` tries plans in its first steps; a step of each would say nothing of what a user gets."""
    events: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(event), original(*args))[1])

    noted(MemoryBudgetController, "_make_plan", "planned")
    noted(Bench, "_timed", "timed")
    run(SMALL, torch.device("cpu"), num_rounds=1, names=["ours: auto 80%"])
    measured = events[events.index("timed") + 2 :]  # after the check, and the steps without offloading
    assert measured[: len(FIRST_PLANS) + 2] == [*["planned"] * len(FIRST_PLANS), "timed", "timed"]


@pytest.mark.slow
def test_an_interrupted_bench_leaves_the_rounds_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("CUBLAS_WORKSPACE_CONFIG", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(key, "error")  # which the bench would set, for good
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured: list[str] = []
    measure = Bench.measure

    def interrupted(self: Bench, variant: Variant, *args: Any) -> None:
        measured.append(variant.name)
        if len(measured) == 4:
            raise KeyboardInterrupt
        measure(self, variant, *args)

    monkeypatch.setattr(Bench, "measure", interrupted)
    numbers = dict.fromkeys(("layers", "sequence", "microbatches"))
    options = argparse.Namespace(rounds=2, **numbers, variant=["recompute: mlp"], format="table", out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_offload_bench(options)
    assert measured == ["none", "recompute: mlp"] * 2
    (path,) = tmp_path.iterdir()
    figures = json.loads(path.read_text())["variants"]
    assert all(len(each["step_ms_rounds"]) in (2, 4) and each["step_ms"] > 0 for each in figures)


def test_variants_have_no_ratio_where_the_plain_one_failed() -> None:
    failed = Figures("none", error="OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has")
    other = Figures("save_on_cpu", bit_identical=True, step_ms=2.0)
    console = Console(file=io.StringIO(), width=150)
    console.print(table([failed, other], True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "CUDA out of memory" in text
    assert "Tried" not in text
    row = next(line for line in text.splitlines() if "save_on_cpu" in line)
    assert [cell.strip() for cell in row.split("│")][2:4] == ["2.0 ms", "-"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(
    os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1", reason="nobody counts memory without the allocator"
)
def test_what_is_offloaded_leaves_the_device() -> None:
    gc.collect()  # what earlier tests left would leave the device meanwhile
    figures = run(ENOUGH_TO_MOVE, torch.device("cuda"), num_rounds=1, num_warmup=2, num_steps=1, names=OURS)
    for each in figures[1:]:
        assert each.error is None
        assert each.effectiveness is not None
        assert 0.998 <= each.effectiveness <= 1.002, each.name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_transformer_engines_offloading_stands_beside() -> None:
    pytest.importorskip("transformer_engine")
    names = list(TRANSFORMER_ENGINES)
    figures = run(ENOUGH_TO_MOVE, torch.device("cuda"), num_rounds=1, num_warmup=1, num_steps=1, names=names)
    assert [(each.name, each.error, each.bit_identical) for each in figures[1:]] == [
        (name, None, True) for name in names
    ]
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        assert all(each.peak_allocated_bytes < figures[0].peak_allocated_bytes for each in figures[1:])
