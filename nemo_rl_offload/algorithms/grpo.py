"""Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300).

Each step samples several responses to each of a few prompts, compares every reward with the others of its prompt, and
takes clipped policy-gradient steps on the differences.
"""

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from nemo_rl_offload.algorithms.collector import Collector
from nemo_rl_offload.algorithms.gym_rollout import INVALID_TOOL_CALL, MALFORMED_THINKING, NemoGym
from nemo_rl_offload.algorithms.loop import Say, Stopwatch, run_loop, spec_of
from nemo_rl_offload.algorithms.rollout import Rollout
from nemo_rl_offload.algorithms.rollout_loop import (
    RolloutLoop,
    groups_per_slot,
    num_optimizer_steps,
    training_and_generation_slots,
)
from nemo_rl_offload.algorithms.waiting import waiting
from nemo_rl_offload.batching.batch import NO_ROUTE, ROUTED_EXPERTS, Batch
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.config.environments import ENVIRONMENTS, num_turns_of
from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer, response_ends
from nemo_rl_offload.data.prompts import Prompt, prompt_data, prompt_sets
from nemo_rl_offload.environments.interface import Score
from nemo_rl_offload.environments.pool import EnvironmentPool, make_environment
from nemo_rl_offload.errors import DataError, WorkerError
from nemo_rl_offload.losses.advantages import (
    decoupled_advantages,
    group_advantages,
    has_signal,
    overlong_penalty,
    scaled_rewards,
    token_advantages,
)
from nemo_rl_offload.losses.clipped_pg import kl_estimate
from nemo_rl_offload.losses.reduction import valid_tokens
from nemo_rl_offload.policy.driver import Policy
from nemo_rl_offload.runs.run_files import Summary

DISAGREEMENT: Mapping[str, float] = {"float32": 1.005, "bfloat16": 1.1}
"""Above this `token_mult_prob_error`, by precision, generation and training disagree by more than they round."""
IDLE_STEPS = 3
"""From the first on, after which a run that has learned nothing says so."""


