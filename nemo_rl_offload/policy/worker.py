"""One rank of a policy: what runs inside a Ray actor.

Megatron is imported when the worker is built, not with this module, so that the driver can name the class without
paying for the import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.schema import PolicyConfig

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from nemo_rl_offload.losses.reduction import Normalizers


class PolicyWorker:
    """Trains, scores and samples with this rank's part of the model.

    Every method is called on all ranks with the same arguments, or with this rank's shard of a batch.
    """

    def __init__(
        self, policy: PolicyConfig, model_path: Path, *, seed: int, num_steps: int, keep_reference: bool
    ) -> None:
        from nemo_rl_offload.megatron.affinity import bind

        bind(policy["megatron_cfg"]["cpu_affinity"])  # before there is a CUDA context or host memory to be misplaced
        from nemo_rl_offload.megatron.cpu import install_cpu_support

        install_cpu_support()
        from nemo_rl_offload.megatron.model import build_model, init_process_groups
        from nemo_rl_offload.megatron.offload_interface import exclude_parameters
        from nemo_rl_offload.megatron.offload_setup import install_offloading

        self._policy = policy
        self._model_path = model_path
        init_process_groups(policy, seed)
        self._engine = install_offloading(policy)
        self._model = build_model(policy, model_path, num_steps)
        if self._engine is not None:
            exclude_parameters(self._engine, self._model.modules)
        self._reference: list[torch.Tensor] | None = None
        if keep_reference:
            self._reference = [weight.detach().cpu().clone() for weight in self._parameters()]

    def _parameters(self) -> list[torch.Tensor]:
        return [weight for module in self._model.modules for weight in module.parameters()]

    def train(
        self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any], norm: Normalizers
    ) -> dict[str, float]:
        """One optimizer step on this rank's shard of a global batch, which `norm` counts as a whole."""
        from nemo_rl_offload.losses.registry import build_loss
        from nemo_rl_offload.megatron.train_step import train_step

        metrics = train_step(
            self._model,
            batch,
            build_loss(loss_name, loss_config),
            norm,
            self._policy["train_micro_batch_size"],
            self._policy["generation"]["temperature"],
        )
        self._empty_cache(from_level=1)
        return metrics

    def get_logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """Log-probabilities of this rank's shard, float32 [B, S].

        Megatron changes how tensors are pickled, such that unpickling one imports Megatron: an array travels instead.
        """
        from nemo_rl_offload.megatron.train_step import compute_logprobs

        temperature = self._policy["generation"]["temperature"]
        logprobs = compute_logprobs(self._model, batch, self._policy["logprob_batch_size"], temperature)
        self._empty_cache(from_level=2)
        return logprobs.numpy()

    def get_reference_policy_logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """The same with the start weights, which take the place of the current ones meanwhile."""
        assert self._reference is not None, "built with keep_reference=False"
        current = [weight.detach().cpu().clone() for weight in self._parameters()]
        self._write_weights(self._reference)
        try:
            return self.get_logprobs(batch)
        finally:
            self._write_weights(current)

    def _write_weights(self, values: list[torch.Tensor]) -> None:
        for weight, value in zip(self._parameters(), values, strict=True):
            weight.data.copy_(value)

    def generate(self, prompts: list[list[int]], seed: int, end_id: int) -> list[Response]:
        """Sample one response for each prompt."""
        from nemo_rl_offload.megatron.generation import generate

        responses = generate(
            self._model.modules[0],
            prompts,
            self._policy["generation"],
            batch_size=self._policy["generation_batch_size"],
            end_id=end_id,
            seed=seed,
        )
        self._empty_cache(from_level=2)
        return responses

    def _empty_cache(self, from_level: int) -> None:
        import torch

        if torch.cuda.is_available() and self._policy["megatron_cfg"]["empty_unused_memory_level"] >= from_level:
            torch.cuda.empty_cache()

    def save_checkpoint(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        from nemo_rl_offload.megatron import checkpoint

        checkpoint.save(self._model, folder)

    def load_checkpoint(self, folder: Path) -> None:
        """Read this rank's part of a checkpoint."""
        from nemo_rl_offload.megatron import checkpoint

        checkpoint.load(self._model, folder)

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        from nemo_rl_offload.megatron.model import export_hf

        export_hf(self._model, self._model_path, folder)

    def offload_stats(self) -> dict[str, Any] | None:
        """Totals of this rank's engine; None when offloading is off."""
        return None if self._engine is None else dataclasses.asdict(self._engine.stats())

    def peak_device_bytes(self) -> int | None:
        """Highest device memory that torch has allocated; None on a CPU."""
        import torch

        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

    def shutdown(self) -> None:
        """Leave the process group and free the host arena."""
        import torch.distributed as dist

        if self._engine is not None:
            self._engine.close()
        dist.destroy_process_group()
