"""Direct Preference Optimization (https://arxiv.org/abs/2305.18290).

Each step raises the log-probability of chosen answers over that of rejected ones, compared with the start model.
"""

from functools import cached_property
from pathlib import Path
from typing import ClassVar, TextIO

from nemo_rl_offload.algorithms.loop import Say, Stopwatch
from nemo_rl_offload.algorithms.offline_loop import OfflineLoop, run_offline
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.runs.run_files import Summary


class DPO(OfflineLoop):
    """The training loop over a policy and data that exist already."""

    validation_metric = "loss"  # at the start every pair is a tie, and accuracy tells how sums were rounded
    progress_metrics: ClassVar[tuple[str, ...]] = ("loss", "accuracy", "tokens_per_s", "offloaded_bytes")

    def update(self, watch: Stopwatch) -> tuple[dict[str, float], int]:
        """One optimizer step."""
        batch = watch.time("reference_logprobs", lambda: self._with_reference(self.next_batch()))
        metrics = watch.time("train", lambda: self.policy.train(batch, *self.loss))
        return metrics, int(batch["input_lengths"].sum())

    def measure(self) -> dict[str, float]:
        """Loss and accuracy of the validation pairs."""
        return self.policy.evaluate(self._validation_pairs, *self.loss)

    @cached_property
    def _validation_pairs(self) -> Batch:
        return self._with_reference(self.validation_batch())

    def _with_reference(self, batch: Batch) -> Batch:
        return batch | {"reference_policy_logprobs": self.policy.get_reference_policy_logprobs(batch)}


def run_dpo(config: MasterConfig, run_dir: Path, say: Say, progress_stream: TextIO | None) -> Summary:
    """Run DPO as `config` says; arguments, result and errors as in `run_loop`."""
    return run_offline(config, run_dir, say, progress_stream, DPO)
