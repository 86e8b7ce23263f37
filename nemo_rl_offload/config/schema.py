"""The configuration's keys, in NeMo-RL's and Megatron-Core's names, each with its type, range and one line.

Sections are closed: a key that is not listed is an error, so each one has code that reads it. Types are strict: no
text becomes a number and no number a truth value; only a whole number may stand for any number. Defaults do not
stand here but in `examples/configs/base.yaml`. The section `policy.megatron_cfg` is in `megatron_schema.py`.
"""

from typing import Annotated, Literal, TypedDict

from annotated_types import Ge, Gt, Lt

from nemo_rl_offload.config.data_schema import DataConfig, EnvConfig
from nemo_rl_offload.config.megatron_schema import MegatronConfig
from nemo_rl_offload.config.types import Count, Fraction, NonNegative, Positive, Seed, Share, closed
from nemo_rl_offload.specs.generation import GenerationBackend

Algorithm = Literal["grpo", "sft", "dpo", "distillation"]


@closed
class TokenizerConfig(TypedDict):
    name: str
    """Local folder with a Hugging Face tokenizer."""


@closed
class GenerationResources(TypedDict):
    gpus_per_node: Positive | None
    """On one machine: how many of its workers only generate."""
    num_nodes: Positive | None
    """On several machines: how many of them only generate."""


@closed
class ColocatedConfig(TypedDict):
    enabled: bool
    """Generate in the training workers; false: in workers of their own, which take the weights over after each step."""
    resources: GenerationResources
    """With false: how many of the cluster's workers generate; the others train."""


@closed
class GenerationConfig(TypedDict):
    backend: GenerationBackend
    """Engine that generates the responses."""
    colocated: ColocatedConfig
    """Which workers generate."""
    max_new_tokens: Positive
    """Longest response, in tokens."""
    temperature: Annotated[float, Gt(0)]
    """Sampling temperature, in training and in validation."""
    top_p: Share
    """Nucleus sampling: smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: Positive | None
    """Sample among this many most likely tokens; null keeps all."""


@closed
class DynamicBatchingConfig(TypedDict):
    enabled: bool
    """Microbatches of samples of similar length, padded, as many as fit into a number of tokens."""
    train_mb_tokens: Positive
    """Tokens of a microbatch in training, padding included."""
    logprob_mb_tokens: Positive
    """The same when log-probabilities are computed."""
    sequence_length_round: Positive | Literal["power_of_two"]
    """Lengths are filled up to a multiple of this, or to the next power of two."""


@closed
class SequencePackingConfig(DynamicBatchingConfig):
    enabled: bool
    """Microbatches of samples written one after another without padding, as many as fit into a number of tokens."""
    algorithm: Literal["concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"]
    """How samples are chosen: in their order, or so that microbatches get full."""


@closed
class PolicyConfig(TypedDict):
    model_name: str
    """Local folder with the start model in Hugging Face format."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    precision: Literal["float32", "bfloat16"]
    """Type of weights and activations."""
    train_global_batch_size: Positive
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size: Positive
    """Samples per forward and backward pass of a rank."""
    logprob_batch_size: Positive
    """Samples per forward pass of a rank when log-probabilities are computed."""
    logprob_chunk_size: Positive | None
    """Positions of the logits that log-probabilities and entropy are computed of at a time; null: all."""
    dynamic_batching: DynamicBatchingConfig
    """Microbatches by a number of tokens, padded."""
    sequence_packing: SequencePackingConfig
    """Microbatches by a number of tokens, packed."""
    generation_batch_size: Positive
    """Samples that a rank generates at a time."""
    max_total_sequence_length: Positive
    """Longest prompt and response together, in tokens."""
    megatron_cfg: MegatronConfig
    """Megatron-Core: parallelism, recomputation, offloading, optimizer."""
    generation: GenerationConfig
    """How responses are sampled."""


