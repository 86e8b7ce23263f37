"""GDPO's advantages in a run's loop: each of several rewards by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_offload.algorithms.grpo import GRPO
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.environments.interface import UNFINISHED, Score
from nemo_rl_offload.errors import WorkerError
from nemo_rl_offload.losses.advantages import decoupled_advantages


def advantages(scores: list[Score], weights: list[float] | None = None) -> torch.Tensor:
    estimator = {"name": "gdpo", "reward_weights": weights}
    grpo = {"adv_estimator": estimator, "num_generations_per_prompt": 2}
    grpo |= {"normalize_rewards": True, "use_leave_one_out_baseline": False}
    responses: Any = [SimpleNamespace(finished=score is not UNFINISHED) for score in scores]
    loop: Any = object.__new__(GRPO)
    loop.config = {"grpo": grpo, "loss_fn": {}, "data": {"env_name": "function"}}
    batch: Any = {"token_mask": torch.ones(len(scores), 3)}
    found: torch.Tensor = loop._advantages(Rollout([], responses, scores), batch)
    assert found.shape == (len(scores), 3)
    return found[:, 0]


def scored(**parts: float) -> Score:
    return Score(sum(parts.values()), is_correct=True, scorer_error=False, parts=parts)


def test_each_reward_is_compared_by_itself() -> None:
    """Names in the order of the alphabet, whatever the scorer's; a response without rewards has none."""
    scores = [scored(right=1.0, brief=0.0), scored(brief=1.0, right=0.0), scored(right=1.0, brief=1.0), UNFINISHED]
    parts = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    for weights in (None, [3.0, 1.0]):
        expected = decoupled_advantages(
            parts, torch.tensor(weights or [1.0, 1.0]), 2, normalize=True, leave_one_out=False
        )
        torch.testing.assert_close(advantages(scores, weights), expected)
    assert advantages(scores, [3.0, 1.0])[1] > 0 > advantages(scores, [1.0, 3.0])[1]


def test_without_any_finished_response_nothing_is_learned() -> None:
    assert advantages([UNFINISHED] * 4).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("scores", "weights", "said"),
    [
        ([scored(right=1.0)] * 2, None, "compares several rewards, and the environment function returned right"),
        ([Score(1.0, True, False)] * 2, None, "returned none by name"),
        ([scored(a=1.0, b=0.0)] * 2, [1.0] * 3, "3 weights for 2 rewards (a, b)"),
        ([scored(a=1.0, b=0.0), scored(a=1.0)], None, "one response to a prompt a, b, for another a. Return all"),
        ([scored(a=1.0, b=0.0), Score(5.0, True, False)], None, "a prompt a, b, for another none by name."),
    ],
)
def test_what_cannot_be_compared_ends_the_run(scores: list[Score], weights: Any, said: str) -> None:
    with pytest.raises(WorkerError) as caught:
        advantages(scores, weights)
    assert said in str(caught.value)


def test_prompts_may_have_rewards_of_other_names_and_failures_none() -> None:
    failed = Score(0.0, is_correct=False, scorer_error=True)
    masked = Score(0.0, is_correct=False, scorer_error=False, is_masked=True)
    for other in (failed, masked, UNFINISHED):
        scores = [scored(a=1.0, b=0.0), other, scored(c=0.0), scored(c=1.0)]
        assert [each > 0 for each in advantages(scores).tolist()] == [True, False, False, True]
    assert advantages([failed, masked]).tolist() == [0.0, 0.0]


def test_means_of_several_rewards_are_metrics() -> None:
    responses: Any = [Response([1], [0.0], finished=True)] * 2
    prompts: Any = [SimpleNamespace(token_ids=[1])] * 2
    metrics = Rollout(prompts, responses, [scored(a=1.0, b=0.0), scored(a=0.0, b=0.0)]).metrics()
    assert (metrics["reward/a"], metrics["reward/b"], metrics["reward"]) == (0.5, 0.0, 0.5)
