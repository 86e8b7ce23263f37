"""What an algorithm asks of a policy. Batches are dictionaries of CPU tensors, as in `batching.batch`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.generation.interface import Responds
from nemo_rl_offload.observability.step_profile import Span
from nemo_rl_offload.paged_stash.stats import StashStats
from nemo_rl_offload.runs.manifest import Manifest
from nemo_rl_offload.runs.run_files import MemorySample, MemoryTotals, OffloadTotals


class PolicyInterface(Responds, Protocol):
    """A language model spread over workers. Streams of responses are by the weights of the last `refit`."""

    num_refits: int
    """How often the generator has been given weights: the newest of `Response.versions`."""

    def train(self, batch: Batch, loss_name: str, loss_config: Mapping[str, object]) -> dict[str, float]:
        """Take one optimizer step for each `train_global_batch_size` samples; returns the steps' mean metrics."""

    def evaluate(self, batch: Batch, loss_name: str, loss_config: Mapping[str, object]) -> dict[str, float]:
        """The loss and its metrics over a batch of any size, without a step."""

    def get_logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of every token under the current weights, float32 [B, S]; position 0 is 0."""

    def get_reference_policy_logprobs(self, batch: Batch) -> Tensor:
        """The same under the weights that the run started from."""

    def get_topk_logits(self, batch: Batch, k: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The `k` largest logits that predict each token, over temperature, and their ids, [B, S, K]; position 0 is 0.

        Only the first `num_tokens` of the vocabulary count.
        """

    def hand_back_memory(self) -> None:
        """Leave what the workers do not use of their devices to others."""

    def refit(self) -> None:
        """Give the trained weights to the generator, where it does not have them."""

    def start_checkpoint(self, folder: Path, *, in_background: bool, with_optimizer: bool = True) -> None:
        """Begin to write weights, schedule, random numbers and, if it is wanted, the optimizer into a new folder.

        In the background, training may go on before `finish_checkpoint`.
        """

    def checkpoint_is_written(self) -> bool:
        """Whether `finish_checkpoint` would not have to wait."""

    def finish_checkpoint(self) -> Manifest:
        """Complete what `start_checkpoint` began; returns the files."""

    def load_checkpoint(self, folder: Path, manifest: Manifest) -> None:
        """Read what was written, with these files."""

    def load_start_weights(self, folder: Path, manifest: Manifest) -> None:
        """Begin with the weights of a checkpoint with these files; a reference model has them too."""

    def offload_stats(self) -> OffloadTotals:
        """Totals of the offload engines of all ranks."""

    def idle_modules(self) -> list[str]:
        """Which listed modules have offloaded nothing so far, and why."""

    def start_seconds(self) -> dict[str, float]:
        """What building the workers took, by part."""

    def notices(self) -> list[str]:
        """What the workers have warned of since the last call."""

    def paged_stash_stats(self) -> StashStats | None:
        """Steps that ran again because the experts' buffers or stash were too small, and sizes; None without limits."""

    def memory(self) -> MemoryTotals:
        """Highest device memory of any rank, and host memory of all, by what waits there."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    def trained_flops(self) -> float | None:
        """Floating-point operations of all passes for training so far; None for a model of unknown shape."""

    def peak_flops_per_s(self) -> float | None:
        """Peak rate of all devices together; None where one is not known."""

    def start_profile(self, *, all_ranks: bool) -> None:
        """Begin to record the first worker that trains, or all of them."""

    def finish_profile(self, folder: Path, step: int, spans: Sequence[Span]) -> list[str]:
        """Write what was recorded into the folder, with the phases of the step; returns what could not be written."""

    def start_memory_trace(self) -> None:
        """Begin to sample the memory of the first worker."""

    def finish_memory_trace(self) -> list[MemorySample]:
        """The samples since."""

    def shutdown(self) -> None:
        """End the workers."""