@closed
class LossConfig(TypedDict):
    reference_policy_kl_penalty: NonNegative
    """Weight of the KL divergence from the start model; 0 leaves the reference model out."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"]
    """Estimate of that divergence: difference of log-probabilities, half its square, or exp(-d) - 1 + d."""
    ratio_clip_min: Share
    """The probability ratio is clipped below 1 minus this."""
    ratio_clip_max: Annotated[float, Gt(0)]
    """The probability ratio is clipped above 1 plus this."""
    ratio_clip_c: Annotated[float, Gt(1)] | None
    """Dual clip: with a negative advantage the ratio counts at most this; null: no such bound."""
    use_cispo: bool
    """CISPO: the clipped ratio, without a gradient, weighs the log-probability."""
    sequence_level_importance_ratios: bool
    """GSPO: one probability ratio for each response, the geometric mean over its tokens."""
    use_importance_sampling_correction: bool
    """Weigh each token by how much likelier it is to the training model than to the generation engine."""
    truncated_importance_sampling_ratio: Annotated[float, Gt(0)] | None
    """Largest such weight; null: no bound."""
    entropy_coeff: NonNegative
    """Weight of the entropy bonus."""
    token_level_loss: bool
    """Average over all tokens of the batch (true), or over each response and then over responses (false)."""
    kl_type: Literal["forward", "reverse", "mixed"]
    """Distillation: KL(teacher, student), KL(student, teacher), or a mixture."""
    mixed_kl_weight: Fraction
    """Distillation: share of the forward divergence in the mixture."""
    zero_outside_topk: bool
    """Distillation: the teacher gives nothing outside its top k (true), or only the top k is compared (false)."""


@closed
class RewardShapingConfig(TypedDict):
    enabled: bool
    """Lower the reward of long responses (DAPO's soft overlong punishment)."""
    max_response_length: Positive | None
    """Response length in tokens from which on the penalty is whole; null: policy.generation.max_new_tokens."""
    overlong_buffer_length: Positive
    """Tokens before that length over which the penalty grows from 0."""
    overlong_buffer_penalty: NonNegative
    """The whole penalty."""


@closed
class GRPOConfig(TypedDict):
    num_prompts_per_step: Positive
    """Prompts per step."""
    num_generations_per_prompt: Positive
    """Responses per prompt: the group that rewards are compared in."""
    max_rollout_turns: Positive
    """Most turns of an episode, where the environment answers responses; 1: one response."""
    max_num_steps: Positive
    """Steps of the run."""
    normalize_rewards: bool
    """Divide advantages by the standard deviation of their group."""
    use_leave_one_out_baseline: bool
    """Baseline of a response: mean reward of the others in its group (true), or of the group (false)."""
    ppo_epochs: Positive
    """Passes over the responses of a step."""
    overlong_filtering: bool
    """Leave responses without an end token out of the loss."""
    use_dynamic_sampling: bool
    """Replace prompts whose responses all have the same reward (DAPO)."""
    batch_multiplier: Annotated[float, Ge(1)]
    """Dynamic sampling generates for num_prompts_per_step times this at a time."""
    dynamic_sampling_max_gen_batches: Positive
    """Dynamic sampling gives up after this many such batches."""
    reward_shaping: RewardShapingConfig
    """Penalty for long responses."""
    val_period: Count
    """Steps between validations; 0: none in between."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    max_val_samples: Positive
    """Problems per validation."""
    val_batch_size: Positive
    """Problems that are generated and scored together in validation."""
    seed: Seed
    """Seed of the run: order of the problems and sampling."""


@closed
class SFTConfig(TypedDict):
    max_num_epochs: Positive | None
    """Passes over the data after which the run ends; null: max_num_steps alone decides."""
    max_num_steps: Positive
    """Most steps of the run."""
    val_period: Count
    """Steps between validations; 0: none in between."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    max_val_samples: Positive
    """Samples per validation."""
    seed: Seed
    """Seed of the run: order of the data."""


@closed
class DPOConfig(SFTConfig):
    reference_policy_kl_penalty: Annotated[float, Gt(0)]
    """Beta of DPO: the weight of staying near the start model."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)]
    """Share of pairs that are taken to be the wrong way round."""
    preference_average_log_probs: bool
    """A response's log-probability in the preference loss: mean (true) or sum (false) over its tokens."""
    sft_average_log_probs: bool
    """The same in the supervised loss of the chosen response."""
    preference_loss_weight: NonNegative
    """Weight of the preference loss."""
    sft_loss_weight: NonNegative
    """Weight of the supervised loss of the chosen response."""


@closed
class DistillationConfig(TypedDict):
    num_prompts_per_step: Positive
    """Prompts per step."""
    num_generations_per_prompt: Positive
    """Responses of the student per prompt."""
    max_rollout_turns: Positive
    """Most turns of an episode, where the environment answers responses; 1: one response."""
    max_num_steps: Positive
    """Steps of the run."""
    topk_logits_k: Positive
    """Tokens at each position, the teacher's most likely ones, that are compared."""
    val_period: Count
    """Steps between validations; 0: none in between."""
    val_at_start: bool
    """Validate before the first step."""
    val_at_end: bool
    """Validate after the last step."""
    max_val_samples: Positive
    """Problems per validation."""
    val_batch_size: Positive
    """Problems that are generated and scored together in validation."""
    seed: Seed
    """Seed of the run: order of the problems and sampling."""


@closed
class TeacherConfig(TypedDict):
    model_name: str | None
    """Local folder of the teacher in Hugging Face format, with the student's vocabulary."""
    precision: Literal["float32", "bfloat16"] | None
    """Type of its weights; null: policy.precision."""
    logprob_batch_size: Positive | None
    """Samples per forward pass of a rank; null: policy.logprob_batch_size."""


@closed
class WandbConfig(TypedDict):
    project: str
    """Project of the run."""
    name: str | None
    """Name of the run; null: that of the run directory."""


@closed
class MlflowConfig(TypedDict):
    experiment_name: str
    """Experiment of the run."""
    run_name: str | None
    """Name of the run; null: that of the run directory."""
    tracking_uri: str | None
    """Server or store; null: mlflow.db in the run directory."""


@closed
class LoggerConfig(TypedDict):
    tensorboard_enabled: bool
    """Write metrics for TensorBoard."""
    jsonl_enabled: bool
    """Write metrics to metrics.jsonl."""
    wandb_enabled: bool
    """Write metrics for Weights & Biases, offline unless the variable WANDB_MODE says otherwise."""
    mlflow_enabled: bool
    """Write metrics for MLflow."""
    wandb: WandbConfig
    """Weights & Biases."""
    mlflow: MlflowConfig
    """MLflow."""


@closed
class CheckpointingConfig(TypedDict):
    enabled: bool
    """Write checkpoints."""
    save_period: Positive
    """Steps between checkpoints."""
    keep_top_k: Positive | None
    """Checkpoints that are kept, best first; null keeps all."""
    metric_name: Literal["val:accuracy", "val:reward", "val:loss", "train:reward", "train:loss"]
    """Metric that ranks checkpoints."""
    higher_is_better: bool
    """Whether a higher metric is better."""
    is_async: bool
    """Write checkpoints while training goes on, from a copy in host memory."""


@closed
class FaultToleranceConfig(TypedDict):
    max_restarts: Count
    """Times that a run starts its workers again after one died or failed, from the last checkpoint."""
    grace_period_s: NonNegative
    """Seconds that a step and a checkpoint may take after SIGTERM; 0: end at once, without a checkpoint."""
    max_skipped_steps: Count
    """Steps in a row that may be skipped because the loss or a gradient is not finite; one more ends the run."""


@closed
class ClusterConfig(TypedDict):
    num_nodes: Positive
    """Machines."""
    gpus_per_node: Positive | Literal["auto"]
    """Workers per machine, one per GPU where there are GPUs; auto: all GPUs, or one worker on the CPU."""


@closed
class MasterConfig(TypedDict):
    algorithm: Algorithm
    """What is run; the sections of other algorithms have no effect."""
    policy: PolicyConfig
    """The model and how it is trained."""
    teacher: TeacherConfig
    """The model that distillation learns from."""
    loss_fn: LossConfig
    """The loss of grpo and of distillation."""
    grpo: GRPOConfig
    """Group Relative Policy Optimization."""
    sft: SFTConfig
    """Supervised fine-tuning."""
    dpo: DPOConfig
    """Direct Preference Optimization."""
    distillation: DistillationConfig
    """Distillation of a teacher on the student's own responses."""
    data: DataConfig
    """Problems, prompts and files."""
    env: EnvConfig
    """Rewards."""
    logger: LoggerConfig
    """Where metrics go."""
    checkpointing: CheckpointingConfig
    """When checkpoints are written and which are kept."""
    fault_tolerance: FaultToleranceConfig
    """What a run survives."""
    cluster: ClusterConfig
    """Machines and devices."""
