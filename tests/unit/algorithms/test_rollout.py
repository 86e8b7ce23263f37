"""Rollouts: which response belongs to which prompt, and the batch made of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.algorithms.rollout import Rollout, rollout
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.data.reasoning_gym import Problem
from nemo_rl_offload.environments.reasoning_gym import Score

PAD_ID = 0


def make_prompt(token_ids: list[int]) -> Prompt:
    return Prompt(Problem("q", "a", {"ids": token_ids}), token_ids)


def make_response(tokens: list[int], finished: bool = True) -> Response:
    return Response(tokens, [-0.5 * token for token in tokens], finished)


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(TOKENS, st.lists(st.integers(1, 9), max_size=5)), min_size=1, max_size=5))
def test_batch(pairs: list[tuple[list[int], list[int]]]) -> None:
    prompts, responses = [make_prompt(p) for p, _ in pairs], [make_response(r) for _, r in pairs]
    batch = Rollout(prompts, responses, [Score(0.0, False, False)] * len(pairs)).batch(PAD_ID)
    width = max(len(p) + len(r) for p, r in pairs)
    assert all(value.shape == (len(pairs), width) for name, value in batch.items() if value.ndim == 2)
    assert batch["sample_mask"].tolist() == [1] * len(pairs)
    for row, (prompt, response) in enumerate(pairs):
        padding = [0] * (width - len(prompt) - len(response))
        assert batch["input_ids"][row].tolist() == prompt + response + padding
        assert batch["input_lengths"][row] == len(prompt) + len(response)
        assert batch["token_mask"][row].tolist() == [0] * len(prompt) + [1] * len(response) + padding
        logprobs = [-0.5 * token for token in response]
        assert batch["generation_logprobs"][row].tolist() == [0] * len(prompt) + logprobs + padding


def test_rollout_repeats_prompts_side_by_side() -> None:
    class Policy:
        def generate(self, prompts: list[list[int]], seed: int) -> list[Response]:
            assert seed == 11
            return [make_response([prompt[0] + 1, index], index % 2 == 0) for index, prompt in enumerate(prompts)]

    class Tokenizer:
        def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
            assert skip_special_tokens
            return [str(sequence) for sequence in sequences]

    class Environment:
        def score(self, entries: list[Any], texts: list[str], finished: list[bool]) -> list[Score]:
            items = zip(entries, texts, finished, strict=True)
            return [Score(entry["ids"][0] + 0.25 * done, text.startswith("[6,"), False) for entry, text, done in items]

    policy: Any = Policy()
    environment: Any = Environment()
    played = rollout(policy, environment, Tokenizer(), [make_prompt([3]), make_prompt([5, 5])], 2, 11)
    assert [prompt.token_ids for prompt in played.prompts] == [[3], [3], [5, 5], [5, 5]]
    assert [response.tokens for response in played.responses] == [[4, 0], [4, 1], [6, 2], [6, 3]]
    assert torch.equal(played.rewards, torch.tensor([3.25, 3.0, 5.25, 5.0]))
    assert played.metrics() == {
        "reward": pytest.approx(4.125),
        "accuracy": 0.5,
        "mean_prompt_length": 1.5,
        "mean_gen_tokens_per_sample": 2.0,
        "unfinished_fraction": 0.5,
        "scorer_errors": 0.0,
    }


def test_join_keeps_the_order() -> None:
    parts = [Rollout([make_prompt([n])], [make_response([n])], [Score(float(n), n == 2, n == 3)]) for n in (1, 2, 3)]
    joined = Rollout.join(parts)
    assert joined.rewards.tolist() == [1.0, 2.0, 3.0]
    assert [prompt.token_ids for prompt in joined.prompts] == [[1], [2], [3]]
    assert joined.metrics()["accuracy"] == pytest.approx(1 / 3)
    assert joined.metrics()["scorer_errors"] == 1.0
