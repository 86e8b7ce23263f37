"""Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300).

Each step samples several responses to each of a few prompts, compares every reward with the others of its prompt, and
takes clipped policy-gradient steps on the differences.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from nemo_rl_offload.algorithms.rollout import Rollout, rollout
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.data.prompts import Prompt, TrainingPrompts, prompt_sets
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.environments.reasoning_gym import EnvironmentPool, make_environment
from nemo_rl_offload.losses.advantages import group_advantages
from nemo_rl_offload.losses.reduction import valid_tokens
from nemo_rl_offload.observability.logger import MetricLogger, write_json_atomic
from nemo_rl_offload.observability.progress import Progress
from nemo_rl_offload.observability.run_directory import SUMMARY_FILE, Checkpoints
from nemo_rl_offload.policy.interface import PolicyInterface
from nemo_rl_offload.policy.policy import Policy


class GRPO:
    """The training loop over a policy and an environment that exist already."""

    def __init__(
        self,
        config: MasterConfig,
        policy: PolicyInterface,
        environment: EnvironmentPool,
        tokenizer: Any,
        prompts: tuple[TrainingPrompts, list[Prompt]],
        run_dir: Path,
    ) -> None:
        self._config = config
        self._policy = policy
        self._environment = environment
        self._tokenizer = tokenizer
        self._train_prompts, self._validation_prompts = prompts
        section = config["checkpointing"]
        self._checkpoints = Checkpoints(run_dir, section["keep_top_k"], section["higher_is_better"])
        self.seed = config["grpo"]["seed"]
        self.step = 0
        self.validation: dict[str, float | None] = {"first": None, "last": None}
        self.train_metrics: dict[str, float] = {}
        self._validation_metrics: dict[str, float] = {}

    def resume(self) -> Path | None:
        """Go on from the run directory's latest checkpoint; returns its folder, None without one."""
        latest = self._checkpoints.latest()
        if latest is None:
            return None
        folder, state = latest
        self._policy.load_checkpoint(folder / "policy")
        self._train_prompts.load_state_dict(state["prompts"])
        self.step, self.validation = state["step"], state["validation"]
        self.train_metrics, self._validation_metrics = state["train"], state["validation_metrics"]
        return folder

    def run(self, logger: MetricLogger, progress: Progress) -> None:
        """Train until `grpo.max_num_steps`, validating and saving as configured."""
        grpo, saving = self._config["grpo"], self._config["checkpointing"]
        last_step = grpo["max_num_steps"]
        if grpo["val_at_start"] and self.step == 0:
            self.validate(logger)
        while self.step < last_step:
            self.step += 1
            self.train_metrics = self.train_step()
            logger.log(self.train_metrics, self.step, "train")
            progress.update(
                self.step,
                reward=self.train_metrics["reward"],
                loss=self.train_metrics["loss"],
                tokens_per_s=self.train_metrics["tokens_per_s"],
                offloaded_bytes=self.train_metrics["offloaded_bytes"],
            )
            at_end = self.step == last_step
            if (grpo["val_at_end"] and at_end) or (grpo["val_period"] and self.step % grpo["val_period"] == 0):
                self.validate(logger)
            if saving["enabled"] and (at_end or self.step % saving["save_period"] == 0):
                self.save()

    def train_step(self) -> dict[str, float]:
        """One step: responses, advantages, log-probabilities, updates; returns its metrics."""
        grpo, loss_fn = self._config["grpo"], self._config["loss_fn"]
        watch = Stopwatch()
        offloaded_before = self._policy.offload_stats()["bytes_out"]
        prompts = self._train_prompts.next_batch(grpo["num_prompts_per_step"])
        played = watch.time(
            "generation", lambda: self._rollout(prompts, grpo["num_generations_per_prompt"], 2 * self.step)
        )
        batch = played.batch(self._tokenizer.pad_token_id)
        advantages, _, _ = group_advantages(
            played.rewards,
            grpo["num_generations_per_prompt"],
            normalize=grpo["normalize_rewards"],
            leave_one_out=grpo["use_leave_one_out_baseline"],
        )
        batch["advantages"] = advantages[:, None] * batch["token_mask"]
        batch["prev_logprobs"] = watch.time("logprobs", lambda: self._policy.get_logprobs(batch))
        if loss_fn["reference_policy_kl_penalty"] > 0:
            batch["reference_policy_logprobs"] = watch.time(
                "reference_logprobs", lambda: self._policy.get_reference_policy_logprobs(batch)
            )
        updates = watch.time("train", lambda: self._policy.train(batch, "clipped_pg", loss_fn))
        num_tokens = int(batch["input_lengths"].sum())
        return {
            **updates,
            **played.metrics(),
            "token_mult_prob_error": _token_mult_prob_error(batch),
            "advantages_zero_fraction": float((advantages == 0).float().mean()),
            "num_tokens": float(num_tokens),
            "tokens_per_s": num_tokens / watch.total_s,
            "offloaded_bytes": float(self._policy.offload_stats()["bytes_out"] - offloaded_before),
            **watch.metrics(),
        }

    def validate(self, logger: MetricLogger) -> None:
        """Sample one response to each validation prompt, at the training temperature, and log how many are right."""
        grpo = self._config["grpo"]
        prompts = self._validation_prompts[: grpo["max_val_samples"]]
        size = grpo["val_batch_size"]
        parts = [
            self._rollout(prompts[start : start + size], 1, 2 * start + 1) for start in range(0, len(prompts), size)
        ]
        played = Rollout.join(parts)
        self._validation_metrics = played.metrics()
        logger.log(self._validation_metrics, self.step, "validation")
        accuracy = self._validation_metrics["accuracy"]
        if self.validation["first"] is None:
            self.validation["first"] = accuracy
        self.validation["last"] = accuracy

    def save(self) -> None:
        """Write a checkpoint of this step."""
        prefix, name = self._config["checkpointing"]["metric_name"].split(":")
        metrics = self._validation_metrics if prefix == "val" else self.train_metrics
        state = {
            "prompts": self._train_prompts.state_dict(),
            "validation": self.validation,
            "train": self.train_metrics,
            "validation_metrics": self._validation_metrics,
        }
        self._checkpoints.save(self.step, state, metrics.get(name), self._policy.save_checkpoint)

    def _rollout(self, prompts: list[Prompt], num_generations: int, stream: int) -> Rollout:
        """Even streams are for training, odd ones for validation: neither draws the other's random numbers."""
        seed = self.seed * 1_000_003 + stream
        return rollout(self._policy, self._environment, self._tokenizer, prompts, num_generations, seed)


