"""The host's part of a forward is what it does not wait for."""

import time

import pytest
import torch
from forward_clock import ForwardClock


def test_waits_for_events_are_not_the_hosts_work(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", waits.append)
    clock = ForwardClock()
    with clock.forward():  # begins at 0, waits from 1 to 4, ends at 6
        torch.cuda.Event.synchronize("routing result")  # type: ignore[arg-type]
    assert waits == ["routing result"]
    assert torch.cuda.Event.synchronize == waits.append
    assert clock.take() == {"forward_host_ms": 3000.0}
    assert clock.take() == {}


def test_a_forward_that_raises_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.cuda.Event.synchronize
    clock = ForwardClock()
    with pytest.raises(ValueError, match="broken"), clock.forward():
        raise ValueError("broken")
    assert torch.cuda.Event.synchronize is original
    assert clock.take() == {}
