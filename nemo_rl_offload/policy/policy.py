"""The driver's handle on a policy: cuts batches into shards for the ranks and puts results together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_offload.batching.batch import Batch, num_samples, select, shard
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.cluster.worker_group import WorkerGroup
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.policy.worker import PolicyWorker


def worker_env(config: PolicyConfig) -> dict[str, str]:
    """Environment variables of the workers: what their engine needs, and the user's `env_vars` over it."""
    cfg = config["megatron_cfg"]
    is_megatron = cfg["activation_offload"]["engine"] == "megatron"
    # Megatron-Core's engine hooks into Transformer Engine's first offloading interface, which is off by default.
    return ({"NVTE_CPU_OFFLOAD_V1": "1"} if is_megatron else {}) | (cfg["env_vars"] or {})


class Policy:
    """A policy on the slots of `cluster`; implements `PolicyInterface`.

    `num_steps` is the number of optimizer steps that the learning-rate schedule spans. With `keep_reference` each rank
    keeps a copy of the start weights in host memory.

    Raises ConfigError when a global batch cannot be cut into whole micro batches over the ranks, or when Megatron
    refuses the configuration; WorkerError when a worker fails.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        config: PolicyConfig,
        model_path: Path,
        end_id: int,
        *,
        seed: int,
        num_steps: int,
        keep_reference: bool,
    ) -> None:
        self._config = config
        self._end_id = end_id
        self.world_size = cluster.world_size
        multiple = self.world_size * config["train_micro_batch_size"]
        if config["train_global_batch_size"] % multiple:
            raise ConfigError(
                f"policy.train_global_batch_size: {config['train_global_batch_size']} is not a multiple of "
                f"train_micro_batch_size x data-parallel ranks = {config['train_micro_batch_size']} x "
                f"{self.world_size} = {multiple}"
            )
        self._workers = WorkerGroup(
            cluster,
            PolicyWorker,
            config,
            model_path.resolve(),
            env=worker_env(config),
            seed=seed,
            num_steps=num_steps,
            keep_reference=keep_reference,
        )

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any]) -> dict[str, float]:
        """Take one optimizer step for each `train_global_batch_size` samples; returns the steps' mean metrics."""
        size = self._config["train_global_batch_size"]
        assert num_samples(batch) % size == 0, "checked with the configuration"
        steps: list[dict[str, float]] = []
        for start in range(0, num_samples(batch), size):
            global_batch = select(batch, slice(start, start + size))
            norm = normalizers(global_batch)
            shards = [(piece, loss_name, loss_config, norm) for piece in shard(global_batch, self.world_size)]
            steps.append(self._workers.run_sharded("train", shards)[0])
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    def get_logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights, float32 [B, S]; position 0 is 0."""
        return self._sharded_logprobs("get_logprobs", batch)

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        """The same under the weights that the run started from."""
        return self._sharded_logprobs("get_reference_policy_logprobs", batch)

    def _sharded_logprobs(self, method: str, batch: Batch) -> Tensor:
        inputs = {key: batch[key] for key in ("input_ids", "input_lengths")}
        shards = [(piece,) for piece in shard(inputs, self.world_size)]
        parts = self._workers.run_sharded(method, shards)
        return torch.from_numpy(np.concatenate(parts))[: num_samples(batch)]

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Response]:
        """Sample one response for each prompt; a function of weights, prompts, `seed` and number of ranks."""
        size = -(-len(prompts) // self.world_size)
        shards = [
            (list(prompts[rank * size : (rank + 1) * size]), seed * self.world_size + rank, self._end_id)
            for rank in range(self.world_size)
        ]
        return [response for part in self._workers.run_sharded("generate", shards) for response in part]

    def save_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into a new folder, which all nodes must share."""
        folder.mkdir(parents=True)
        self._workers.run_all("save_checkpoint", folder.resolve())

    def load_checkpoint(self, folder: Path) -> None:
        """Read what `save_checkpoint` wrote."""
        self._workers.run_all("load_checkpoint", folder.resolve())

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, with the start model's configuration and tokenizer."""
        self._workers.run_all("export_hf", folder.resolve())

    def offload_stats(self) -> dict[str, Any]:
        """Totals of all ranks' engines, with `engine` and `modules` as configured; zeros when offloading is off."""
        cfg = self._config["megatron_cfg"]
        on = cfg["fine_grained_activation_offloading"]
        per_rank = [stats for stats in self._workers.run_all("offload_stats") if stats is not None]
        totals: dict[str, Any] = {
            "engine": cfg["activation_offload"]["engine"] if on else None,
            "modules": list(cfg["offload_modules"] or []) if on else [],
        }
        names = ("bytes_out", "bytes_in", "peak_host_bytes", "host_capacity_bytes", "denied_bytes")
        for name in (*names, "ineffective_bytes", "demand_reloads"):
            totals[name] = sum(stats[name] for stats in per_rank)
        totals["per_module"] = {
            module: {
                name: sum(stats["per_module"].get(module, {}).get(name, 0) for stats in per_rank)
                for name in ("bytes_out", "bytes_in")
            }
            for module in totals["modules"]
        }
        return totals

    def peak_device_bytes(self) -> int | None:
        """Highest device memory of any rank; None on a CPU."""
        peaks = self._workers.run_all("peak_device_bytes")
        return None if None in peaks else max(peaks)

    def shutdown(self) -> None:
        """Kill the workers. May be called twice."""
        self._workers.shutdown()
