"""What the algorithms share that let the policy answer problems: GRPO and distillation."""

import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, cast

from nemo_rl_offload.algorithms.gym_rollout import NemoGym
from nemo_rl_offload.algorithms.loop import TrainingLoop, left_unmeasured, section_of
from nemo_rl_offload.algorithms.rollout import Limits, Rollout, rollout
from nemo_rl_offload.algorithms.samples import Samples
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.config.schema import DistillationConfig, GRPOConfig, MasterConfig, PolicyConfig
from nemo_rl_offload.data.prompts import Prompt, TrainingPrompts
from nemo_rl_offload.data.tokenizer import Tokenizer
from nemo_rl_offload.environments.pool import EnvironmentPool
from nemo_rl_offload.generation.interface import Generated, Told
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.observability.progress import Progress
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.runs.run_files import LoopSummary

_BY_ACCURACY = "val:accuracy"
ENOUGH_EPISODES = 4
"""Without room for another turn, before it is said."""


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
        environment: EnvironmentPool | NemoGym,
        tokenizer: Tokenizer,
        ends_without_text: Collection[int],
        prompts: tuple[TrainingPrompts, list[Prompt]],
        run_dir: Path,
    ) -> None:
        self._train_prompts, self._validation_prompts = prompts
        self._rollouts = rollout_section(config)
        super().__init__(config, policy, self._train_prompts, num_steps(config, self._train_prompts), run_dir)
        self._environment = environment
        self._tokenizer = tokenizer
        self._ends_without_text = ends_without_text
        self._sampling = Sampling.of(config["policy"])
        self._samples = Samples(run_dir, config["logger"], tokenizer)
        self._answered, self._without_room = Counter[int](), Counter[int]()
        self._has_told_of_turns = False
        self._notes = left_unmeasured(config, len(self._validation_prompts))

    def measure(self) -> dict[str, float]:
        """Sample responses to each validation prompt, one unless the section says more."""
        prompts = self._validation_prompts[: self._rollouts["max_val_samples"]]
        size, sampling = self._rollouts["val_batch_size"], Sampling.of(self.config["policy"], validation=True)
        num_generations = self._num_validation_generations
        parts = [
            self._rollout(prompts[start : start + size], num_generations, 2 * start + 1, sampling)
            for start in range(0, len(prompts), size)
        ]
        played = Rollout.join(parts)
        self._samples.take_validation(played, self.step)
        self._watch_turns(played)
        if played.is_graded and self.validation_metric != "reward":
            self.validation_metric = "reward"
            ranked = ""
            if self.config["checkpointing"]["metric_name"] == _BY_ACCURACY:
                ranked = f", and checkpoints are ranked by it, not by {_BY_ACCURACY}"
            self._notes.append(
                "some rewards are neither 0 nor 1, so accuracy, the share of responses with a reward above 0, says "
                f"little: validation is judged by the mean reward{ranked}. For an accuracy that says more, a reward "
                'function returns {"reward": ..., "is_correct": True or False}.'
            )
        return played.metrics() | (played.pass_at(num_generations) if num_generations > 1 else {})

    @property
    def _num_validation_generations(self) -> int:
        """Responses to each problem in validation."""
        return 1

    def resume(self) -> Path | None:
        """As every loop; samples of steps that are taken again are forgotten."""
        folder = super().resume()
        metrics = self._validation_metrics
        if self.validation["last"] == metrics.get("reward") != metrics.get("accuracy"):
            self.validation_metric = "reward"
        self._samples.forget_after(None if folder is None else self.step)
        return folder

    def ranked_by(self) -> str | None:
        """As configured; but by the reward where accuracy says little."""
        name = super().ranked_by()
        return "val:reward" if name == _BY_ACCURACY and self.validation_metric == "reward" else name

    def has_taken_all(self) -> bool:
        """As every loop; or all passes are made, where dynamic sampling or unusable prompts bring the stream ahead."""
        epochs = self._rollouts["max_num_epochs"]
        return super().has_taken_all() or (epochs is not None and self._num_passes() >= epochs)

    def _num_passes(self) -> int:
        """Passes over all problems that are complete with the prompts that were trained."""
        return self._train_prompts.num_passes

    def _take_training(self, played: Rollout) -> None:
        """What is kept and watched of a step's responses."""
        self._samples.take_training(played, self.step)
        self._watch_turns(played)

    def _watch_turns(self, played: Rollout) -> None:
        """Warn, once, where episodes were to have another turn and never had one."""
        self._answered += played.answered
        self._without_room += played.without_room
        policy, most = self.config["policy"], self._rollouts["max_rollout_turns"]
        missed = [turn for turn, num in sorted(self._answered.items()) if self._without_room[turn] == num]
        turn = 1 if most == 1 else next(iter(missed), 0)
        if self._answered[turn] < ENOUGH_EPISODES or self._has_told_of_turns:
            return
        self._has_told_of_turns = True
        told = f"{self.config['algorithm']}.max_rollout_turns: {most}, "
        if most == 1:
            told += "so that no model hears the observations that the environment returns. Raise it for further turns."
        else:
            told += (
                f"but none of {self._answered[turn]} episodes had room for turn {turn + 1}: prompt, responses and "
                f"answers leave less than policy.generation.max_new_tokens ({policy['generation']['max_new_tokens']}) "
                f"of policy.max_total_sequence_length ({policy['max_total_sequence_length']}). Raise that, or lower "
                "the former."
            )
        self._notes.append(told)

    def keep_samples(self) -> list[str]:
        """Write down responses of the step or the validation that has ended; returns what to warn of."""
        return self._samples.keep()

    def samples_to_show(self) -> list[str]:
        """Lines with responses of the last validation, which are then forgotten."""
        return self._samples.lines_to_show()

    def notices(self) -> list[str]:
        """What the workers and the environment have warned of since the last call."""
        notes, self._notes = self._notes, []
        return [*super().notices(), *self._environment.notices(), *notes]

    def summary(self) -> LoopSummary:
        """With the last step's mean reward."""
        summary = super().summary()
        summary["train"]["reward"] = self.train_metrics.get("reward")
        return summary

    def close(self) -> None:
        """End the workers and the environment."""
        try:
            super().close()
        finally:
            self._environment.shutdown()

    def let_go(self) -> None:
        """As every loop: NeMo-Gym's servers."""
        if isinstance(self._environment, NemoGym):
            self._environment.shutdown(at_once=True)

    def _rollout(
        self, prompts: list[Prompt], num_generations: int, stream: int, sampling: Sampling | None = None
    ) -> Rollout:
        """By the trained weights. Streams are as for `_play`."""
        self.policy.refit()
        played = self._play(
            prompts, num_generations, stream, self._tokenizer, sampling=sampling, told=tells(self.progress)
        )
        if self.progress is not None:
            self.progress.generated()
        return played

    def _play(
        self,
        prompts: list[Prompt],
        num_generations: int,
        stream: int,
        tokenizer: Tokenizer,
        *,
        sampling: Sampling | None = None,
        told: Callable[[int], Told] | None = None,
        scoring: AbstractContextManager[object] | None = None,
    ) -> Rollout:
        """Even streams are for training, odd ones for validation: neither draws the other's random numbers."""
        if isinstance(self._environment, NemoGym):
            return self._environment.play(
                self.policy,
                prompts,
                num_generations,
                self.seed * 1_000_003 + stream,
                sampling=sampling or self._sampling,
                told=told,
            )
        return rollout(
            self.policy,
            self._environment,
            tokenizer,
            prompts,
            num_generations,
            self.seed * 1_000_003 + stream,
            sampling=sampling or self._sampling,
            ends_without_text=self._ends_without_text,
            template=self.config["data"]["prompt_template"],
            told=told,
            limits=Limits(self._rollouts["max_rollout_turns"], self.config["policy"]["max_total_sequence_length"]),
            scoring=scoring,
        )


