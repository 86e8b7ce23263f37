"""What the algorithms share that learn from given answers: SFT and DPO."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from nemo_rl_offload.algorithms.loop import Say, TrainingLoop, left_unmeasured, run_loop, section_of, spec_of
from nemo_rl_offload.algorithms.waiting import waiting
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.schema import DPOConfig, MasterConfig, PolicyConfig, SFTConfig
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.samples import DataCounts, Sample, SampleStream, collate, sample_sets
from nemo_rl_offload.policy.driver import Policy
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.runs.run_files import LoopSummary, Summary


def offline_section(config: MasterConfig) -> SFTConfig | DPOConfig:
    """The section of the algorithm, with the keys that all of this kind have."""
    return section_of(config)


class OfflineLoop(TrainingLoop):
    """A loop over samples; what to do with a batch of them is left to the algorithm."""

    def __init__(
        self,
        config: MasterConfig,
        policy: PolicyInterface,
        samples: tuple[SampleStream, list[Sample], dict[str, DataCounts]],
        pad_id: int,
        run_dir: Path,
    ) -> None:
        self._stream, validation, self._counts = samples
        super().__init__(config, policy, self._stream, num_steps(config, self._stream), run_dir)
        self._pad_id = pad_id
        self._validation_samples = validation[: self._section["max_val_samples"]]
        self._notes = left_unmeasured(config, len(validation))

    def next_batch(self) -> Batch:
        """The next training batch."""
        return collate(self._stream.next_batch(), self._pad_id)

    def validation_batch(self) -> Batch:
        """All validation samples."""
        return collate(self._validation_samples, self._pad_id)

    def notices(self) -> list[str]:
        """As every loop's, and once what validation leaves out."""
        notes, self._notes = self._notes, []
        return [*super().notices(), *notes]

    def summary(self) -> LoopSummary:
        """With the counts of the data."""
        counts = {name: dataclasses.asdict(counts) for name, counts in self._counts.items()}
        return {**super().summary(), "data": counts}


def num_steps(config: MasterConfig, stream: SampleStream) -> int:
    """Steps of a whole run: `max_num_steps`, or fewer where `max_num_epochs` end before."""
    section = offline_section(config)
    most, epochs = int(section["max_num_steps"]), section["max_num_epochs"]
    return min(most, epochs * stream.num_batches) if epochs else most


def run_offline(
    config: MasterConfig,
    run_dir: Path,
    say: Say,
    progress_stream: TextIO | None,
    loop: Callable[..., OfflineLoop],
) -> Summary:
    """Run `loop` as `config` says; other arguments, result and errors as in `run_loop`."""
    policy_config = at_temperature_one(config["policy"])
    seed = section_of(config)["seed"]
    tokenizer, end_ids = load_policy_tokenizer(policy_config, config["data"]["prompt_template"])
    with waiting(say, "Reading data"):
        samples = sample_sets(config, tokenizer, end_ids, seed)

    def build(cluster: VirtualCluster) -> OfflineLoop:
        policy = Policy(
            cluster,
            policy_config,
            resolve_model_path(policy_config["model_name"]),
            end_ids,
            seed=seed,
            num_steps=num_steps(config, samples[0]),
            keep_reference=spec_of(config).keeps_reference(config),
        )
        return loop(config, policy, samples, tokenizer.pad_token_id, run_dir)

    return run_loop(config, run_dir, say, progress_stream, build)


def at_temperature_one(policy: PolicyConfig) -> PolicyConfig:
    """The policy for answers that it did not sample: workers take log-probabilities at the sampling temperature, and
    no engine starts that would generate."""
    return {**policy, "generation": {**policy["generation"], "temperature": 1.0, "backend": "megatron"}}
