"""When a step runs again, what is put back, and what is said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_offload.paged_stash.rerun import Capacity, StepGuard

DEVICE = torch.device("cpu")


class Step:
    """An attempt that needs `rows` of the buffers, and changes a state."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity, self.rows, self.state = capacity, 0, 0
        self.limits: list[bool] = []

    def __call__(self) -> int:
        self.limits.append(self.capacity.is_limited)
        self.state += 1
        return self.capacity.rows(torch.tensor([self.rows]), 10, is_training=True)

    def save(self) -> Callable[[], None]:
        state = self.state

        def put_back() -> None:
            self.state = state

        return put_back


def make(reduce: Callable[[Tensor], None] = lambda values: None) -> tuple[StepGuard, Step]:
    capacity = Capacity(1.5, DEVICE)
    step = Step(capacity)
    return StepGuard(capacity, None, save=step.save, reduce=reduce), step


def test_a_step_that_fits_runs_once() -> None:
    guard, step = make()
    step.rows = 15
    assert guard.run(step) == 15
    assert (step.limits, step.state, guard.metrics()) == ([True], 1, {"paged_stash/reruns": 0.0})


def test_two_steps_in_a_row_that_do_not_fit_run_again_from_the_same_state(caplog: pytest.LogCaptureFixture) -> None:
    guard, step = make()
    for number, rows in enumerate((16, 20)):
        step.rows = rows
        assert guard.run(step) == rows
        assert step.state == number + 1
        assert guard.metrics() == {"paged_stash/reruns": 1.0}
    assert step.limits == [True, False, True, False]
    step.rows = 9
    assert guard.run(step) == 15
    assert (guard.counts.steps, guard.counts.reruns, guard.counts.over_budget) == (3, 2, 2)
    assert (
        "(2 of 2), because the experts' buffers were too small; to avoid it, set moe_expert_rank_capacity_factor: 2.1"
        in (caplog.text)
    )


def test_a_step_runs_again_when_another_rank_does_not_fit() -> None:
    calls: list[Any] = []

    def reduce(values: Tensor) -> None:
        calls.append(values.tolist())
        values[1] = 1.0

    guard, step = make(reduce)
    step.rows = 3
    guard.run(step)
    assert step.limits == [True, False]
    assert calls[0] == [0.0, 0.0, 0.0]
    assert guard.counts.over_budget == 1


def test_outside_of_training_there_are_no_limits() -> None:
    capacity = Capacity(1.5, DEVICE)
    assert capacity.rows(torch.tensor([99]), 10, is_training=False) == 99
    assert not capacity.is_over()
    assert capacity.needed_factor() == 0.0


def test_stats() -> None:
    guard, step = make()
    step.rows = 12
    guard.run(step)
    stats = guard.stats()
    assert stats["needed_capacity_factor"] == pytest.approx(1.2)
    assert (stats["steps"], stats["needed_stash_factor"]) == (1, None)
