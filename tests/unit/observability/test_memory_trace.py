"""Samples of memory: first and last are there, and a long trace is as long as a short one."""

import time
from itertools import count

import pytest

from nemo_rl_offload.observability import memory_trace
from nemo_rl_offload.observability.memory_trace import MemoryTrace


def test_samples_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trace, "MAX_SAMPLES", 8)
    monkeypatch.setattr(memory_trace, "FIRST_INTERVAL_S", 1e-4)
    numbers = count()
    read = iter(lambda: (next(numbers), 7), None)
    trace = MemoryTrace(lambda: next(read))
    while next(numbers) < 40:
        time.sleep(0.001)
    samples = trace.finish()
    assert 1 <= len(samples) < 8
    assert samples[0]["used_bytes"] < samples[-1]["used_bytes"] or len(samples) == 1
    assert [sample["seconds"] for sample in samples] == sorted(sample["seconds"] for sample in samples)
    assert {sample["offloaded_bytes"] for sample in samples} == {7}
    assert not trace._thread.is_alive()


def test_a_short_step_has_a_sample() -> None:
    (sample,) = MemoryTrace(lambda: (5, 3)).finish()[:1]
    assert (sample["used_bytes"], sample["offloaded_bytes"]) == (5, 3)
