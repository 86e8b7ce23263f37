"""The configuration's keys, in NeMo-RL's and Megatron-Core's names, each with its type, range and one line.

Sections are closed: a key that is not listed is an error, so each one has code that reads it. Types are strict: no
text becomes a number and no number a truth value; only a whole number may stand for any number. Defaults do not
stand here but in `examples/configs/base.yaml`. The section `policy.megatron_cfg` is in `megatron_schema.py`.
"""

from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Gt

from nemo_rl_offload.config.megatron_schema import MegatronConfig
from nemo_rl_offload.config.types import Count, NonNegative, Positive, Share, closed


@closed
class TokenizerConfig(TypedDict):
    name: str
    """Local folder with a Hugging Face tokenizer."""


@closed
class GenerationConfig(TypedDict):
    backend: Literal["megatron"]
    """Engine that generates the responses, in the training workers."""
    max_new_tokens: Positive
    """Longest response, in tokens."""
    temperature: Annotated[float, Gt(0)]
    """Sampling temperature, in training and in validation."""
    top_p: Share
    """Nucleus sampling: smallest set of tokens with this probability mass; 1 keeps all."""
    top_k: Positive | None
    """Sample among this many most likely tokens; null keeps all."""


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
    ratio_clip_min: Share
    """The probability ratio is clipped below 1 minus this."""
    ratio_clip_max: Annotated[float, Gt(0)]
    """The probability ratio is clipped above 1 plus this."""
    token_level_loss: bool
    """Average over all tokens of the batch (true), or over each response and then over responses (false)."""


@closed
class GRPOConfig(TypedDict):
    num_prompts_per_step: Positive
    """Prompts per step."""
    num_generations_per_prompt: Positive
    """Responses per prompt: the group that rewards are compared in."""
    max_num_steps: Positive
    """Steps of the run."""
    normalize_rewards: bool
    """Divide advantages by the standard deviation of their group."""
    use_leave_one_out_baseline: bool
    """Baseline of a response: mean reward of the others in its group (true), or of the group (false)."""
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
    seed: Count
    """Seed of the run: order of the problems and sampling."""


@closed
class ProblemsConfig(TypedDict):
    seed: Count
    """Seed of the problem generator; problem i uses seed + i."""
    size: Positive
    """Number of problems."""


@closed
class ValidationProblemsConfig(ProblemsConfig):
    exclude: list[ProblemsConfig]
    """Problems that validation must not contain, such as those that the start model was trained on."""


@closed
class DataConfig(TypedDict):
    shuffle: bool
    """Draw training problems in random order, anew in each epoch."""
    max_input_seq_length: Positive
    """Longest prompt, in tokens."""
    prompt_template: str | None
    """Prompt around {question}; null: the tokenizer's chat template."""
    train: ProblemsConfig
    """Training problems; any that validation contains are removed."""
    validation: ValidationProblemsConfig
    """Validation problems."""


@closed
class ReasoningGymConfig(TypedDict):
    task: str
    """Name of a reasoning-gym data set."""
    params: dict[str, Any]
    """Parameters of that data set."""
    num_workers: Positive
    """Actors that score responses."""
    binary_reward: bool
    """Reward 1 for a score from correct_threshold on and 0 below (true), or the score itself (false)."""
    correct_threshold: Share
    """Score from which a response counts as correct."""


@closed
class EnvConfig(TypedDict):
    reasoning_gym: ReasoningGymConfig
    """Problems and their verification by reasoning-gym."""


@closed
class LoggerConfig(TypedDict):
    tensorboard_enabled: bool
    """Write metrics for TensorBoard."""
    jsonl_enabled: bool
    """Write metrics to metrics.jsonl."""


@closed
class CheckpointingConfig(TypedDict):
    enabled: bool
    """Write checkpoints."""
    save_period: Positive
    """Steps between checkpoints."""
    keep_top_k: Positive | None
    """Checkpoints that are kept, best first; null keeps all."""
    metric_name: Literal["val:accuracy", "val:reward", "train:reward", "train:loss"]
    """Metric that ranks checkpoints."""
    higher_is_better: bool
    """Whether a higher metric is better."""


@closed
class ClusterConfig(TypedDict):
    num_nodes: Positive
    """Machines."""
    gpus_per_node: Positive | Literal["auto"]
    """Workers per machine, one per GPU where there are GPUs; auto: all GPUs, or one worker on the CPU."""


@closed
class MasterConfig(TypedDict):
    policy: PolicyConfig
    """The model and how it is trained."""
    loss_fn: LossConfig
    """The loss."""
    grpo: GRPOConfig
    """The algorithm."""
    data: DataConfig
    """Problems and prompts."""
    env: EnvConfig
    """Rewards."""
    logger: LoggerConfig
    """Where metrics go."""
    checkpointing: CheckpointingConfig
    """When checkpoints are written and which are kept."""
    cluster: ClusterConfig
    """Machines and devices."""
