"""The configuration's keys, in NeMo-RL's and Megatron-Core's names, each with its type, range and one line.

Sections are closed: a key that is not listed here is an error, so each one has code that reads it. Types are
strict: no text becomes a number and no number a truth value; only a whole number may stand for any number.
Defaults do not stand here but in `examples/configs/base.yaml`.
"""

from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, with_config

closed = with_config(ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))

Positive = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
Beta = Annotated[float, Ge(0), Lt(1)]


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
class ActivationOffloadConfig(TypedDict):
    engine: Literal["native"]
    """Who moves the activations: this project's engine."""
    host_memory_budget: Share | str
    """Host memory: share of the node's free memory, divided by its ranks, or a size per rank ("32GiB")."""


@closed
class OptimizerConfig(TypedDict):
    optimizer: Literal["adam", "sgd"]
    """Optimizer; adam decouples weight decay (AdamW)."""
    lr: NonNegative
    """Highest learning rate."""
    min_lr: NonNegative
    """Lowest learning rate, where the decay ends."""
    weight_decay: NonNegative
    """Weight decay."""
    adam_beta1: Beta
    """Adam's decay of the mean of gradients."""
    adam_beta2: Beta
    """Adam's decay of the mean of squared gradients."""
    adam_eps: Annotated[float, Gt(0)]
    """Adam's term that keeps the denominator from zero."""
    sgd_momentum: Beta
    """Momentum of sgd."""
    clip_grad: NonNegative
    """Largest global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: bool
    """Split the optimizer's state over the data-parallel ranks."""


@closed
class SchedulerConfig(TypedDict):
    lr_decay_style: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after warm-up."""
    lr_warmup_iters: Count
    """Steps of linear warm-up."""
    lr_decay_iters: Positive | None
    """Step at which min_lr is reached; null: grpo.max_num_steps."""
    lr_warmup_init: NonNegative
    """Learning rate at the start of the warm-up."""


@closed
class DistributedDataParallelConfig(TypedDict):
    grad_reduce_in_fp32: bool
    """Reduce gradients in float32 whatever the precision of the weights."""
    overlap_grad_reduce: bool
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool
    """Gather parameters during the forward pass; needs the distributed optimizer and overlap_grad_reduce."""


@closed
class MegatronConfig(TypedDict):
    enabled: bool
    """Train with Megatron-Core, the only backend."""
    transformer_impl: Literal["auto", "torch", "transformer_engine"]
    """Layer implementation; auto takes Transformer Engine where it can be imported, else torch."""
    tensor_model_parallel_size: Positive
    """Ranks that share each layer's weights; only 1 so far."""
    pipeline_model_parallel_size: Positive
    """Ranks that share the layers; only 1 so far."""
    context_parallel_size: Positive
    """Ranks that share a sequence; only 1 so far."""
    expert_model_parallel_size: Positive
    """Ranks that share the experts; only 1 so far."""
    sequence_parallel: bool
    """Split norms and dropout over the tensor-parallel ranks; only false so far."""
    recompute_granularity: Literal["full", "selective"] | None
    """Recompute whole layers, or the modules in recompute_modules, in the backward pass; null: nothing."""
    recompute_modules: list[str] | None
    """Modules that selective recomputation covers; null: core_attn."""
    recompute_method: Literal["uniform", "block"] | None
    """Which layers full recomputation covers: uniform groups of layers, or the first ones."""
    recompute_num_layers: Positive | None
    """Layers per uniform group, or number of first layers."""
    fine_grained_activation_offloading: bool
    """Keep the activations of offload_modules in host memory between forward and backward."""
    offload_modules: list[str] | None
    """Modules whose saved activations are offloaded."""
    min_offloaded_tensor_size: Count
    """Smallest tensor that is offloaded, in elements."""
    activation_offload: ActivationOffloadConfig
    """How activations are offloaded."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"]
    """How tokens reach their experts."""
    moe_aux_loss_coeff: NonNegative | None
    """Weight of the experts' load-balancing loss; null keeps the model's own."""
    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig
    """The learning rate over the steps."""
    distributed_data_parallel_config: DistributedDataParallelConfig
    """How gradients and parameters travel between data-parallel ranks."""


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


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
_BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "from"), (Lt, "lt", "below"), (Le, "le", "up to"))


def keys_of(annotation: Any) -> dict[str, Any]:
    """Return key -> annotation of a section, or ``{}`` for anything else."""
    return get_type_hints(annotation, include_extras=True) if is_typeddict(annotation) else {}


def describe(annotation: Any) -> str:
    """Say in words what ``annotation`` allows, such as ``"a number above 0 up to 1, or text"``."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        bounds = [
            f"{word} {getattr(bound, name)}"
            for bound in arguments[1:]
            for kind, name, word in _BOUNDS
            if isinstance(bound, kind)
        ]
        return " ".join([describe(arguments[0]), *bounds])
    if origin in (Union, UnionType):
        return ", or ".join(describe(a) for a in arguments)
    if origin is Literal:
        return " or ".join(f"'{a}'" for a in arguments)
    if origin is list:
        return "a list of text" if arguments[0] is str else "a list of sections"
    return _NAMES.get(annotation, "a section of keys")
