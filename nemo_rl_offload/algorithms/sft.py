"""Supervised fine-tuning: the negative log-likelihood of the assistant's turns, averaged over all their tokens."""

from pathlib import Path
from typing import TextIO

from nemo_rl_offload.algorithms.loop import Say, Stopwatch
from nemo_rl_offload.algorithms.offline_loop import OfflineLoop, run_offline
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.runs.run_files import Summary


class SFT(OfflineLoop):
    """The training loop over a policy and data that exist already."""

    validation_metric = "loss"

    def update(self, watch: Stopwatch) -> tuple[dict[str, float], int]:
        """One optimizer step."""
        batch = self.next_batch()
        metrics = watch.time("train", lambda: self.policy.train(batch, *self.loss))
        return metrics, int(batch["input_lengths"].sum())

    def measure(self) -> dict[str, float]:
        """The loss of the validation samples."""
        return self.policy.evaluate(self.validation_batch(), *self.loss)


def run_sft(config: MasterConfig, run_dir: Path, say: Say, progress_stream: TextIO | None) -> Summary:
    """Run SFT as `config` says; arguments, result and errors as in `run_loop`."""
    return run_offline(config, run_dir, say, progress_stream, SFT)
