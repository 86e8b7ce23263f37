"""A way of E1 that fails leaves the others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare_copies import BareCopies
from deepseek_layers import COPIES, MEGATRONS, NEEDED, measure
from forward_clock import ForwardClock

from nemo_rl_offload.offload import HostBackend, OffloadEngine

WAYS = (*NEEDED, COPIES)


class NoCopies(BareCopies):
    """Needs no device. A class, since modules that are first imported in a test annotate with it."""

    def __init__(self, num_bytes: int) -> None: ...


class FakeStage:
    """Notes which way each of its steps went."""

    def __init__(self, fails_at: int) -> None:
        self._fails_at = fails_at
        self.engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)
        self.waits = SimpleNamespace(forward_ms=1.0, backward_ms=2.0)
        self.steps: list[str] = []
        self.way = ""
        self.clock = ForwardClock()

    def time_passes(self) -> None:
        self.activation_bytes = 64

    def use(self, engine: OffloadEngine | None, bare_copies: BareCopies | None) -> None:
        self.way = "on" if engine is not None else "off" if bare_copies is None else "copies"

    def use_megatrons(self) -> None:
        self.way = MEGATRONS

    def step(self) -> None:
        self.steps.append(self.way)
        with self.clock.forward():
            pass
        if self.way == MEGATRONS and self.steps.count(MEGATRONS) == self._fails_at:
            raise RuntimeError("No non-empty chunk found")
        if self.way == "on":
            x = torch.ones(8, requires_grad=True)
            with self.engine.region("m", 0) as region:
                y = (x * 2).sin()
            self.engine.commit(region, y).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [1, 4, 6])
def test_a_failure_of_megatrons_engine_is_a_result(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the round that warms up, in the first, and in the last."""
    calls = []
    monkeypatch.setattr("bare_copies.BareCopies", NoCopies)
    monkeypatch.setattr("megatrons_engine.forget_megatrons_steps", lambda: calls.append("forgotten"))
    monkeypatch.setattr("deepseek_layers.freeze_gc", lambda: calls.append("spared"))
    stage, path = FakeStage(fails_at), tmp_path / "e1.json"
    samples: dict[str, list[Any]] = {name: [] for name in (*WAYS, MEGATRONS)}
    measure(stage, {"microbatches": 1, "bytes_per_microbatch": 0, "samples": samples}, 2, path)
    assert stage.steps.count(MEGATRONS) == fails_at
    assert all(stage.steps.count(way) == 6 for way in WAYS)
    assert sorted(calls) == ["forgotten", "spared"]
    found = json.loads(path.read_text())
    assert found["megatrons_error"] == "RuntimeError: No non-empty chunk found"
    assert {name: len(each) for name, each in found["samples"].items()} == {"off": 2, "on": 2, "copies": 2}
    assert found["bytes_per_microbatch"] == 32
    assert found["figures"]["offloaded_share_of_activations"] == 0.5
    assert all(found["figures"][f"forward_host_ms_{way}"] > 0 for way in WAYS)
    assert not [key for key in found["figures"] if key.startswith("megatrons")]


def test_what_was_measured_before_a_time_limit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in the first turn of the bare copies, after the round that warms up."""
    monkeypatch.setattr("bare_copies.BareCopies", NoCopies)
    monkeypatch.setattr("deepseek_layers.freeze_gc", lambda: None)
    stage, path = FakeStage(0), tmp_path / "e1.json"
    step = stage.step

    def until_the_limit() -> None:
        step()
        if stage.steps.count("copies") == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(stage, "step", until_the_limit)
    samples: dict[str, list[Any]] = {name: [] for name in WAYS}
    with pytest.raises(KeyboardInterrupt):
        measure(stage, {"microbatches": 1, "bytes_per_microbatch": 0, "samples": samples}, 2, path)
    found = json.loads(path.read_text())
    assert {name: len(each) for name, each in found["samples"].items()} == {"off": 1, "on": 1, "copies": 0}
    assert found["figures"]["step_ms_on"] > 0
    assert not [key for key in found["figures"] if "copies" in key]
