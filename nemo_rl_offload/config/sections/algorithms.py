"""Keys of the algorithms' sections, of `loss_fn` and of `eval`."""

from typing import Annotated, Literal, TypedDict

from annotated_types import Ge, Gt, Lt

from nemo_rl_offload.config.types import Count, Default, Fraction, NonNegative, Positive, Seed, Share, closed


@closed
class LossConfig(TypedDict):
    reference_policy_kl_penalty: Annotated[NonNegative, Default(0.01)]
    """Weight of the KL divergence from the start model; 0 leaves the reference model out."""
    reference_policy_kl_type: Annotated[Literal["k1", "k2", "k3"], Default("k3")]
    """Estimate of that divergence, with d = reference - policy log-probability: -d, d^2 / 2, or exp(d) - 1 - d."""
    kl_input_clamp_value: Annotated[Annotated[float, Gt(0)] | None, Default(20.0)]
    """Bound of d on either side; null: none."""
    kl_output_clamp_value: Annotated[Annotated[float, Gt(0)] | None, Default(10.0)]
    """Bound of the estimate on either side; null: none."""
    use_kl_in_reward: Annotated[bool, Default(False)]
    """Subtract the divergence from each token's advantage, not in the loss; for reinforce_plus_plus."""
    use_on_policy_kl_approximation: Annotated[bool, Default(False)]
    """Weigh each token's divergence by how much likelier it is to the policy than to the generation engine."""
    ratio_clip_min: Annotated[Share, Default(0.2)]
    """The probability ratio is clipped below 1 minus this."""
    ratio_clip_max: Annotated[float, Gt(0), Default(0.2)]
    """The probability ratio is clipped above 1 plus this."""
    ratio_clip_c: Annotated[Annotated[float, Gt(1)] | None, Default(None)]
    """Dual clip: with a negative advantage the ratio counts at most this; null: no such bound."""
    force_on_policy_ratio: Annotated[bool, Default(False)]
    """Take the ratio as 1, with its gradient; for steps of one update."""
    disable_ppo_ratio: Annotated[bool, Default(False)]
    """REINFORCE: the log-probability in place of the ratio, and nothing is clipped."""
    use_cispo: Annotated[bool, Default(False)]
    """CISPO: the clipped ratio, without a gradient, weighs the log-probability."""
    sequence_level_importance_ratios: Annotated[bool, Default(False)]
    """GSPO: one probability ratio for each response, the geometric mean over its tokens."""
    use_importance_sampling_correction: Annotated[bool, Default(False)]
    """Weigh each token by how much likelier it is to the training model than to the generation engine."""
    truncated_importance_sampling_type: Annotated[Literal["tis", "icepop", "seq-mask-tis"] | None, Default(None)]
    """Beyond the bounds: cut the weight (tis, null), drop the token (icepop), or responses by mean (seq-mask-tis)."""
    truncated_importance_sampling_ratio: Annotated[Annotated[float, Gt(0)] | None, Default(None)]
    """Largest such weight; null: no bound."""
    truncated_importance_sampling_ratio_min: Annotated[NonNegative | None, Default(None)]
    """Least such weight; null: no bound."""
    entropy_coeff: Annotated[NonNegative, Default(0.0)]
    """Weight of the entropy bonus."""
    token_level_loss: Annotated[bool, Default(True)]
    """Average over all tokens of the batch (true), or over each response and then over responses (false)."""
    kl_type: Annotated[Literal["forward", "reverse", "mixed"], Default("mixed")]
    """Distillation: KL(teacher, student), KL(student, teacher), or a mixture."""
    mixed_kl_weight: Annotated[Fraction, Default(0.5)]
    """Distillation: share of the forward divergence in the mixture."""
    zero_outside_topk: Annotated[bool, Default(True)]
    """Distillation: the teacher gives nothing outside its top k (true), or only the top k is compared (false)."""


