"""A policy and an environment without workers, for the GRPO loop: a few weights, and a record of every call."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.environments.reasoning_gym import Score

END_ID = 2


class FakePolicy:
    """Its one weight is the number of steps taken; its samples and log-probabilities depend on that weight."""

    def __init__(self) -> None:
        self.weight = 0
        self.batches: list[Batch] = []
        self.seeds: list[int] = []
        self.num_prompts: list[int] = []
        self.num_reference_calls = 0

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any]) -> dict[str, float]:
        assert loss_name == "clipped_pg"
        self.batches.append(batch)
        self.weight += 1
        return {"loss": float(batch["advantages"].sum()) + self.weight, "lr": 0.1}

    def get_logprobs(self, batch: Batch) -> Tensor:
        return -0.1 * torch.ones_like(batch["input_ids"], dtype=torch.float32)

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        self.num_reference_calls += 1
        return -0.2 * torch.ones_like(batch["input_ids"], dtype=torch.float32)

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Response]:
        self.seeds.append(seed)
        self.num_prompts.append(len(prompts))
        rng = random.Random(seed + self.weight)
        return [self._response(rng) for _ in prompts]

    def _response(self, rng: random.Random) -> Response:
        finished = rng.random() < 0.8
        tokens = [rng.randrange(100, 120) for _ in range(rng.randrange(0 if finished else 1, 5))]
        tokens += [END_ID] if finished else []
        return Response(tokens, [-0.1] * len(tokens), finished)

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weight").write_text(str(self.weight))

    def load_checkpoint(self, folder: Path) -> None:
        self.weight = int((folder / "weight").read_text())

    def offload_stats(self) -> dict[str, Any]:
        return {"bytes_out": 1000 * self.weight}

    def peak_device_bytes(self) -> None:
        return None


class FakeEnvironment:
    """Rewards of 0, 1/3, 2/3 and 1 that depend on the text alone; 0 for what is not finished."""

    def score(self, entries: Sequence[Any], responses: Sequence[str], finished: Sequence[bool]) -> list[Score]:
        assert len(entries) == len(responses)
        rewards = [sum(map(ord, text)) % 4 / 3 * done for text, done in zip(responses, finished, strict=True)]
        return [Score(reward, reward == 1, False) for reward in rewards]


class Recorder:
    """Takes the place of logger and progress."""

    def __init__(self) -> None:
        self.logged: dict[tuple[int, str], dict[str, float]] = {}

    def log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        assert (step, prefix) not in self.logged
        self.logged[step, prefix] = {
            name: value for name, value in metrics.items() if "timing" not in name and name != "tokens_per_s"
        }

    def update(self, step: int, **fields: float | None) -> None:
        assert set(fields) == {"reward", "loss", "tokens_per_s", "offloaded_bytes"}


def rows(batch: Batch) -> range:
    return range(num_samples(batch))
