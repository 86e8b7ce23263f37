"""What the algorithms share that let the policy answer problems: GRPO and distillation."""

from pathlib import Path
from typing import ClassVar, cast

from nemo_rl_offload.algorithms.loop import TrainingLoop, section_of
from nemo_rl_offload.algorithms.rollout import Limits, Rollout, rollout
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.config.schema import DistillationConfig, GRPOConfig, MasterConfig, PolicyConfig
from nemo_rl_offload.data.prompts import Prompt, TrainingPrompts
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.environments.pool import EnvironmentPool
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.runs.run_files import LoopSummary


def rollout_section(config: MasterConfig) -> GRPOConfig | DistillationConfig:
    """The section of the algorithm that `config` is for, which generates."""
    return cast("GRPOConfig | DistillationConfig", section_of(config))


class RolloutLoop(TrainingLoop):
    """A loop over prompts; validation is the share of problems solved."""

    validation_metric = "accuracy"
    progress_metrics: ClassVar[tuple[str, ...]] = ("reward", "loss", "tokens_per_s", "offloaded_bytes")

    def __init__(
        self,
        config: MasterConfig,
        policy: PolicyInterface,
        environment: EnvironmentPool,
        tokenizer: Tokenizer,
        prompts: tuple[TrainingPrompts, list[Prompt]],
        run_dir: Path,
    ) -> None:
        self._train_prompts, self._validation_prompts = prompts
        self._rollouts = rollout_section(config)
        super().__init__(config, policy, self._train_prompts, self._rollouts["max_num_steps"], run_dir)
        self._environment = environment
        self._tokenizer = tokenizer

    def measure(self) -> dict[str, float]:
        """Sample one response to each validation prompt, at the training temperature."""
        prompts = self._validation_prompts[: self._rollouts["max_val_samples"]]
        size = self._rollouts["val_batch_size"]
        parts = [
            self._rollout(prompts[start : start + size], 1, 2 * start + 1) for start in range(0, len(prompts), size)
        ]
        return Rollout.join(parts).metrics()

    def notices(self) -> list[str]:
        """What the workers and the environment have warned of since the last call."""
        return [*super().notices(), *self._environment.notices()]

    def summary(self) -> LoopSummary:
        """With the last step's mean reward."""
        summary = super().summary()
        summary["train"]["reward"] = self.train_metrics.get("reward")
        return summary

    def close(self) -> None:
        """End the workers and the environment."""
        super().close()
        self._environment.shutdown()

    def _rollout(self, prompts: list[Prompt], num_generations: int, stream: int) -> Rollout:
        """Even streams are for training, odd ones for validation: neither draws the other's random numbers."""
        seed = self.seed * 1_000_003 + stream
        policy_config = self.config["policy"]
        return rollout(
            self.policy,
            self._environment,
            self._tokenizer,
            prompts,
            num_generations,
            seed,
            template=self.config["data"]["prompt_template"],
            limits=Limits(
                self._rollouts["max_rollout_turns"],
                policy_config["generation"]["max_new_tokens"],
                policy_config["max_total_sequence_length"],
            ),
        )


def training_and_generation_slots(
    cluster: VirtualCluster, policy_config: PolicyConfig
) -> tuple[VirtualCluster | ClusterPart, ClusterPart | None]:
    """Where the policy trains, and where it generates if not in the same workers."""
    colocated = policy_config["generation"]["colocated"]
    return (cluster, None) if colocated["enabled"] else cluster.split(**colocated["resources"])


def num_optimizer_steps(config: MasterConfig) -> int:
    """Optimizer steps of a whole run."""
    section = rollout_section(config)
    samples = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
    return int(section["max_num_steps"] * (samples // config["policy"]["train_global_batch_size"]))