class Stopwatch:
    """Seconds per phase of a step."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._phases_s: dict[str, float] = {}

    def time[T](self, phase: str, work: Callable[[], T]) -> T:
        """Run `work` and note how long it took."""
        start_s = time.perf_counter()
        result = work()
        self._phases_s[phase] = time.perf_counter() - start_s
        return result

    @property
    def total_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start_s

    def metrics(self) -> dict[str, float]:
        """`timing/<phase>_s` of every phase, and of the whole step."""
        return {f"timing/{phase}_s": seconds for phase, seconds in {**self._phases_s, "step": self.total_s}.items()}


def _token_mult_prob_error(batch: Batch) -> float:
    """Mean of exp(|log p_generation - log p_training|) over response tokens: 1 when generation and training agree."""
    difference = (batch["generation_logprobs"] - batch["prev_logprobs"]).abs()
    return float(difference[valid_tokens(batch)].exp().mean())


def run_grpo(
    config: MasterConfig, run_dir: Path, say: Callable[[str], None], progress_stream: TextIO | None
) -> dict[str, Any]:
    """Run GRPO as `config` says; everything it writes lands in `run_dir`. Returns the summary, also written there.

    `say` shows one line of status to the user; progress goes to `progress_stream`, or to standard output.
    Raises a NemoRLOffloadError for everything that a user can mend.
    """
    start_s = time.monotonic()
    grpo, policy_config = config["grpo"], config["policy"]
    model_path = resolve_model_path(policy_config["model_name"])
    tokenizer = load_tokenizer(resolve_tokenizer_path(policy_config["tokenizer"]["name"]))
    say("Preparing problems")
    prompts = prompt_sets(config["data"], config["env"]["reasoning_gym"], tokenizer, grpo["seed"])
    say("Starting Ray")
    with VirtualCluster(**config["cluster"]) as cluster:
        environment = make_environment(config["env"]["reasoning_gym"])
        say(f"Loading the model on {cluster.world_size} {cluster.device} worker(s)")
        policy = Policy(
            cluster,
            policy_config,
            model_path,
            tokenizer.eos_token_id,
            seed=grpo["seed"],
            num_steps=_num_optimizer_steps(config),
            keep_reference=config["loss_fn"]["reference_policy_kl_penalty"] > 0,
        )
        loop = GRPO(config, policy, environment, tokenizer, prompts, run_dir)
        if folder := loop.resume():
            say(f"Resuming from {folder}")
        logging = config["logger"]
        with (
            MetricLogger(run_dir, logging["tensorboard_enabled"], logging["jsonl_enabled"]) as logger,
            Progress(grpo["max_num_steps"], enabled=True, stream=progress_stream) as progress,
        ):
            loop.run(logger, progress)
        summary = _summary(loop, cluster, policy, run_dir, time.monotonic() - start_s)
        policy.shutdown()
        environment.shutdown()
    write_json_atomic(run_dir / SUMMARY_FILE, summary)
    return summary


def _summary(loop: GRPO, cluster: VirtualCluster, policy: Policy, run_dir: Path, wall_seconds: float) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "steps": loop.step,
        "seed": loop.seed,
        "world_size": cluster.world_size,
        "device": cluster.device,
        "wall_seconds": wall_seconds,
        "validation": loop.validation,
        "train": {"loss": loop.train_metrics.get("loss"), "reward": loop.train_metrics.get("reward")},
        "offload": policy.offload_stats(),
        "memory": {"peak_device_bytes": policy.peak_device_bytes()},
        "run_dir": str(run_dir),
    }


def _num_optimizer_steps(config: MasterConfig) -> int:
    grpo = config["grpo"]
    samples = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
    return grpo["max_num_steps"] * (samples // config["policy"]["train_global_batch_size"])
