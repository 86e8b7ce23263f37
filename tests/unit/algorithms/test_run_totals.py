"""Counters of a run that several processes and sets of workers took part in."""

from typing import Any

import pytest
from fakes import FakePolicy

from nemo_rl_offload.algorithms import run_totals as module
from nemo_rl_offload.algorithms.run_totals import Elapsed, added, run_totals

EARLIER: dict[str, Any] = {
    "engine": "native",
    "modules": ["core_attn", "mlp_norm"],
    "bytes_out": 10,
    "peak_host_bytes": 7,
    "stall_out_ms": 1.0,
    "copy_ms": 100.0,
    "overlap": 0.9,
    "per_module": {"core_attn": {"bytes_out": 6}, "mlp_norm": {"bytes_out": 4}},
}
LATER: dict[str, Any] = {
    "engine": "native",
    "modules": ["core_attn"],
    "bytes_out": 30,
    "peak_host_bytes": 5,
    "stall_out_ms": 4.0,
    "copy_ms": 300.0,
    "overlap": 0.5,
    "per_module": {"core_attn": {"bytes_out": 30}},
}


def test_sums_peaks_and_shares() -> None:
    assert added(EARLIER, LATER) == {
        "engine": "native",
        "modules": ["core_attn", "mlp_norm"],
        "bytes_out": 40,
        "peak_host_bytes": 7,
        "stall_out_ms": 5.0,
        "copy_ms": 400.0,
        "overlap": pytest.approx(0.6),
        "per_module": {"core_attn": {"bytes_out": 36}, "mlp_norm": {"bytes_out": 4}},
    }


def test_what_was_not_counted_counts_nothing() -> None:
    nothing = dict.fromkeys(LATER) | {"modules": [], "per_module": {}}
    assert added(nothing, LATER) == added(LATER, nothing) == added(None, LATER) == LATER
    stash = {"needed_capacity_factor": 1.5, "needed_stash_factor": None, "reruns": 2, "peak_bytes": 9}
    more = {"needed_capacity_factor": 1.2, "needed_stash_factor": 2.0, "reruns": 1, "peak_bytes": 12}
    assert added(stash, more) == {
        "reruns": 3,
        "needed_capacity_factor": 1.5,
        "needed_stash_factor": 2.0,
        "peak_bytes": 12,
    }


def test_totals_of_a_policy_beside_those_of_a_checkpoint() -> None:
    policy = FakePolicy()
    policy.weight = 3
    first = run_totals(policy, {}, {"train": 2.0})
    assert (first["offload"]["bytes_out"], first["paged_stash"]) == (3000, None)
    assert first["memory"] == {"peak_device_bytes": None}
    later = run_totals(policy, first, {"train": 3.0, "generation": 1.0})
    assert later["offload"]["bytes_out"] == 6000
    assert later["phase_seconds"] == {"train": 5.0, "generation": 1.0}
    assert run_totals(policy, {"memory": {"peak_device_bytes": 5}}, {})["memory"] == {"peak_device_bytes": 5}


def test_peaks_by_phase_and_host_memory_are_the_most() -> None:
    """The workers of a later process hold what those of an earlier one held."""
    before = {
        "peak_device_bytes_by_phase": {"train": 9, "logprobs": 2},
        "peak_reserved_bytes": 12,
        "host_bytes": {"activations": 4, "optimizer": 7},
    }
    now = {
        "peak_device_bytes_by_phase": {"train": 8, "generation": 3},
        "peak_reserved_bytes": 11,
        "host_bytes": {"activations": 5, "optimizer": 7},
    }
    assert added({"memory": before}, {"memory": now}) == {
        "memory": {
            "peak_device_bytes_by_phase": {"train": 9, "generation": 3, "logprobs": 2},
            "peak_reserved_bytes": 12,
            "host_bytes": {"activations": 5, "optimizer": 7},
        }
    }


@pytest.mark.parametrize("starts", [[7.0], [0.0, 7.0], [7.0, 9.0]])
def test_only_an_earlier_process_adds_time(starts: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    elapsed = Elapsed()
    for seconds in starts:
        now[0] += 1
        elapsed.go_on_from(seconds)
    assert elapsed.seconds == starts[0] + len(starts)
