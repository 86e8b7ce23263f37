"""The driver's handle: how it cuts work for the ranks and puts results together. Workers are plain objects here."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_offload.batching.batch import Batch, num_samples
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.reduction import normalizers, valid_tokens
from nemo_rl_offload.policy import policy as policy_module
from nemo_rl_offload.policy.policy import Policy

WORDS = ("bytes_out", "bytes_in", "peak_host_bytes", "host_capacity_bytes", "denied_bytes", "ineffective_bytes")


class FakeWorker:
    """Computes simple functions of what it receives."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []

    def train(self, batch: Batch, loss_name: str, loss_config: Any, norm: Any) -> dict[str, float]:
        self.calls.append((batch, loss_name, loss_config, norm))
        return {"loss": float(norm.global_valid_tokens), "lr": float(len(self.calls))}

    def get_logprobs(self, batch: Batch) -> np.ndarray[Any, Any]:
        assert set(batch) == {"input_ids", "input_lengths"}
        return -batch["input_ids"].float().numpy()

    def get_reference_policy_logprobs(self, batch: Batch) -> np.ndarray[Any, Any]:
        return self.get_logprobs(batch) - 1

    def generate(self, prompts: list[list[int]], seed: int, end_id: int) -> list[Response]:
        self.calls.append((prompts, seed))
        return [Response([*prompt, end_id], [0.0] * (len(prompt) + 1), True) for prompt in prompts]

    def offload_stats(self) -> dict[str, Any]:
        per_module = {"core_attn": {"bytes_out": 5, "bytes_in": 4}} if self.rank == 0 else {}
        return {**dict.fromkeys(WORDS, 10 + self.rank), "demand_reloads": 1, "per_module": per_module}

    def peak_device_bytes(self) -> int | None:
        return 100 + self.rank


class FakeGroup:
    def __init__(self, cluster: Any, worker_cls: type, *args: Any, **kwargs: Any) -> None:
        self.workers = [FakeWorker(rank) for rank in range(cluster.world_size)]

    def run_all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def run_sharded(self, method: str, shards: list[tuple[Any, ...]]) -> list[Any]:
        return [getattr(worker, method)(*shard) for worker, shard in zip(self.workers, shards, strict=True)]


@pytest.fixture(scope="module")
def make() -> Any:
    """Build a policy over fake workers; returns it and them."""

    def make(world_size: int, *overrides: str) -> tuple[Policy, list[FakeWorker]]:
        changes = ["policy.train_global_batch_size=12", "policy.train_micro_batch_size=2", *overrides]
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", changes)["policy"]
        cluster: Any = SimpleNamespace(world_size=world_size)
        policy = Policy(cluster, config, Path("model"), 9, seed=1, num_steps=1, keep_reference=False)
        group: Any = policy._workers
        return policy, group.workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "WorkerGroup", FakeGroup)
        yield make


Make = Callable[..., tuple[Policy, list[FakeWorker]]]


def make_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(2, 8, (size,), generator=generator)
    return {
        "input_ids": torch.randint(1, 100, (size, 7), generator=generator),
        "input_lengths": lengths,
        "token_mask": (torch.arange(7) < lengths[:, None]).float(),
        "sample_mask": torch.ones(size),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_train_takes_a_step_for_each_global_batch(world_size: int, make: Make) -> None:
    policy, workers = make(world_size)
    batch, loss_config = make_batch(36), {"ratio_clip_min": 0.1}
    metrics = policy.train(batch, "clipped_pg", loss_config)
    steps = [{key: value[start : start + 12] for key, value in batch.items()} for start in (0, 12, 24)]
    counts = [float(valid_tokens(step).sum()) for step in steps]
    assert metrics == {"loss": pytest.approx(sum(counts) / 3), "lr": 2.0}
    for index, step in enumerate(steps):
        shards = [worker.calls[index] for worker in workers]
        assert all(torch.equal(torch.cat([shard[0][key] for shard in shards]), step[key]) for key in step)
        assert all(num_samples(shard[0]) == 12 // world_size for shard in shards)
        assert all(shard[1:] == ("clipped_pg", loss_config, normalizers(step)) for shard in shards)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 6]))
def test_logprobs_come_back_in_order(size: int, world_size: int, make: Make) -> None:
    policy, _ = make(world_size)
    batch = make_batch(size)
    assert torch.equal(policy.get_logprobs(batch), -batch["input_ids"].float())
    assert torch.equal(policy.get_reference_policy_logprobs(batch), -batch["input_ids"].float() - 1)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 9), world_size=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 5))
def test_generation_comes_back_in_order(size: int, world_size: int, seed: int, make: Make) -> None:
    policy, workers = make(world_size)
    prompts = [[index] * (index + 1) for index in range(size)]
    responses = policy.generate(prompts, seed)
    assert [response.tokens for response in responses] == [[*prompt, 9] for prompt in prompts]
    policy.generate(prompts, seed + 1)
    seeds = [call[1] for worker in workers for call in worker.calls]
    assert len(set(seeds)) == 2 * world_size


@pytest.mark.parametrize(("world_size", "micro"), [(5, 2), (2, 4), (1, 5)])
def test_a_global_batch_that_cannot_be_cut(world_size: int, micro: int, make: Make) -> None:
    with pytest.raises(ConfigError, match=f"12 is not a multiple .* = {micro} x {world_size} = {micro * world_size}"):
        make(world_size, f"policy.train_micro_batch_size={micro}")


def test_offload_stats_of_all_ranks(make: Make) -> None:
    policy, _ = make(2, "policy.megatron_cfg.offload_modules=[core_attn,mlp_norm]")
    stats = policy.offload_stats()
    assert (stats["engine"], stats["modules"]) == ("native", ["core_attn", "mlp_norm"])
    assert {stats[word] for word in WORDS} == {21}
    assert stats["demand_reloads"] == 2
    assert stats["per_module"] == {
        "core_attn": {"bytes_out": 5, "bytes_in": 4},
        "mlp_norm": {"bytes_out": 0, "bytes_in": 0},
    }


def test_offload_stats_without_offloading(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, _ = make(2, "policy.megatron_cfg.fine_grained_activation_offloading=false")
    monkeypatch.setattr(FakeWorker, "offload_stats", lambda self: None)
    stats = policy.offload_stats()
    assert (stats["engine"], stats["modules"], stats["per_module"]) == (None, [], {})
    assert {stats[word] for word in WORDS} == {0}


@pytest.mark.parametrize(("peaks", "expected"), [([3, 8], 8), ([None, None], None)])
def test_peak_device_bytes(
    peaks: list[int | None], expected: int | None, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = make(2)
    monkeypatch.setattr(FakeWorker, "peak_device_bytes", lambda self: peaks[self.rank])
    assert policy.peak_device_bytes() == expected
