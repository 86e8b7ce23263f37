"""E1's ways differ in copies and engine alone, and one that fails leaves the others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bare_copies import BareCopies
from deepseek_layers import MEGATRONS, WAYS, measure
from deepseek_stage import Stage
from forward_clock import ForwardClock
from megatron.core.transformer.moe import token_dispatcher

from nemo_rl_offload.offload import HostBackend, OffloadEngine


class FakeStage:
    """Notes which way each of its steps went."""

    def __init__(self) -> None:
        self.engine = OffloadEngine(HostBackend(), host_memory_budget_bytes=1 << 20, min_tensor_bytes=0)
        self.waits = SimpleNamespace(forward_ms=1.0, backward_ms=2.0)
        self.steps: list[str] = []
        self.way = ""
        self.clock = ForwardClock()

    def time_passes(self) -> None: ...

    def use(self, engine: OffloadEngine | None, bare_copies: BareCopies | None) -> None:
        self.way = "on" if engine is not None else "off" if bare_copies is None else "copies"

    def use_megatrons(self) -> None:
        self.way = MEGATRONS

    def step(self) -> None:
        self.steps.append(self.way)
        with self.clock.forward():
            pass
        if self.way == MEGATRONS:
            raise RuntimeError("No non-empty chunk found")
        if self.way == "on":
            x = torch.ones(8, requires_grad=True)
            with self.engine.region("m", 0) as region:
                y = (x * 2).sin()
            self.engine.commit(region, y).sum().backward()


def test_the_routers_answers_pass_bare_copies_as_they_pass_an_engines() -> None:
    original = token_dispatcher.maybe_move_tensor_to_cpu
    stage = object.__new__(Stage)
    stage.use(None, cast(Any, "copies"))
    assert token_dispatcher.maybe_move_tensor_to_cpu is not original
    stage.use(None)
    assert token_dispatcher.maybe_move_tensor_to_cpu is original
    assert stage.bare_copies is None


def test_a_failure_of_megatrons_engine_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bare_copies.BareCopies", lambda num_bytes: num_bytes)
    stage, path = FakeStage(), tmp_path / "e1.json"
    samples: dict[str, list[Any]] = {name: [] for name in (*WAYS, MEGATRONS)}
    measure(stage, {"microbatches": 1, "bytes_per_microbatch": 0, "samples": samples}, 2, path)
    assert stage.steps == [
        *("off", "off", "on", "on", "copies", "copies", MEGATRONS),
        *2 * ("off", "off", "on", "on", "copies", "copies"),
    ]
    found = json.loads(path.read_text())
    assert found["megatrons_error"] == "RuntimeError: No non-empty chunk found"
    assert {name: len(each) for name, each in found["samples"].items()} == {"off": 2, "on": 2, "copies": 2}
    assert found["bytes_per_microbatch"] == 32
    assert all(found["figures"][f"forward_host_ms_{way}"] > 0 for way in WAYS)