def tells(progress: Progress | None) -> Callable[[int], Told]:
    """Makes for a number of prompts what shows how far their responses are."""

    def of_prompts(num_prompts: int) -> Told:
        start_s = time.monotonic()

        def told(generated: Generated) -> None:
            if progress is not None:
                seconds = time.monotonic() - start_s
                progress.generating(generated.num_responses, num_prompts, generated.num_tokens, seconds)

        return told

    return of_prompts


def training_and_generation_slots(
    cluster: VirtualCluster, policy_config: PolicyConfig
) -> tuple[VirtualCluster | ClusterPart, ClusterPart | None]:
    """Where the policy trains, and where it generates if not in the same workers."""
    colocated = policy_config["generation"]["colocated"]
    return (cluster, None) if colocated["enabled"] else cluster.split(**colocated["resources"])


def groups_per_slot(policy_config: PolicyConfig) -> int:
    """How many groups of workers share the policy's slots: those that train, and an engine beside each."""
    generation = policy_config["generation"]
    return 2 if generation["backend"] == "vllm" and generation["colocated"]["enabled"] else 1


def num_steps(config: MasterConfig, prompts: TrainingPrompts) -> int:
    """Steps of a whole run: `max_num_steps`, or fewer where `max_num_epochs` passes end before, as whole steps.

    At the most, where prompts are unusable or dynamic sampling takes more of them (`RolloutLoop.has_taken_all`).
    """
    section = rollout_section(config)
    most, epochs = section["max_num_steps"], section["max_num_epochs"]
    return min(most, max(1, epochs * prompts.num_problems // section["num_prompts_per_step"])) if epochs else most


def num_optimizer_steps(config: MasterConfig, prompts: TrainingPrompts) -> int:
    """Optimizer steps of a whole run."""
    section = rollout_section(config)
    samples = section["num_prompts_per_step"] * section["num_generations_per_prompt"]
    return num_steps(config, prompts) * (samples // config["policy"]["train_global_batch_size"])
