"""Responses to prompts, and what an environment thinks of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_offload.batching.batch import Batch, pad_sequences
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.prompts import Prompt
from nemo_rl_offload.environments.reasoning_gym import EnvironmentPool, Score
from nemo_rl_offload.policy.interface import PolicyInterface


@dataclass(frozen=True)
class Rollout:
    """Prompts, each repeated as often as it was answered, with responses and scores in the same order."""

    prompts: list[Prompt]
    responses: list[Response]
    scores: list[Score]

    @classmethod
    def join(cls, parts: Sequence["Rollout"]) -> "Rollout":
        """One rollout of all parts, in order."""
        return cls(
            [prompt for part in parts for prompt in part.prompts],
            [response for part in parts for response in part.responses],
            [score for part in parts for score in part.scores],
        )

    @property
    def rewards(self) -> torch.Tensor:
        """float32 [B]."""
        return torch.tensor([score.reward for score in self.scores])

    def metrics(self) -> dict[str, float]:
        """Means over the responses, under NeMo-RL's names where it has them."""
        count = len(self.scores)
        return {
            "reward": sum(score.reward for score in self.scores) / count,
            "accuracy": sum(score.is_correct for score in self.scores) / count,
            "mean_prompt_length": sum(len(prompt.token_ids) for prompt in self.prompts) / count,
            "mean_gen_tokens_per_sample": sum(len(response.tokens) for response in self.responses) / count,
            "unfinished_fraction": sum(not response.finished for response in self.responses) / count,
            "scorer_errors": float(sum(score.scorer_error for score in self.scores)),
        }

    def batch(self, pad_id: int) -> Batch:
        """`input_ids`, `input_lengths`, `token_mask` (1 on response tokens), `sample_mask`, `generation_logprobs`."""
        sequences = [p.token_ids + r.tokens for p, r in zip(self.prompts, self.responses, strict=True)]
        batch = pad_sequences(sequences, pad_id)
        batch["sample_mask"] = torch.ones(len(sequences))
        batch["token_mask"] = torch.zeros_like(batch["input_ids"], dtype=torch.float32)
        batch["generation_logprobs"] = torch.zeros_like(batch["token_mask"])
        for row, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            begin, end = len(prompt.token_ids), len(sequences[row])
            batch["token_mask"][row, begin:end] = 1
            batch["generation_logprobs"][row, begin:end] = torch.tensor(response.logprobs)
        return batch


def rollout(
    policy: PolicyInterface,
    environment: EnvironmentPool,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    num_generations: int,
    seed: int,
) -> Rollout:
    """Sample `num_generations` responses to each prompt, next to each other, and have them scored."""
    repeated = [prompt for prompt in prompts for _ in range(num_generations)]
    responses = policy.generate([prompt.token_ids for prompt in repeated], seed)
    texts = tokenizer.batch_decode([response.tokens for response in responses], skip_special_tokens=True)
    scores = environment.score(
        [prompt.problem.entry for prompt in repeated], texts, [response.finished for response in responses]
    )
    return Rollout(repeated, responses, scores)
