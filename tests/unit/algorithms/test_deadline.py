"""When a run ends by the clock: a step of average length and the last checkpoint have to fit."""

from types import SimpleNamespace
from typing import Any

from nemo_rl_offload.algorithms.loop import Deadline


def test_the_last_checkpoint_has_its_time() -> None:
    clock: Any = SimpleNamespace(of_this_process_s=0.0)
    deadline = Deadline("00:00:01:40", clock)  # 100 s
    deadline.step_begins()
    clock.of_this_process_s = 40.0
    assert not deadline.is_before_next_step(), "another step ends at 80 s"
    deadline.save_begins()
    clock.of_this_process_s = 45.0
    deadline.save_ends()
    deadline.step_begins()
    clock.of_this_process_s = 55.0
    assert not deadline.is_before_next_step(), "82.5 s, and 5 s of a checkpoint"
    deadline.save_begins()
    clock.of_this_process_s = 70.0
    deadline.save_ends()
    deadline.step_begins()
    clock.of_this_process_s = 72.0
    assert deadline.is_before_next_step(), "24 s of a step, and 15 s of a checkpoint"
    deadline.save_begins()
    deadline.save_ends()
    assert not deadline.is_before_next_step(), "96 s without one"


def test_without_a_limit_there_is_no_end() -> None:
    clock: Any = SimpleNamespace(of_this_process_s=1e9)
    deadline = Deadline(None, clock)
    deadline.step_begins()
    assert not deadline.is_before_next_step()