class GRPO(RolloutLoop):
    """The training loop over a policy and an environment that exist already."""

    _disagreement: str | None = None
    _has_disagreed = False
    _collector: Collector | None = None
    _is_on_policy = True
    _dropped: str | None = None
    _num_idle_steps = 0
    _some_ended = False

    def __init__(self, config: MasterConfig, *others: Any) -> None:
        super().__init__(config, *others)
        section = config["grpo"]["async_grpo"]
        if section["enabled"]:
            self._collector = Collector(
                self._train_prompts,
                config["grpo"]["num_prompts_per_step"],
                self._play_ahead,
                max_age=section["max_trajectory_age_steps"],
                max_passes=config["grpo"]["max_num_epochs"],
                in_flight=section["in_flight_weight_updates"],
            )
            self._data = self._collector
            self._own_tokenizer, self._scoring = copy.deepcopy(self._tokenizer), threading.Lock()

    def _play_ahead(self, step: int, prompts: list[Prompt]) -> Rollout:
        """In a thread: a tokenizer is of use to one at a time."""
        num_generations = self.config["grpo"]["num_generations_per_prompt"]
        return self._play(prompts, num_generations, 2 * step, self._own_tokenizer, scoring=self._scoring)

    def resume(self) -> Path | None:
        """As every loop; says what is not in a checkpoint."""
        folder = super().resume()
        if folder is not None and self.config["grpo"]["async_grpo"]["enabled"]:
            self._dropped = (
                f"what had been generated ahead of step {self.step + 1} was not saved: its prompts are answered again."
            )
        return folder

    def _num_passes(self) -> int:
        return super()._num_passes() if self._collector is None else self._collector.num_passes

    @property
    def _num_validation_generations(self) -> int:
        return self.config["grpo"]["val_num_generations_per_prompt"]

    def has_reached_goal(self) -> bool:
        """Whether the last validation has reached `stop_at_validation_threshold`."""
        grpo = self.config["grpo"]
        metric, bound = grpo["stop_at_validation_metric"], grpo["stop_at_validation_threshold"]
        return metric in self._validation_metrics and bound is not None and self._validation_metrics[metric] >= bound

    def update(self, watch: Stopwatch) -> tuple[dict[str, float], int]:
        """Responses, advantages, log-probabilities, updates."""
        grpo = self.config["grpo"]
        watch.time("refit", self.policy.refit)
        played, metrics = self._sample(watch)
        self._take_training(played)
        batch = played.batch(self._tokenizer.pad_token_id)
        if self.config["policy"]["router_replay"]["enabled"]:
            metrics["routed_experts_fallback_token_route_fraction"] = _share_without_route(batch)
        if grpo["overlong_filtering"]:
            batch["sample_mask"] *= torch.tensor([float(response.finished) for response in played.responses])
        batch["prev_logprobs"] = watch.time("logprobs", lambda: self.policy.get_logprobs(batch))
        if spec_of(self.config).keeps_reference(self.config):
            batch["reference_policy_logprobs"] = watch.time(
                "reference_logprobs", lambda: self.policy.get_reference_policy_logprobs(batch)
            )
        self._watch_agreement(error := _token_mult_prob_error(batch))
        if (bound := grpo["seq_logprob_error_threshold"]) is not None:
            metrics["masked_by_logprob_error_fraction"] = _mask_disagreement(batch, bound)
        advantages = self._advantages(played, batch)
        low, high = grpo["advantage_clip_low"], grpo["advantage_clip_high"]
        if low is not None or high is not None:
            advantages = advantages.clamp(low, high)
        advantages = self._penalized(advantages, played)
        batch["advantages"] = advantages * batch["token_mask"]
        self._watch_advantages(batch["advantages"], played)
        updates = [watch.time("train", lambda: self.policy.train(batch, *self.loss)) for _ in range(grpo["ppo_epochs"])]
        metrics |= {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        metrics |= {
            "token_mult_prob_error": error,
            "advantages_zero_fraction": float((batch["advantages"] == 0).all(dim=1).float().mean()),
        }
        if self._collector is not None and not self.has_taken_all():
            collector = self._collector
            watch.time("refit", lambda: collector.renew(self.policy.refit))
        return metrics, int(batch["input_lengths"].sum())

    def _watch_advantages(self, advantages: Tensor, played: Rollout) -> None:
        """Warn, once, where a run has begun with steps that teach nothing."""
        self._num_idle_steps += not bool(advantages.any())
        self._some_ended |= any(response.finished or response.num_turns > 1 for response in played.responses)
        if self._num_idle_steps == self.step == IDLE_STEPS:
            longest = self.config["policy"]["generation"]["max_new_tokens"]
            why = (
                "samples.jsonl has them: are the problems too hard or too easy for the model, or is the reward never "
                "given?"
                if self._some_ended
                else f"None of them ended within policy.generation.max_new_tokens ({longest}): they count as 0, and "
                "nothing scored them. Raise that, or ask for shorter answers."
            )
            self._notes.append(
                f"in each of the first {IDLE_STEPS} steps all responses to a prompt got the same reward, so that "
                f"nothing is learned (advantages_zero_fraction is 1). {why}"
            )

    def _sample(self, watch: Stopwatch) -> tuple[Rollout, dict[str, float]]:
        """Responses to train on, and metrics of all that were sampled.

        With dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476), prompts whose responses all have the same
        reward are replaced by others; rewards are compared as they are scaled, and before they are shaped.
        """
        if self._collector is not None:
            return self._take_ahead(self._collector, watch)
        grpo = self.config["grpo"]
        num_prompts, num_generations = grpo["num_prompts_per_step"], grpo["num_generations_per_prompt"]
        if not grpo["use_dynamic_sampling"]:
            prompts = self._train_prompts.next_batch(num_prompts)
            played = watch.time("generation", lambda: self._rollout(prompts, num_generations, 2 * self.step))
            return played, played.metrics()
        kept: list[Rollout] = []
        sampled: list[Rollout] = []
        num_batches = grpo["dynamic_sampling_max_gen_batches"]
        while len(kept) < num_prompts:
            if len(sampled) == num_batches:
                raise DataError(
                    f"grpo.dynamic_sampling_max_gen_batches: after {num_batches} batches only {len(kept)} of "
                    f"{num_prompts} prompts of step {self.step} have responses with different rewards. Raise it or "
                    "grpo.num_generations_per_prompt, or take problems that are neither too easy nor too hard."
                )
            prompts = self._train_prompts.next_batch(math.ceil(num_prompts * grpo["batch_multiplier"]))
            stream = 2 * (self.step * num_batches + len(sampled))
            played = watch.time("generation", lambda p=prompts, s=stream: self._rollout(p, num_generations, s))  # type: ignore[misc]
            sampled.append(played)
            kept += self._that_teach(played)
        everything = Rollout.join(sampled)
        num_sampled = len(everything.responses) // num_generations
        metrics = {"num_gen_batches": float(len(sampled)), "kept_prompts_fraction": len(kept) / num_sampled}
        return Rollout.join(kept[:num_prompts]), everything.metrics() | metrics

    def _take_ahead(self, collector: Collector, watch: Stopwatch) -> tuple[Rollout, dict[str, float]]:
        """What was generated for this step ahead of it, and metrics under NeMo-RL's names where it has them."""
        played, age, waiting = watch.time("exposed_generation", lambda: collector.take(self.step, self.num_steps))
        newest = self.policy.num_refits
        ages = [newest - version for response in played.responses for version in response.versions]
        oldest = [newest - min(response.versions, default=newest) for response in played.responses]
        self._is_on_policy = not any(ages)
        return played, played.metrics() | {
            "avg_trajectory_age": sum(oldest) / len(oldest),
            "max_trajectory_age": float(age),
            "avg_token_age": sum(ages) / max(len(ages), 1),
            "buffer_size": float(sum(len(each.responses) for each in waiting)),
        }

    def _watch_agreement(self, error: float) -> None:
        """Warn once where generation gives tokens other probabilities than training, which learns from them."""
        if not self._is_on_policy:
            return  # older weights give others
        policy = self.config["policy"]
        bound = DISAGREEMENT[policy["precision"]]
        if error <= bound or self._has_disagreed:
            return
        self._has_disagreed = True
        key = "policy.generation.vllm_cfg"
        causes = f"{key}.precision or {key}.kv_cache_dtype; a model that vLLM computes otherwise; weights left behind"
        if policy["generation"]["backend"] == "megatron":
            causes = "a model that samples otherwise than it trains (dropout, experts' capacity); weights left behind"
        self._disagreement = (
            f"token_mult_prob_error is {error:.3f}, above {bound}: generation and training give tokens different "
            f"probabilities. Likely causes: {causes}."
        )

    def notices(self) -> list[str]:
        """With a disagreement of generation and training, and what a resumed run has dropped, once."""
        found = [text for text in (self._dropped, self._disagreement) if text]
        self._dropped = self._disagreement = None
        return [*super().notices(), *found]

    def _that_teach(self, played: Rollout) -> list[Rollout]:
        """Prompts whose responses differ in what is compared, and of which any is learned from."""
        num_generations = self.config["grpo"]["num_generations_per_prompt"]
        values = self._scaled_rewards(played)
        if self.config["grpo"]["adv_estimator"]["name"] == "gdpo":
            values = self._own_advantages(played)
        groups = zip(played.groups(num_generations), values.view(-1, num_generations), strict=True)
        return [
            group
            for group, values_N in groups
            if has_signal(values_N) and not all(score.is_masked for score in group.scores)
        ]

    def _own_advantages(self, played: Rollout) -> Tensor:
        """[B] GDPO's of each prompt by itself. Weights for other rewards than these are left to what is kept of all."""
        grpo, parts = self.config["grpo"], self._several_rewards(played)
        if not parts:
            return torch.zeros(len(played.scores))
        weights = grpo["adv_estimator"]["reward_weights"] or ()
        weights = weights if len(weights) == len(parts) else [1.0] * len(parts)
        prompts_GNK = torch.stack([*parts.values()], dim=1).view(-1, grpo["num_generations_per_prompt"], len(parts))
        return torch.cat([self._of_parts(prompt_NK, weights) for prompt_NK in prompts_GNK])

    def _scaled_rewards(self, played: Rollout) -> Tensor:
        scaling = self.config["grpo"]["reward_scaling"]
        if not scaling["enabled"]:
            return played.rewards
        source = scaling["source_min"], scaling["source_max"]
        return scaled_rewards(played.rewards, source, (scaling["target_min"], scaling["target_max"]))

    def _shaped_rewards(self, played: Rollout) -> Tensor:
        shaping = self.config["grpo"]["reward_shaping"]
        rewards = self._scaled_rewards(played)
        if not shaping["enabled"]:
            return rewards
        num_turns = num_turns_of(self.config["data"]["env_name"], self.config["grpo"]["max_rollout_turns"])
        longest = shaping["max_response_length"] or num_turns * self.config["policy"]["generation"]["max_new_tokens"]
        lengths = torch.tensor([response.num_generated for response in played.responses])
        buffer, penalty = shaping["overlong_buffer_length"], shaping["overlong_buffer_penalty"]
        return rewards - overlong_penalty(lengths, longest, buffer, penalty)

    def _advantages(self, played: Rollout, batch: Batch) -> Tensor:
        """[B,S]"""
        grpo, loss = self.config["grpo"], self.config["loss_fn"]
        if grpo["adv_estimator"]["name"] == "gdpo":
            return self._decoupled_advantages(played)[:, None].expand(batch["token_mask"].shape)
        rewards = self._shaped_rewards(played)
        num_generations, estimator = grpo["num_generations_per_prompt"], grpo["adv_estimator"]
        mask = valid_tokens(batch)
        if estimator["name"] == "grpo":
            advantages, _, _ = group_advantages(
                rewards,
                num_generations,
                normalize=grpo["normalize_rewards"],
                leave_one_out=grpo["use_leave_one_out_baseline"],
            )
            return advantages[:, None].expand(mask.shape)
        kl = None
        if loss["use_kl_in_reward"] and loss["reference_policy_kl_penalty"]:
            kl = loss["reference_policy_kl_penalty"] * kl_estimate(
                batch["prev_logprobs"].masked_fill(~mask, 0),
                batch["reference_policy_logprobs"].masked_fill(~mask, 0),
                loss["reference_policy_kl_type"],
                input_clamp=loss["kl_input_clamp_value"],
                output_clamp=loss["kl_output_clamp_value"],
            )
        return token_advantages(rewards, num_generations, mask, minus_baseline=estimator["minus_baseline"], kl=kl)

    def _penalized(self, advantages_BS: Tensor, played: Rollout) -> Tensor:
        """With the advantages that turns with a fault have, whatever the response is worth."""
        found = advantages_BS.clone()
        for name in (INVALID_TOOL_CALL, MALFORMED_THINKING):
            if (advantage := self.config["grpo"][f"{name}_advantage"]) is None:  # type: ignore[literal-required]
                continue
            for row, (prompt, score) in enumerate(zip(played.prompts, played.scores, strict=True)):
                for begin, end in (score.faults or {}).get(name, ()):
                    found[row, len(prompt.token_ids) + begin : len(prompt.token_ids) + end] = advantage
        return found

    def _several_rewards(self, played: Rollout) -> dict[str, Tensor]:
        """By name, [B] each; none where no response was scored. Raises WorkerError where there are not several."""
        if len(parts := played.parts) >= 2 or not any(map(_is_scored, played.responses, played.scores)):
            return parts
        raise WorkerError(
            f"grpo.adv_estimator.name: gdpo compares several rewards, and the environment "
            f"{self.config['data']['env_name']} returned {', '.join(parts) or _UNNAMED}. Return them under `rewards` "
            "(NeMo-Gym's servers: `reward_components`), or set grpo."
        )

    def _check_names(self, played: Rollout) -> None:
        """Raise WorkerError where responses to one prompt have rewards of other names, which would count as 0."""
        for group in played.groups(self.config["grpo"]["num_generations_per_prompt"]):
            pairs = zip(group.responses, group.scores, strict=True)
            scored = [sorted(score.parts or ()) for response, score in pairs if _is_scored(response, score)]
            if len(named := list(dict.fromkeys(", ".join(names) or _UNNAMED for names in scored))) > 1:
                raise WorkerError(
                    f"grpo.adv_estimator.name: gdpo compares rewards by name, and the environment "
                    f"{self.config['data']['env_name']} returned for one response to a prompt {named[0]}, for another "
                    f"{named[1]}. Return all of them each time."
                )

    def _decoupled_advantages(self, played: Rollout) -> Tensor:
        """[B]"""
        weights, parts = self.config["grpo"]["adv_estimator"]["reward_weights"], self._several_rewards(played)
        if not parts:
            return torch.zeros(len(played.scores))
        self._check_names(played)
        if weights is not None and len(weights) != len(parts):
            raise WorkerError(
                f"grpo.adv_estimator.reward_weights: {len(weights)} weights for {len(parts)} rewards "
                f"({', '.join(parts)}). Give one each, in this order."
            )
        return self._of_parts(torch.stack([*parts.values()], dim=1), weights or [1.0] * len(parts))

    def _of_parts(self, parts_BK: Tensor, weights: Sequence[float]) -> Tensor:
        grpo = self.config["grpo"]
        return decoupled_advantages(
            parts_BK,
            torch.tensor(weights),
            grpo["num_generations_per_prompt"],
            normalize=grpo["normalize_rewards"],
            leave_one_out=grpo["use_leave_one_out_baseline"],
        )


_UNNAMED = "none by name"


def _is_scored(response: Response, score: Score) -> bool:
    """Whether an environment has judged the response, and it is learned from."""
    return response.finished and not (score.scorer_error or score.is_masked)


def _token_mult_prob_error(batch: Batch) -> float:
    """Mean of exp(|log p_generation - log p_training|) over response tokens: 1 when generation and training agree.

    And 1 where no token counts, all responses being filtered.
    """
    difference = (batch["generation_logprobs"] - batch["prev_logprobs"]).abs()[valid_tokens(batch)]
    return float(difference.exp().mean()) if difference.numel() else 1.0


def _share_without_route(batch: Batch) -> float:
    """Share of tokens whose experts generation has not said, and training's routers choose; but for each row's last.

    Raises:
        WorkerError: it has said those of none.
    """
    if ROUTED_EXPERTS not in batch:
        raise WorkerError(
            "policy.router_replay.enabled: vLLM has returned the experts of no response. Set it to false, and report "
            "this."
        )
    routes_BS = batch[ROUTED_EXPERTS][:, :, 0, 0]
    is_expected = torch.arange(routes_BS.shape[1]) < batch["input_lengths"][:, None] - 1
    return float((routes_BS[is_expected] == NO_ROUTE).float().mean())


def _mask_disagreement(batch: Batch, bound: float) -> float:
    """Leave out responses whose own `token_mult_prob_error` is above `bound`; returns their share."""
    mask = valid_tokens(batch)
    errors = (batch["generation_logprobs"] - batch["prev_logprobs"]).abs().exp().masked_fill(~mask, 0)
    is_above = errors.sum(dim=1) / mask.sum(dim=1).clamp(min=1) > bound
    batch["sample_mask"] = batch["sample_mask"].masked_fill(is_above, 0)
    return float(is_above.float().mean())


def run_grpo(config: MasterConfig, run_dir: Path, say: Say, progress_stream: TextIO | None) -> Summary:
    """Run GRPO as `config` says; arguments, result and errors as in `run_loop`."""
    grpo, policy_config = config["grpo"], config["policy"]
    tokenizer, end_ids = load_policy_tokenizer(policy_config, config["data"]["prompt_template"])
    ends = response_ends(policy_config, tokenizer, end_ids)
    with waiting(say, "Preparing problems"):
        prompts = prompt_sets(prompt_data(config), config["env"]["reasoning_gym"], tokenizer, grpo["seed"])
        prompts[0].check()

    def build(cluster: VirtualCluster) -> GRPO:
        environment: EnvironmentPool | NemoGym
        with ExitStack() as on_failure:
            if ENVIRONMENTS[config["data"]["env_name"]].leads_episodes:
                held_out = (prompt.problem for prompt in prompts[1])
                environment = NemoGym(config, run_dir, tokenizer, ends, [*prompts[0].problems(), *held_out])
                on_failure.callback(environment.shutdown, at_once=True)
            else:
                environment = make_environment(config, run_dir)
            slots, generation_slots = training_and_generation_slots(cluster, policy_config)
            policy = Policy(
                slots,
                policy_config,
                resolve_model_path(policy_config["model_name"]),
                ends.ids,
                seed=grpo["seed"],
                num_steps=num_optimizer_steps(config, prompts[0]) * grpo["ppo_epochs"],
                keep_reference=spec_of(config).keeps_reference(config),
                generation_slots=generation_slots,
                recomputes_cache=grpo["async_grpo"]["recompute_kv_cache_after_weight_updates"],
            )
            on_failure.callback(policy.shutdown)
            if isinstance(environment, NemoGym):
                with waiting(say, "Waiting for NeMo-Gym's servers", begins=False):
                    environment.wait()
            loop = GRPO(config, policy, environment, tokenizer, ends.without_text, prompts, run_dir)
            on_failure.pop_all()
        return loop

    return run_loop(config, run_dir, say, progress_stream, build, groups_per_slot(policy_config))
