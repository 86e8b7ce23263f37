"""What `plan` chooses for a committed result, and what a run of that choice adds to the table and to E6."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from planned_choices import choices, named_choices, table
from predictions import Figures, predictions

from nemo_rl_offload.config.loader import PROJECT_ROOT
from nemo_rl_offload.planner.job import Recompute

RESULTS = PROJECT_ROOT / "benchmarks/results/nvidia-h200"
RESULT = "dense_grpo_8192_transformer_engine.json"
OWN_MS, OWN_GIB = 700.0, 52


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds one result and the link's rates."""
    for name in (RESULT, "link.json"):
        shutil.copy(RESULTS / name, tmp_path)
    return tmp_path


def add_a_run(folder: Path, name: str, keys: dict[str, Any], ms: float = OWN_MS) -> float:
    """As though a step of it had been measured; returns the optimizer's part of that."""
    result = json.loads((folder / RESULT).read_text())
    entry = {"name": name, "kind": "ours", "offload_modules": keys["offload_modules"], "recompute": None, "keys": keys}
    medians = {"ms": ms, "peak_allocated_bytes": OWN_GIB << 30}
    result["variants"].append({**entry, "error": None, "medians": medians, "samples": []})
    (folder / RESULT).write_text(json.dumps(result))
    return float(result["optimizer_ms"])


def test_a_choice_is_offered_for_the_peak_of_each_recomputation(folder: Path) -> None:
    found = choices(folder)
    assert [each.rival for each in found] == ["recompute: mlp", "recompute: full"]
    assert dict(named_choices(folder / RESULT)) == {each.name: each.keys for each in found}
    assert {each.run for each in found} == {None}
    assert all(line.endswith("| - | - |") for line in list(table(found))[2:])


def test_a_run_of_the_choice_stands_beside_it(folder: Path) -> None:
    (name, keys), _ = named_choices(folder / RESULT)
    optimizer_ms = add_a_run(folder, name, dict(keys))
    first, second = choices(folder)
    assert first.run == Figures(OWN_GIB << 30, OWN_MS - optimizer_ms)
    assert second.run is None
    assert f"| {OWN_MS - optimizer_ms:.1f} ms | {OWN_GIB}.00 GiB |" in list(table([first]))[2]


def test_what_ran_is_the_choice_and_no_rival_of_itself(folder: Path) -> None:
    before, _ = choices(folder)
    (name, keys), _ = named_choices(folder / RESULT)
    ran = {**keys, "recompute_num_layers": 1}
    add_a_run(folder, name, ran, ms=1.0)
    copy = folder / "again"
    shutil.copytree(folder, copy)
    first, _ = choices(copy)
    assert first.keys == ran
    assert first.planned_ms < before.planned_ms
    assert (first.best, first.best_ms) == (before.best, before.best_ms)
    assert named_choices(copy / RESULT)[0] == (name, keys)


def test_the_planner_predicts_what_ran_with_its_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, keys), _ = named_choices(folder / RESULT)
    add_a_run(folder, name, dict(keys))
    expected = Recompute(frozenset({"mlp_act", "mlp_fc1"}), num_counted_layers=6)
    assert expected.keys.items() <= keys.items()
    asked = []
    monkeypatch.setattr("predictions.predict", lambda run, device: asked.append(run) or (1 << 30, 1.0))
    assert name in {each.variant for each in predictions(folder)}
    (run,) = [run for run in asked if run.variant == name]
    assert run.job.recompute == expected
    assert run.modules == tuple(keys["offload_modules"])
