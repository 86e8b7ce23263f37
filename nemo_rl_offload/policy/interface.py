"""What an algorithm asks of a policy. Batches are dictionaries of CPU tensors, as in `batching.batch`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.response import Response


class PolicyInterface(Protocol):
    """A language model spread over workers."""

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, Any]) -> dict[str, float]:
        """Take one optimizer step for each `train_global_batch_size` samples; returns the steps' mean metrics."""

    def get_logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights, float32 [B, S]; position 0 is 0."""

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        """The same under the weights that the run started from."""

    def generate(self, prompts: Sequence[list[int]], seed: int) -> list[Response]:
        """Sample one response for each prompt."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer and schedule into a new folder."""

    def load_checkpoint(self, folder: Path) -> None:
        """Read what `save_checkpoint` wrote."""

    def offload_stats(self) -> dict[str, Any]:
        """Totals of the offload engines of all ranks."""

    def peak_device_bytes(self) -> int | None:
        """Highest device memory of any rank; None on a CPU."""
