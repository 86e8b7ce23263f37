"""What the experiments share, and E1's figures."""

import pytest
from common import environment, in_turn, medians, timed
from deepseek_layers import derive


def test_variants_take_turns_after_the_rounds_that_warm_up() -> None:
    turns = list(in_turn(["off", "on"], 2, num_warmup_rounds=1))
    assert turns == [(-1, "off"), (-1, "on"), (0, "off"), (0, "on"), (1, "off"), (1, "on")]


def test_medians_say_how_far_times_are_apart() -> None:
    found = medians([{"ms": 10.0, "bytes_out": 5}, {"ms": 12.0, "bytes_out": 5}, {"ms": 11.0, "bytes_out": 8}])
    assert found == {"ms": 11.0, "bytes_out": 5, "ms_spread": pytest.approx(2 / 11)}


def test_a_timed_step_runs_once() -> None:
    calls = []
    assert timed(lambda: calls.append(1)).keys() == {"ms", "peak_allocated_bytes", "peak_reserved_bytes"}
    assert calls == [1]


def test_the_environment_names_device_versions_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    found = environment()
    assert found["commit"] == "abc"
    assert found["versions"]["torch"]
    assert found["host"]["memory_bytes"] > 0
    assert found["command"][0] == "python"


def test_e1_counts_the_bytes_of_four_microbatches_as_alive() -> None:
    memory = {"peak_reserved_bytes": 120.0, "bytes_out": 0.0, "stall_in_ms": 0.0, "stall_out_ms": 0.0}
    off = memory | {"ms": 100.0, "peak_allocated_bytes": 100.0}
    on = memory | {"ms": 101.0, "peak_allocated_bytes": 82.0, "bytes_out": 40.0, "stall_out_ms": 0.5}
    copies = memory | {"ms": 100.8, "peak_allocated_bytes": 107.0}
    figures = derive({"off": [off], "on": [on], "copies": [copies]}, num_microbatches=8, activation_bytes=20)
    assert figures["throughput_lost_percent"] == pytest.approx(100 / 101)
    assert figures["throughput_lost_to_copies_percent"] == pytest.approx(80 / 100.8)
    assert figures["offloaded_bytes_alive_at_the_peak"] == 20
    assert figures["offloaded_share_of_activations"] == 0.25
    assert figures["saved_of_offloaded"] == pytest.approx(0.9)
    assert figures["saved_of_peak_percent"] == pytest.approx(18.0)
    assert figures["stall_out_ms"] == 0.5


def test_e1_holds_megatrons_engine_against_the_same_bytes() -> None:
    sample = {"peak_reserved_bytes": 90.0, "bytes_out": 0.0, "stall_in_ms": 0.0, "stall_out_ms": 0.0}
    off = sample | {"ms": 100.0, "peak_allocated_bytes": 100.0}
    on = sample | {"ms": 101.0, "peak_allocated_bytes": 82.0, "bytes_out": 40.0}
    megatrons = sample | {"ms": 125.0, "peak_allocated_bytes": 90.0}
    samples = {"off": [off], "on": [on], "copies": [off]}
    assert not [key for key in derive(samples, num_microbatches=8, activation_bytes=0) if key.startswith("megatrons")]
    figures = derive(samples | {"megatron": [megatrons]}, num_microbatches=8, activation_bytes=0)
    assert figures["megatrons_throughput_lost_percent"] == pytest.approx(20)
    assert figures["megatrons_saved_of_offloaded"] == pytest.approx(0.5)
    assert figures["throughput_lost_percent"] == pytest.approx(100 / 101)
