"""Three rewards for an answer between tags."""

import pytest

from nemo_rl_offload.environments.interface import Episode
from nemo_rl_offload.environments.multi_reward import MathMultiReward


@pytest.mark.parametrize(
    ("response", "correctness", "form", "integer"),
    [
        ("<think>so</think>\n<answer>34</answer>", 1, 1, 1),
        ("<think>so\nand so</think>\n<answer> 34\n</answer>", 1, 1, 1),
        ("<think>so</think><answer>34</answer>", 1, 0, 1),
        ("<answer>35</answer>", 0, 0, 1),
        ("<answer>34.0</answer>", 0, 0, 0),
        ("34", 1, 0, 1),
        ("<think></think>\n<answer>1</answer><answer>34</answer>", 1, 0, 1),
        ("The answer is 34", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_rewards(response: str, correctness: int, form: int, integer: int) -> None:
    episode = Episode({"answer": "34"}, [{"role": "assistant", "content": response}])
    (score,) = MathMultiReward().step([episode])
    assert score.parts == {"correctness": correctness, "format": form, "integer": integer}
    assert (score.reward, score.is_correct) == (correctness + form + integer, bool(correctness))