@closed
class RewardShapingConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Lower the reward of long responses (DAPO's soft overlong punishment)."""
    max_response_length: Annotated[Positive | None, Default(None)]
    """Tokens of a response, all turns, from which on the penalty is whole; null: max_new_tokens x max_rollout_turns."""
    overlong_buffer_length: Annotated[Positive, Default(64)]
    """Tokens before that length over which the penalty grows from 0."""
    overlong_buffer_penalty: Annotated[NonNegative, Default(1.0)]
    """The whole penalty."""


@closed
class RewardScalingConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Map rewards from one interval to another, before their shaping."""
    source_min: Annotated[float, Default(0.0)]
    """Rewards below this count as this."""
    source_max: Annotated[float, Default(1.0)]
    """Rewards above this count as this."""
    target_min: Annotated[float, Default(0.0)]
    """What source_min becomes."""
    target_max: Annotated[float, Default(1.0)]
    """What source_max becomes."""


@closed
class AdvEstimatorConfig(TypedDict):
    name: Annotated[Literal["grpo", "gdpo", "reinforce_plus_plus"], Default("grpo")]
    """Rewards are compared within their group, each of several by itself (gdpo), or normalized over all tokens."""
    reward_weights: Annotated[list[float] | None, Default(None)]
    """With gdpo: the weights of the rewards, in the order of their names; null: 1 each."""
    minus_baseline: Annotated[bool, Default(True)]
    """With reinforce_plus_plus: subtract the mean reward of the group first."""


@closed
class AsyncGRPOConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Generate for later steps while a step trains, on devices of their own."""
    max_trajectory_age_steps: Annotated[Count, Default(1)]
    """Steps by which the weights that begin a response may be older than those it trains; 0: none."""
    in_flight_weight_updates: Annotated[bool, Default(False)]
    """Change the weights under responses that are under way (true), or when none is (false)."""
    recompute_kv_cache_after_weight_updates: Annotated[bool, Default(False)]
    """Compute keys and values of responses under way anew by new weights (true), or keep those they have (false)."""


@closed
class GRPOConfig(TypedDict):
    num_prompts_per_step: Annotated[Positive, Default(32)]
    """Prompts per step."""
    num_generations_per_prompt: Annotated[Positive, Default(16)]
    """Responses per prompt: the group that rewards are compared in."""
    max_rollout_turns: Annotated[Positive, Default(1)]
    """Most turns of an episode, where the environment answers responses; 1: one response."""
    max_num_epochs: Annotated[Positive | None, Default(None)]
    """Passes over the problems after which the run ends; null: max_num_steps alone decides."""
    max_num_steps: Annotated[Positive, Default(1000)]
    """Most steps of the run."""
    normalize_rewards: Annotated[bool, Default(True)]
    """Divide advantages by the standard deviation of their group."""
    use_leave_one_out_baseline: Annotated[bool, Default(True)]
    """Baseline of a response: mean reward of the others in its group (true), or of the group (false)."""
    ppo_epochs: Annotated[Positive, Default(1)]
    """Passes over the responses of a step."""
    overlong_filtering: Annotated[bool, Default(False)]
    """Leave responses without an end token out of the loss."""
    use_dynamic_sampling: Annotated[bool, Default(False)]
    """Replace prompts whose responses all have the same reward (DAPO)."""
    batch_multiplier: Annotated[float, Ge(1), Default(1.0)]
    """Dynamic sampling generates for num_prompts_per_step times this at a time."""
    dynamic_sampling_max_gen_batches: Annotated[Positive, Default(10)]
    """Dynamic sampling gives up after this many such batches."""
    async_grpo: AsyncGRPOConfig
    """Generation ahead of training."""
    reward_shaping: RewardShapingConfig
    """Penalty for long responses."""
    reward_scaling: RewardScalingConfig
    """Another interval for rewards."""
    adv_estimator: AdvEstimatorConfig
    """How rewards become advantages."""
    advantage_clip_low: Annotated[float | None, Default(None)]
    """Smallest advantage; null: no bound."""
    advantage_clip_high: Annotated[float | None, Default(None)]
    """Largest advantage; null: no bound."""
    invalid_tool_call_advantage: Annotated[float | None, Default(None)]
    """Advantage of each token of a turn whose call of a tool could not be read (nemo_gym); null: as of other turns."""
    malformed_thinking_advantage: Annotated[float | None, Default(None)]
    """Advantage of each token of a turn with malformed thinking (nemo_gym); null: as of other turns."""
    seq_logprob_error_threshold: Annotated[Annotated[float, Ge(1)] | None, Default(None)]
    """Responses whose own token_mult_prob_error is above this are not learned from; null: all are."""
    val_num_generations_per_prompt: Annotated[Positive, Default(1)]
    """Responses to each problem in validation; with more than 1, pass_k is the share of problems with a right one."""
    stop_at_validation_metric: Annotated[Literal["accuracy", "reward", "pass_k"] | None, Default(None)]
    """The run ends, after a step's checkpoint, when this metric of a validation reaches the threshold."""
    stop_at_validation_threshold: Annotated[float | None, Default(None)]
    """That metric's bound."""
    val_period: Annotated[Count, Default(10)]
    """Steps between validations; 0: none in between."""
    val_at_start: Annotated[bool, Default(True)]
    """Validate before the first step."""
    val_at_end: Annotated[bool, Default(True)]
    """Validate after the last step."""
    max_val_samples: Annotated[Positive, Default(256)]
    """Problems per validation."""
    val_batch_size: Annotated[Positive, Default(256)]
    """Problems that are generated and scored together in validation."""
    seed: Annotated[Seed, Default(42)]
    """Seed of the run: order of the problems and sampling."""


@closed
class SFTConfig(TypedDict):
    max_num_epochs: Annotated[Positive | None, Default(1)]
    """Passes over the data after which the run ends; null: max_num_steps alone decides."""
    max_num_steps: Annotated[Positive, Default(1000)]
    """Most steps of the run."""
    val_period: Annotated[Count, Default(10)]
    """Steps between validations; 0: none in between."""
    val_at_start: Annotated[bool, Default(True)]
    """Validate before the first step."""
    val_at_end: Annotated[bool, Default(True)]
    """Validate after the last step."""
    max_val_samples: Annotated[Positive, Default(256)]
    """Samples per validation."""
    seed: Annotated[Seed, Default(42)]
    """Seed of the run: order of the data."""


@closed
class DPOConfig(SFTConfig):
    reference_policy_kl_penalty: Annotated[float, Gt(0), Default(0.05)]
    """Beta of DPO: the weight of staying near the start model."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5), Default(0.0)]
    """Share of pairs that are taken to be the wrong way round."""
    preference_average_log_probs: Annotated[bool, Default(False)]
    """A response's log-probability in the preference loss: mean (true) or sum (false) over its tokens."""
    sft_average_log_probs: Annotated[bool, Default(False)]
    """The same in the supervised loss of the chosen response."""
    preference_loss_weight: Annotated[NonNegative, Default(1.0)]
    """Weight of the preference loss."""
    sft_loss_weight: Annotated[NonNegative, Default(0.0)]
    """Weight of the supervised loss of the chosen response."""


@closed
class DistillationConfig(TypedDict):
    num_prompts_per_step: Annotated[Positive, Default(32)]
    """Prompts per step."""
    num_generations_per_prompt: Annotated[Positive, Default(1)]
    """Responses of the student per prompt."""
    max_rollout_turns: Annotated[Positive, Default(1)]
    """Most turns of an episode, where the environment answers responses; 1: one response."""
    max_num_epochs: Annotated[Positive | None, Default(None)]
    """Passes over the problems after which the run ends; null: max_num_steps alone decides."""
    max_num_steps: Annotated[Positive, Default(1000)]
    """Most steps of the run."""
    topk_logits_k: Annotated[Positive, Default(64)]
    """Tokens at each position, the teacher's most likely ones, that are compared."""
    val_period: Annotated[Count, Default(10)]
    """Steps between validations; 0: none in between."""
    val_at_start: Annotated[bool, Default(True)]
    """Validate before the first step."""
    val_at_end: Annotated[bool, Default(True)]
    """Validate after the last step."""
    max_val_samples: Annotated[Positive, Default(256)]
    """Problems per validation."""
    val_batch_size: Annotated[Positive, Default(256)]
    """Problems that are generated and scored together in validation."""
    seed: Annotated[Seed, Default(42)]
    """Seed of the run: order of the problems and sampling."""


@closed
class EvalConfig(TypedDict):
    metric: Annotated[Literal["pass@k", "cons@k"], Default("pass@k")]
    """What `eval` measures: the chance that one of k_value responses, or their most frequent answer, is right."""
    num_tests_per_prompt: Annotated[Positive, Default(1)]
    """Responses to each problem, sampled as in validation."""
    k_value: Annotated[Positive, Default(1)]
    """The k of pass@k or cons@k; at most num_tests_per_prompt."""
    seed: Annotated[Seed, Default(42)]
    """Seed of the sampling."""
    save_path: Annotated[str | None, Default(None)]
    """Folder for figures and responses, where --run-dir gives none; null: results/eval_<config name>."""
