"""Long waits are said with their time; short ones are not."""

import time

import pytest

from nemo_rl_offload.algorithms import waiting as module
from nemo_rl_offload.algorithms.waiting import waiting


def test_a_long_wait_is_said_while_it_lasts_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    said: list[str] = []
    with waiting(said.append, "Loading", worth_saying_s=0.1):
        time.sleep(0.3)
    assert said[0] == "Loading"
    assert said[1] == "Loading: 0:00:00 so far"
    assert said[-1] == "Loading: done in 0:00:00."
    num_said = len(said)
    time.sleep(0.1)
    assert len(said) == num_said, "nothing is told of what has ended"


def test_a_short_wait_ends_without_a_word_and_so_does_one_that_fails() -> None:
    said: list[str] = []
    with waiting(said.append, "Reading"):
        pass
    with waiting(said.append, "The step", begins=False):
        pass
    with pytest.raises(ValueError, match="bad"), waiting(said.append, "Failing", worth_saying_s=0):
        raise ValueError("bad")
    assert said == ["Reading", "Failing"]
