"""Generating for later steps in threads: which weights, which prompts, and what a fault becomes."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from patience import PATIENCE_S, eventually

from nemo_rl_offload.algorithms.collector import Collector
from nemo_rl_offload.algorithms.rollout import Rollout


class Numbers:
    """Prompts are numbers in their order."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self, count: int) -> list[int]:
        self.position += count
        return list(range(self.position - count, self.position))

    @property
    def num_passes(self) -> int:
        return self.position // 8

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Engine:
    """Plays a step when it is let go, with the weights of that time."""

    def __init__(self) -> None:
        self.weights = 0
        self.began: dict[int, int] = {}
        self.gates: dict[int, threading.Event] = {}
        self.is_open = False

    def play(self, step: int, prompts: list[int]) -> Rollout:
        self.began[step] = self.weights
        if not self.is_open:
            assert self.gates.setdefault(step, threading.Event()).wait(PATIENCE_S)
        return Rollout(prompts, [], [])  # type: ignore[arg-type]

    def let(self, step: int) -> None:
        self.gates.setdefault(step, threading.Event()).set()

    def refit(self) -> None:
        self.weights += 1


def collector(
    engine: Engine, max_age: int, *, in_flight: bool, max_passes: int | None = None
) -> tuple[Collector, Numbers]:
    data: Any = Numbers()
    play: Any = engine.play
    return Collector(data, 2, play, max_age=max_age, max_passes=max_passes, in_flight=in_flight), data


def until(condition: Callable[[], bool]) -> None:
    assert eventually(condition, period_s=0.001)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_each_step_has_its_prompts_and_weights_of_the_allowed_age(max_age: int, in_flight: bool) -> None:
    engine = Engine()
    engine.is_open = True
    made, data = collector(engine, max_age, in_flight=in_flight)
    made.load_state_dict({"epoch": 0, "position": 6})
    for step in range(1, 7):
        played, age, _ = made.take(step, 6)
        assert played.prompts == [4 + 2 * step, 5 + 2 * step]
        assert age == min(step - 1, max_age)
        assert engine.began[step] <= step - 1
        if not in_flight:
            assert engine.began[step] == step - 1 - age
        assert made.state_dict() == {"epoch": 0, "position": 6 + 2 * step}, "of what was trained"
        if step < 6:
            made.renew(engine.refit)
    assert data.position == 18, "no step beyond the last"


def test_weights_wait_for_what_is_under_way_unless_in_flight() -> None:
    engine = Engine()
    made, _ = collector(engine, 1, in_flight=False)
    engine.let(1)
    made.take(1, 9)
    renewing = threading.Thread(target=made.renew, args=(engine.refit,))
    renewing.start()
    until(lambda: 2 in engine.began)
    time.sleep(0.02)
    assert engine.weights == 0
    engine.let(2)
    renewing.join(PATIENCE_S)
    assert engine.weights == 1
    for step in (3, 4):
        engine.let(step)

    engine = Engine()
    made, _ = collector(engine, 1, in_flight=True)
    engine.let(1)
    made.take(1, 9)
    until(lambda: 2 in engine.began)
    made.renew(engine.refit)
    assert engine.weights == 1
    until(lambda: 3 in engine.began)
    assert engine.began == {1: 0, 2: 0, 3: 1}
    for step in (2, 3):
        engine.let(step)
    _, age, _ = made.take(2, 9)
    assert age == 1


def test_what_waits_is_told_and_a_fault_is_raised_where_responses_are_taken() -> None:
    class Breaks(Engine):
        def play(self, step: int, prompts: list[int]) -> Rollout:
            if step == 4:
                raise ValueError("broken")
            return super().play(step, prompts)

    engine = Breaks()
    engine.is_open = True
    made, _ = collector(engine, 2, in_flight=True)
    made.take(1, 9)
    until(lambda: made._ahead is not None and not made._ahead.num_under_way)
    made.renew(engine.refit)
    _, _, waiting = made.take(2, 9)
    assert [each.prompts for each in waiting] == [[4, 5]]
    made.renew(engine.refit)
    until(lambda: made._failure is not None)
    made.take(3, 9)
    made.renew(engine.refit)
    with pytest.raises(ValueError, match="broken"):
        made.take(4, 9)


def test_a_run_that_starts_its_workers_again_draws_again() -> None:
    engine = Engine()
    engine.is_open = True
    made, data = collector(engine, 2, in_flight=False)
    made.take(1, 9)
    assert data.position == 6
    place = made.state_dict()
    again, data = collector(engine, 2, in_flight=False)
    again.load_state_dict(place)
    assert again.take(2, 9)[0].prompts == [2, 3]


def test_nothing_is_drawn_after_the_last_pass() -> None:
    engine = Engine()
    engine.is_open = True
    made, data = collector(engine, 2, in_flight=False, max_passes=1)
    made.load_state_dict({"epoch": 0, "position": 2})
    passes = []
    for step in (1, 2, 3):
        made.take(step, 9)
        passes.append(made.num_passes)
        made.renew(engine.refit)
    assert passes == [0, 0, 1], "with what was trained, whatever was drawn ahead"
    assert data.position == 8
    again, _ = collector(engine, 2, in_flight=False, max_passes=1)
    again.load_state_dict(made.state_dict())
    assert again.num_passes == 1
