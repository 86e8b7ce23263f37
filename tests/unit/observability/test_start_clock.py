"""What a start takes: parts add up, and of ranks the slowest counts."""

import pytest

from nemo_rl_offload.observability.start_clock import StartClock, slowest, told


def test_parts_add_up_in_the_order_in_which_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StartClock()
    for name in ("imports", "weights", "imports"):
        with clock.part(name):
            pass
    assert clock.seconds == {"imports": 6.0, "weights": 1.0}
    assert list(clock.seconds) == ["imports", "weights"]


def test_a_part_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = StartClock()
    with pytest.raises(ValueError, match="no"), clock.part("weights"):
        raise ValueError("no")
    assert clock.seconds == {"weights": 2.0}


def test_the_slowest_rank_of_each_part() -> None:
    assert slowest([{"imports": 1.0, "weights": 5.0}, {"imports": 2.0, "optimizer": 3.0}]) == {
        "imports": 2.0,
        "weights": 5.0,
        "optimizer": 3.0,
    }
    assert slowest([]) == {}


def test_what_took_less_than_a_second_is_not_said() -> None:
    assert told({"imports": 8.06, "weights": 0.99, "optimizer": 1.0}) == "imports 8.1 s, optimizer 1.0 s."
    assert told({"weights": 0.99}) == ""
