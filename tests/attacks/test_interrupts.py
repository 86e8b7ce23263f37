"""A sample of the interrupts; `python tests/attacks/interrupts.py --every` has all."""

import pytest
import torch
from interrupts import attack

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "cases"),
    [("blocks", 60), ("nested", 40), ("simulated", 80), ("auto", 40), ("megatron", 60), ("transformers", 20)],
)
def test_nothing_is_left_behind_by_an_interrupt(model: str, cases: int) -> None:
    torch.set_num_threads(1)
    faults, outcomes = attack(model, cases, seed=1)
    assert faults == []
    assert outcomes["interrupted"] > cases // 4
    assert outcomes["signals"] + outcomes["storms"] > cases // 8
