"""An environment for `env.function.path`: a wrong answer is told, and the question asked once more."""

from collections.abc import Mapping, Sequence
from typing import Any


def second_try(
    messages: Sequence[Mapping[str, str]], entry: Mapping[str, Any], late_reward: float = 0.5
) -> dict[str, Any]:
    """Score the last message: 1 for a right first answer, `late_reward` for a right later one, 0 for a wrong one."""
    answer = messages[-1]["content"].strip()
    is_right = answer == entry["answer"]
    is_first = len(messages) == 2
    return {
        "reward": (1.0 if is_first else late_reward) if is_right else 0.0,
        "is_correct": is_right,
        "observation": None if is_right else f"\nNo. {messages[0]['content'].strip()}\n",
    }
