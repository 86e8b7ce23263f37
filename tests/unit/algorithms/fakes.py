"""A policy and an environment without workers, for the loops: a few weights, and a record of every call."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.algorithms.loop import OFFLOAD_COUNTERS
from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.environments.interface import Episode, Score
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.runs.manifest import Manifest, check_contents, file_digest
from nemo_rl_offload.runs.run_files import MemorySample, MemoryTotals

END_ID = 2
PROGRESS = {"loss", "tokens_per_s", "offloaded_bytes", "reward", "accuracy"}


class FakePolicy:
    """Its one weight is the number of steps taken; its samples and log-probabilities depend on that weight."""

    def __init__(self) -> None:
        self.weight = self.loaded_weight = self.num_refits = self.start_weight = 0
        self.batches: list[Batch] = []
        self.seeds: list[int] = []
        self.samplings: list[Sampling] = []
        self.num_prompts: list[int] = []
        self.num_reference_calls = 0
        self.losses: list[tuple[str, Mapping[str, Any]]] = []
        self.evaluated: list[Batch] = []
        self.is_shut_down = False
        self.folder: Path | None = None
        self.num_traces = 0
        self.profiled: list[bool] = []
        self.profiles: dict[Path, Sequence[Any]] = {}
        self.cannot_write: list[str] = []
        self.texts: list[str] = []
        """What the workers have warned of."""
        self.idle: list[str] = []
        self.skipped: set[int] = set()
        """Steps of which the policy skips the update."""

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any]) -> dict[str, float]:
        self.batches.append(batch)
        self.losses.append((loss_name, loss_config))
        self.weight += 1
        signal = batch["advantages"] if "advantages" in batch else batch["token_mask"]
        skipped = float(self.weight in self.skipped)
        return {"loss": float(signal.sum()) + self.weight, "accuracy": 0.5, "lr": 0.1, "skipped_updates": skipped}

    def evaluate(self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any]) -> dict[str, float]:
        self.evaluated.append(batch)
        return {"loss": 10.0 - self.weight, "accuracy": 0.1 * self.weight}

    def get_topk_logits(self, batch: Batch, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        shape = (*batch["input_ids"].shape, k)
        return torch.full(shape, float(num_tokens)), torch.zeros(shape, dtype=torch.int64)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def get_logprobs(self, batch: Batch) -> Tensor:
        return -0.1 * torch.ones_like(batch["input_ids"], dtype=torch.float32)

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        self.num_reference_calls += 1
        return -0.2 * torch.ones_like(batch["input_ids"], dtype=torch.float32)

    def refit(self) -> None:
        self.num_refits += 1

    def open_stream(self, sampling: Sampling) -> None:
        """It answers batches."""

    def generate(
        self, prompts: Sequence[list[int]], seed: int, sampling: Sampling, told: Any, places: Sequence[int]
    ) -> list[Response]:
        assert list(places) == sorted(set(places))
        assert len(places) == len(prompts)
        if told is not None:
            told(Generated(len(prompts) // 2, 3 * len(prompts)))
        self.seeds.append(seed)
        self.samplings.append(sampling)
        self.num_prompts.append(len(prompts))
        rng = random.Random(seed + self.weight)
        return [self._response(rng) for _ in prompts]

    def _response(self, rng: random.Random) -> Response:
        finished = rng.random() < 0.8
        tokens = [rng.randrange(100, 120) for _ in range(rng.randrange(0 if finished else 1, 5))]
        tokens += [END_ID] if finished else []
        return Response(tokens, [-0.1] * len(tokens), finished)

    def start_checkpoint(self, folder: Path, *, in_background: bool, with_optimizer: bool) -> None:
        assert self.folder is None, "one at a time"
        self.folder, self.polls_left = folder, 2 if in_background else 0
        folder.mkdir(parents=True)
        self.weight_to_save = self.weight

    def checkpoint_is_written(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def finish_checkpoint(self) -> Manifest:
        assert self.folder is not None
        (self.folder / "weight").write_text(str(self.weight_to_save))
        digest, self.folder = file_digest(self.folder / "weight"), None
        return {"weight": digest}

    def load_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        check_contents(folder, manifest, ["weight"])
        self.weight = self.loaded_weight = int((folder / "weight").read_text())

    def load_start_weights(self, folder: Path, manifest: Manifest) -> None:
        self.load_checkpoint(folder, manifest)
        self.start_weight = self.weight

    def offload_stats(self) -> dict[str, Any]:
        zeros = dict.fromkeys((*OFFLOAD_COUNTERS, "peak_host_bytes"), 0)
        named = {"engine": "native", "modules": [], "per_module": {}}
        return zeros | named | {"bytes_out": 1000 * (self.weight - self.loaded_weight)}

    def idle_modules(self) -> list[str]:
        return [f"{name} after {self.weight} steps" for name in self.idle]

    def start_seconds(self) -> dict[str, float]:
        return {"imports": 2.5, "weights": 0.5}

    def notices(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts

    world_size = 2

    def trained_flops(self) -> float:
        return 6e12 * self.weight

    def peak_flops_per_s(self) -> float:
        return 1e15

    def start_profile(self, *, all_ranks: bool) -> None:
        self.profiled.append(all_ranks)

    def finish_profile(self, folder: Path, step: int, spans: Sequence[Any]) -> list[str]:
        self.profiles[folder / str(step)] = spans
        return self.cannot_write

    def start_memory_trace(self) -> None:
        self.num_traces += 1

    def finish_memory_trace(self) -> list[MemorySample]:
        return [{"seconds": 0.0, "used_bytes": 5, "offloaded_bytes": 3}]

    def paged_stash_stats(self) -> None:
        return None

    def hand_back_memory(self) -> None:
        """There is no device."""

    def memory(self) -> MemoryTotals:
        return {"peak_device_bytes": None}


class FakeEnvironment:
    """Rewards of 0, 1/3, 2/3 and 1 that depend on the text alone; 0 for what is not finished."""

    is_shut_down = False
    texts: Sequence[str] = ()
    """What scorers have failed on."""

    def shutdown(self) -> None:
        self.is_shut_down = True

    def notices(self) -> Sequence[str]:
        texts, self.texts = self.texts, ()
        return texts

    def step(self, episodes: Sequence[Episode]) -> list[Score]:
        rewards = [(END_ID + sum(map(ord, each.messages[-1]["content"]))) % 4 / 3 * each.finished for each in episodes]
        return [Score(reward, reward == 1, False) for reward in rewards]


class Recorder:
    """Takes the place of logger and progress."""

    def __init__(self) -> None:
        self.logged: dict[tuple[int, str], dict[str, float]] = {}
        self.notes: list[str] = []
        self.shown: list[str] = []
        self.progress: list[tuple[int, int, int]] = []

    def log(self, metrics: Mapping[str, float], step: int, prefix: str) -> None:
        assert (step, prefix) not in self.logged
        self.logged[step, prefix] = {
            name: value
            for name, value in metrics.items()
            if "timing" not in name and "per_s" not in name and name != "train_mfu"
        }

    def notices(self) -> list[str]:
        return []

    def close(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def generating(self, num_done: int, num_responses: int, num_tokens: int, seconds: float) -> None:
        assert seconds >= 0
        self.progress.append((num_done, num_responses, num_tokens))

    def generated(self) -> None: ...

    def show(self, text: str) -> None:
        self.shown.append(text)

    def update(self, step: int, **fields: float | None) -> None:
        assert {"loss", "tokens_per_s", "offloaded_bytes"} <= set(fields) <= PROGRESS


def rows(batch: Batch) -> range:
    return range(num_samples(batch))
