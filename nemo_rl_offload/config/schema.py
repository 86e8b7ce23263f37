"""The configuration's keys, in NeMo-RL's and Megatron-Core's names, each with its type, range, default and one line.

A key stands here and nowhere else. `python tools/config_reference.py` writes `examples/configs/base.yaml`, the file of
defaults that users inherit, from it: the keys in this order, the line below each as its comment, and the comments and
blank lines between them as they stand here. The tables of `docs/configuration.md` are written from it too.

Sections are closed: a key that is not listed is an error, so each one has code that reads it. Types are strict: no
text becomes a number and no number a truth value; only a whole number may stand for any number. A default may be an
interpolation, or `???` where a value must be given. `Forwarded` keys are handed to the field of the same name of
Megatron-Core's TransformerConfig without any further code. Where a key of `policy.megatron_cfg` may be null and nothing
else is said, null leaves what the model's own configuration says.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Le, Lt

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.environments import ENVIRONMENTS
from nemo_rl_offload.config.types import (
    Beta,
    Count,
    Default,
    Forwarded,
    Fraction,
    NonNegative,
    Positive,
    Seconds,
    Seed,
    Share,
    Size,
    closed,
)
from nemo_rl_offload.specs.generation import GenerationBackend

NumProblems = Annotated[int, Gt(0), Le(10_000_000)]
if TYPE_CHECKING:
    Algorithm = str
    EnvironmentName = str
else:
    Algorithm = Literal[tuple(ALGORITHMS.built_in)]
    EnvironmentName = Literal[tuple(ENVIRONMENTS.built_in)]


@closed
class ActivationOffloadConfig(TypedDict):
    engine: Annotated[Literal["native", "megatron"], Default("native")]
    """Who moves the activations: this project's engine, or Megatron-Core's (needs Transformer Engine)."""
    gpu_memory_budget: Annotated[Size | None, Default(None)]
    """Device memory of a rank, like "72GiB", that offload_modules: auto has to reach."""
    host_memory_budget: Annotated[Share | Size, Default(0.5)]
    """Share of the node's free host memory, divided by its ranks; or a size per rank, like "32GiB"."""


@closed
class CpuAffinityConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Bind each worker to the cores near its GPU, within the mask it was given."""
    bind_memory: Annotated[bool, Default(True)]
    """Take host memory from the node of those cores too."""
    map: Annotated[dict[Count, Count] | None, Default(None)]
    """{GPU: NUMA node}, by their indices; null: asked from the system."""


@closed
class OptimizerConfig(TypedDict):
    optimizer: Annotated[Literal["adam", "sgd"], Default("adam")]
    """Optimizer; adam decouples weight decay (AdamW)."""
    lr: Annotated[NonNegative, Default(5.0e-6)]
    """Highest learning rate."""
    min_lr: Annotated[NonNegative, Default(0.0)]
    """Lowest learning rate, where the decay ends."""
    weight_decay: Annotated[NonNegative, Default(0.01)]
    """Weight decay."""
    adam_beta1: Annotated[Beta, Default(0.9)]
    """Adam's decay of the mean of gradients."""
    adam_beta2: Annotated[Beta, Default(0.999)]
    """Adam's decay of the mean of squared gradients."""
    adam_eps: Annotated[float, Gt(0), Default(1.0e-8)]
    """Adam's term that keeps the denominator from zero."""
    sgd_momentum: Annotated[Beta, Default(0.9)]
    """Momentum of sgd."""
    clip_grad: Annotated[NonNegative, Default(1.0)]
    """Largest global gradient norm; 0 turns clipping off."""
    use_distributed_optimizer: Annotated[bool, Default(True)]
    """Split the optimizer's state over the data-parallel ranks."""
    use_precision_aware_optimizer: Annotated[bool, Default(False)]
    """Let Transformer Engine's Adam keep the main weights; needs adam and the distributed optimizer."""
    optimizer_cpu_offload: Annotated[bool, Default(False)]
    """Keep the optimizer's state and main weights in host memory; they pass through the GPU in each step."""
    optimizer_offload_fraction: Annotated[Fraction, Default(1.0)]
    """Share of their bytes that optimizer_cpu_offload keeps there."""


@closed
class SchedulerConfig(TypedDict):
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], Default("constant")]
    """Shape of the learning rate after warm-up."""
    lr_warmup_iters: Annotated[Count, Default(0)]
    """Steps of linear warm-up."""
    lr_decay_iters: Annotated[Positive | None, Default(None)]
    """Step at which min_lr is reached; null: the last."""
    lr_warmup_init: Annotated[NonNegative, Default(0.0)]
    """Learning rate at the start of the warm-up."""
    start_weight_decay: Annotated[NonNegative | None, Default(None)]
    """Weight decay of the first step; null: optimizer.weight_decay."""
    end_weight_decay: Annotated[NonNegative | None, Default(None)]
    """Weight decay from the step on at which the learning rate's decay ends; null: optimizer.weight_decay."""
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], Default("constant")]
    """How weight decay grows from the one to the other."""


@closed
class DistributedDataParallelConfig(TypedDict):
    grad_reduce_in_fp32: Annotated[bool, Default(True)]
    """Reduce gradients in float32 whatever the precision of the weights."""
    overlap_grad_reduce: Annotated[bool, Default(False)]
    """Reduce gradients during the backward pass."""
    overlap_param_gather: Annotated[bool, Default(False)]
    """Gather parameters during the forward pass; needs the distributed optimizer and overlap_grad_reduce."""


@closed
class PeftConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Freeze the model's weights and train low-rank adapters beside its linears (LoRA)."""
    # linear_qkv, linear_proj, linear_fc1, linear_fc2, or patterns of whole paths such as "*.layers.0.*.linear_proj".
    # An adapter for each projection, as peft has them: linear_q, linear_k, linear_v, linear_fc1_gate, linear_fc1_up.
    target_modules: Annotated[list[str], Default([])]
    """Linears that get an adapter; empty: all but exclude_modules."""
    exclude_modules: Annotated[list[str], Default([])]
    """Linears that get none, where target_modules is empty."""
    dim: Annotated[Positive, Default(8)]
    """Rank of the adapters."""
    alpha: Annotated[Positive, Default(32)]
    """An adapter's output is multiplied by alpha / dim."""
    dropout: Annotated[Beta, Default(0.0)]
    """Share of an adapter's input or output that is dropped in training."""
    dropout_position: Annotated[Literal["pre", "post"], Default("post")]
    """Drop of the input (pre) or of the output (post)."""
    lora_A_init_method: Annotated[Literal["xavier", "kaiming", "normal", "zero"], Default("xavier")]
    """How an adapter's first matrix begins."""
    lora_B_init_method: Annotated[Literal["xavier", "kaiming", "normal", "zero"], Default("zero")]
    """How its second matrix begins; with zero, the model begins as it is."""
    a2a_experimental: Annotated[bool, Default(False)]
    """With sequence parallelism, exchange an adapter's output all-to-all instead of gathering it."""
    lora_dtype: Annotated[Literal["float32", "bfloat16", "None"] | None, Default(None)]
    """Type of the adapters: policy.precision, as null says, too."""


@closed
class MegatronConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Train with Megatron-Core, the only backend."""
    transformer_impl: Annotated[Literal["auto", "torch", "transformer_engine"], Default("auto")]
    """Layer implementation; auto takes Transformer Engine where it can be imported, else torch."""
    env_vars: Annotated[dict[str, str] | None, Default(None)]
    """Environment variables of the workers, {NAME: "value"}, set before they import anything; null: none."""
    empty_unused_memory_level: Annotated[int, Ge(0), Le(2), Default(0)]
    """Hand cached device memory back: 0 never, 1 after training, 2 also after generation."""
    model_overrides: Annotated[dict[str, Any], Default({})]
    """Fields of Megatron-Core's TransformerConfig that have no key here, by name."""
    cpu_affinity: CpuAffinityConfig
    """Cores and memory near the GPU."""

    # Parallelism; all workers that these leave over are data parallel.
    tensor_model_parallel_size: Annotated[Positive, Default(1), Forwarded()]
    """Ranks that share each layer's weights."""
    pipeline_model_parallel_size: Annotated[Positive, Default(1), Forwarded()]
    """Ranks that share the layers."""
    virtual_pipeline_model_parallel_size: Annotated[Positive | None, Default(None), Forwarded()]
    """Parts of the layers that each pipeline rank takes turns with; null: one."""
    num_layers_in_first_pipeline_stage: Annotated[Positive | None, Default(None), Forwarded()]
    """Layers of the first pipeline rank; null: an even share."""
    num_layers_in_last_pipeline_stage: Annotated[Positive | None, Default(None), Forwarded()]
    """Layers of the last pipeline rank; null: an even share."""
    pipeline_model_parallel_layout: Annotated[str | None, Default(None), Forwarded()]
    """Stages as Megatron-Core writes them, like `Et*3|(tt|)*28L`; null: by the keys above."""
    overlap_p2p_comm: Annotated[bool, Default(False), Forwarded()]
    """Send between pipeline ranks during computation."""
    batch_p2p_comm: Annotated[bool, Default(True), Forwarded()]
    """Send between pipeline ranks in batches; excludes overlap_p2p_comm."""
    context_parallel_size: Annotated[Positive, Default(1), Forwarded()]
    """Ranks that share a sequence."""
    expert_model_parallel_size: Annotated[Positive, Default(1), Forwarded()]
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Annotated[Positive, Default(1), Forwarded()]
    """Ranks that share each expert's weights; only 1 so far."""
    sequence_parallel: Annotated[bool, Default(False), Forwarded()]
    """Split norms and dropout over the tensor-parallel ranks."""

    # Recomputation: what is not saved is computed again in the backward pass.

    activation_checkpointing: Annotated[bool | None, Default(None)]
    """NeMo-RL's switch: true recomputes, whole layers unless recompute_granularity says less; false does not."""
    recompute_granularity: Annotated[Literal["full", "selective"] | None, Default(None), Forwarded()]
    """Recompute whole layers, or the modules in recompute_modules, in the backward pass; null: nothing."""
    recompute_modules: Annotated[list[str] | None, Default(None), Forwarded(unless_null=True)]
    """Modules that selective recomputation covers, Megatron-Core's and mlp_act, mlp_fc1; null: core_attn."""
    recompute_method: Annotated[Literal["uniform", "block"] | None, Default(None), Forwarded()]
    """Which layers full recomputation covers: uniform groups of layers, or the first ones."""
    recompute_num_layers: Annotated[Positive | None, Default(None), Forwarded()]
    """Full: layers per uniform group, or number of first. Selective: layers with mlp or mlp_fc1; null: all."""

    # Activation offloading: what the listed modules save for backward waits in host memory instead of on the device.

    fine_grained_activation_offloading: Annotated[bool | None, Default(None)]
    """Keep the activations of offload_modules in host memory; false clears what the model says, null keeps it."""
    # The modules: attn_norm, qkv_linear, core_attn, attn_proj (needs core_attn), mlp_norm; in layers without experts
    # mlp_fc1, mlp_act; in layers with experts expert_fc1, moe_act, expert_fc2, shared_experts.
    offload_modules: Annotated[list[str] | Literal["auto"] | None, Default(None)]
    """Modules whose saved activations are offloaded; auto chooses for gpu_memory_budget; null: none."""
    min_offloaded_tensor_size: Annotated[Count, Default(1048576), Forwarded()]
    """Smallest tensor that is offloaded, in elements."""
    activation_offload_fraction: Annotated[Fraction, Default(1.0), Forwarded()]
    """Share of the groups that is offloaded, the earliest of a forward."""
    delta_offload_bytes_across_pp_ranks: Annotated[Count, Default(0), Forwarded()]
    """Bytes that each pipeline rank offloads less than the one before, in a step."""
    fine_grained_offloading_max_inflight_offloads: Annotated[Count | None, Default(None), Forwarded()]
    """Copies of a module on their way at a time; null: no limit."""
    delay_offload_until_cuda_graph: Annotated[bool, Default(False), Forwarded()]
    """Start copies when the CUDA graph of the next layer is launched."""
    activation_offload: ActivationOffloadConfig
    """How activations are offloaded."""
    cpu_offloading: Annotated[bool, Default(False), Forwarded()]
    """Transformer Engine's offloading of whole layers; excludes fine_grained_activation_offloading."""
    cpu_offloading_num_layers: Annotated[Count, Default(0), Forwarded()]
    """First layers that cpu_offloading covers."""

    # Buffers of fixed size for the experts.

    moe_paged_stash: Annotated[bool, Default(False), Forwarded()]
    """Keep what the experts save for backward in pages, not worst-case buffers."""
    moe_paged_stash_page_size: Annotated[Positive, Default(64), Forwarded()]
    """Size of a page, in tokens."""
    moe_paged_stash_buffer_size_factor_cuda: Annotated[float, Default(1.1), Forwarded()]
    """Size of the device's pages: positive, times the balanced case; negative, times the most a step needed."""
    moe_paged_stash_buffer_size_factor_cpu: Annotated[float, Default(0.0), Forwarded()]
    """Size of the pinned host pages for what the device's do not hold, with the same sign; 0: none."""
    moe_expert_rank_capacity_factor: Annotated[Annotated[float, Gt(0)] | None, Default(None), Forwarded()]
    """Rows of the buffer that a rank's experts get, times the balanced case; null: as many as come, read each time."""

    # CUDA graphs are not available yet.

    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"], Default("none"), Forwarded()
    ]
    """Who captures CUDA graphs; only none so far."""
    cuda_graph_modules: Annotated[list[str] | None, Default(None), Forwarded(unless_null=True)]
    """Parts of a layer that are captured; null: the whole layer."""
    cuda_graph_warmup_steps: Annotated[Count, Default(3), Forwarded()]
    """Steps before the capture."""

    # Experts. Null leaves what the model says.
    freeze_moe_router: Annotated[bool, Default(False)]
    """Do not train the weights that choose the experts."""
    moe_router_dtype: Annotated[Literal["fp32", "fp64"] | None, Default(None), Forwarded(unless_null=True)]
    """Type in which experts are chosen and weighted."""
    moe_router_load_balancing_type: Annotated[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None,
        Default(None),
        Forwarded(unless_null=True),
    ]
    """How the load of the experts is balanced."""
    moe_router_bias_update_rate: Annotated[NonNegative | None, Default(None), Forwarded(unless_null=True)]
    """Step of the bias that balances experts without a loss, for models that have one."""
    moe_aux_loss_coeff: Annotated[NonNegative | None, Default(None), Forwarded(unless_null=True)]
    """Weight of the experts' load-balancing loss."""
    moe_per_layer_logging: Annotated[bool, Default(False), Forwarded()]
    """Log the experts' balancing losses of each layer, besides their mean."""
    moe_token_dispatcher_type: Annotated[Literal["allgather", "alltoall", "flex"], Default("alltoall"), Forwarded()]
    """How tokens reach their experts; flex needs GPUs, bfloat16 and the library of its backend."""
    moe_flex_dispatcher_backend: Annotated[
        Literal["deepep", "hybridep", "ncclep"] | None, Default(None), Forwarded(unless_null=True)
    ]
    """Library behind the flex dispatcher; null: deepep."""
    moe_permute_fusion: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Sort tokens for their experts with Transformer Engine's kernels."""
    moe_shared_expert_overlap: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Compute the shared experts while tokens travel; needs the alltoall or flex dispatcher."""

    # Layers that predict further tokens (multi-token prediction).
    mtp_num_layers: Annotated[Count | None, Default(None)]
    """How many of the model's are trained: all, as null says too, or 0, which leaves them out of model and export."""
    mtp_loss_scaling_factor: Annotated[NonNegative | None, Default(None), Forwarded(unless_null=True)]
    """Weight of their loss beside the model's; null: Megatron-Bridge's for the family, 0.1 or 0.3."""
    mtp_detach_heads: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Keep their loss from training the rest of the model; null: false."""
    mtp_use_repeated_layer: Annotated[bool, Default(False)]
    """Train one layer in the place of several: the same with one, and not supported with more."""

    peft: PeftConfig
    """Adapters that are trained in place of the weights."""

    # The output head.
    use_fused_linear_logprobs: Annotated[bool, Default(True)]
    """Compute log-probabilities, entropy and top-k from hidden states, without the logits of all tokens."""
    fused_linear_logprobs_chunk_size: Annotated[Positive | None, Default(None)]
    """Tokens that are computed at a time then, by blocks of the vocabulary; null: at most 65,536."""

    # Kernels. Null leaves what the layer implementation takes by itself.
    apply_rope_fusion: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Rotate positions with Transformer Engine's kernel."""
    bias_activation_fusion: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Fuse bias and activation; null with transformer_impl: torch: where a GPU and a C compiler are there."""
    gradient_accumulation_fusion: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Add weight gradients inside the matrix product, with Transformer Engine."""
    use_transformer_engine_op_fuser: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Let Transformer Engine fuse operations; fused_group_mlp needs it."""
    attention_backend: Annotated[Literal["flash", "fused", "unfused", "local", "auto"] | None, Default(None)]
    """Transformer Engine's attention kernel."""
    layernorm_epsilon: Annotated[Annotated[float, Gt(0)] | None, Default(None), Forwarded(unless_null=True)]
    """Term that keeps the norms' denominator from zero."""

    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig
    """The learning rate and the weight decay over the steps."""
    distributed_data_parallel_config: DistributedDataParallelConfig
    """How gradients and parameters travel between data-parallel ranks."""


@closed
class ProblemsConfig(TypedDict):
    seed: Seed
    """Seed of the problem generator; problem i uses seed + i."""
    size: NumProblems
    """Number of problems, whose order is held in memory."""


@closed
class FurtherTrainingDataConfig(TypedDict):
    path: str
    """File, folder or hf://datasets/OWNER/NAME."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it; null: all."""
    split_validation_size: Annotated[NonNegative, Default(0.0)]
    """Records of it that are taken for validation: below 1 a share, else a number."""
    seed: Annotated[Seed, Default(1_000_000)]
    """Seed of both choices."""


@closed
class FurtherValidationDataConfig(TypedDict):
    path: str
    """File, folder or hf://datasets/OWNER/NAME."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it; null: all."""
    repeat: Annotated[Positive, Default(1)]
    """Times that each record is taken."""
    seed: Annotated[Seed, Default(10_000_000)]
    """Seed of the choice."""


@closed
class TrainingDataConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """File, folder or hf://datasets/OWNER/NAME: conversations (sft), pairs (dpo), problems; null: reasoning-gym's."""
    split: Annotated[str | None, Default(None)]
    """Split to take from a folder that holds several."""
    input_key: Annotated[str | None, Default(None)]
    """Where a record has its prompt, such as question or prompt.0.content; null: under one of the usual names."""
    output_key: Annotated[str | None, Default(None)]
    """Where a record has its answer; null: under one of the usual names."""
    max_samples: Annotated[Positive | None, Default(None)]
    """Records that are drawn from it, before any are taken for validation; null: all."""
    split_validation_size: Annotated[NonNegative, Default(0.0)]
    """Records that are taken for validation, besides data.validation: below 1 a share, else a number."""
    further: Annotated[list[FurtherTrainingDataConfig], Default([])]
    """Further data sets, with keys as these but for size. A list in data.train's place says the same."""
    seed: Annotated[Seed, Default(1_000_000)]
    """Seed of these choices, and of the problem generator; problem i uses seed + i."""
    size: Annotated[NumProblems, Default(20_000)]
    """Number of problems, whose order is held in memory."""


@closed
class ValidationDataConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """The same for validation."""
    split: Annotated[str | None, Default(None)]
    """The same for validation."""
    input_key: Annotated[str | None, Default(None)]
    """The same for validation."""
    output_key: Annotated[str | None, Default(None)]
    """The same for validation."""
    max_samples: Annotated[Positive | None, Default(None)]
    """The same for validation."""
    repeat: Annotated[Positive, Default(1)]
    """Times that each record is taken."""
    further: Annotated[list[FurtherValidationDataConfig], Default([])]
    """The same for validation."""
    seed: Annotated[Seed, Default(10_000_000)]
    """Seed of that choice, and of the problem generator; problem i uses seed + i."""
    size: Annotated[NumProblems, Default(256)]
    """Number of problems, whose order is held in memory."""
    exclude: Annotated[list[ProblemsConfig], Default([])]
    """List of {seed, size}: problems that validation must not contain, such as those the start model was trained on."""


@closed
class DataConfig(TypedDict):
    env_name: Annotated[EnvironmentName, Default("reasoning_gym")]
    """The section of env that scores responses (grpo, distillation)."""
    shuffle: Annotated[bool, Default(True)]
    """Draw training problems in random order, anew in each epoch."""
    max_input_seq_length: Annotated[Positive, Default(256)]
    """Longest prompt, in tokens."""
    prompt_template: Annotated[str | None, Default(None)]
    """Prompt around {question}; null: the tokenizer's chat template."""
    prompt_file: Annotated[str | None, Default(None)]
    """File with the text of a user's turn around the question, which stands at {}; null: the question alone."""
    system_prompt_file: Annotated[str | None, Default(None)]
    """File with the text of a system turn before it; null: none."""
    add_bos: Annotated[bool, Default(False)]
    """Begin a record with the tokenizer's beginning token where the chat template does not (sft, dpo)."""
    add_eos: Annotated[bool, Default(False)]
    """End a record's last turn with the end token where the chat template does not (sft, dpo)."""
    on_bad_line: Annotated[Literal["error", "skip"], Default("error")]
    """A record that cannot be used ends the run (error), or is left out and counted (skip)."""
    train: TrainingDataConfig
    """Training data; problems that validation contains are removed."""
    validation: ValidationDataConfig
    """Validation data."""


@closed
class ReasoningGymConfig(TypedDict):
    task: Annotated[str | None, Default(None)]
    """Name of a reasoning-gym data set; null where data comes from files."""
    params: Annotated[dict[str, Any], Default({})]
    """Parameters of that data set."""
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""
    timeout_s: Annotated[Seconds | None, Default(10.0)]
    """Seconds that the scoring of one response may take; a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that the scoring of one response may take; one that needs more counts 0. null: no limit."""
    binary_reward: Annotated[bool, Default(False)]
    """Reward 1 for a score from correct_threshold on and 0 below (true), or the score itself (false)."""
    correct_threshold: Annotated[Share, Default(0.999)]
    """Score from which a response counts as correct."""


@closed
class MathConfig(TypedDict):
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""
    comparison: Annotated[
        Literal["symbolic", "exact", "dapo", "english_multichoice", "multilingual_multichoice"], Default("symbolic")
    ]
    """Answers are equal by value (math-verify), as text; dapo: what follows "Answer:"; the others: a letter there."""
    thinking_tags: Annotated[list[str] | None, Default(["<think>", "</think>"])]
    """Begin and end of thinking, in which no answer is looked for; null: everywhere."""
    timeout_s: Annotated[Seconds | None, Default(10.0)]
    """Seconds that the scoring of one response may take; a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that the scoring of one response may take; one that needs more counts 0. null: no limit."""


@closed
class MathMultiRewardConfig(TypedDict):
    num_workers: Annotated[Positive, Default(1)]
    """Processes that score responses."""


@closed
class FunctionConfig(TypedDict):
    path: Annotated[str | None, Default(None)]
    """The function, as package.module:name."""
    params: Annotated[dict[str, Any], Default({})]
    """Further arguments of the function, by name."""
    num_workers: Annotated[Positive, Default(1)]
    """Processes that call it."""
    timeout_s: Annotated[Seconds | None, Default(60.0)]
    """Seconds that one call may take; the response of a longer one counts 0. null: no limit."""
    memory_limit: Annotated[Size | None, Default("4GiB")]
    """Memory that one call may take; a response that needs more counts 0. null: no limit."""


@closed
class EnvConfig(TypedDict):
    reasoning_gym: ReasoningGymConfig
    """Problems and their verification by reasoning-gym."""
    math: MathConfig
    """Verification of mathematical answers."""
    math_multi_reward: MathMultiRewardConfig
    """Several rewards for an answer between tags: correctness, format, integer."""
    function: FunctionConfig
    """Verification by a Python function."""


@closed
class TokenizerConfig(TypedDict):
    name: Annotated[str, Default("${policy.model_name}")]
    """Local folder with a Hugging Face tokenizer."""
    chat_template: Annotated[str | None, Default("default")]
    """Jinja text, a file's path, or the name of one of the tokenizer's; default: its own; null: texts alone."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, Default(None)]
    """Further arguments of the chat template, such as {enable_thinking: false}."""


@closed
class GenerationResources(TypedDict):
    gpus_per_node: Annotated[Positive | None, Default(None)]
    """On one machine: how many of its workers only generate."""
    num_nodes: Annotated[Positive | None, Default(None)]
    """On several machines: how many of them only generate."""


@closed
class ColocatedConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Generate in the training workers; false: in workers of their own, which take the weights over after each step."""
    resources: GenerationResources
    """With false: how many of the cluster's workers generate; the others train."""


@closed
class VllmConfig(TypedDict):
    async_engine: Annotated[bool, Default(False)]
    """Responses and episodes go on each by itself (true), or a batch of them in step (false)."""
    precision: Annotated[Literal["float32", "bfloat16", "float16"] | None, Default(None)]
    """Type of the engine's weights and activations; null: policy.precision."""
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"], Default("auto")]
    """Type of the key/value cache; auto: that of activations."""
    tensor_parallel_size: Annotated[Positive, Default(1)]
    """Devices that share each layer of an engine."""
    pipeline_parallel_size: Annotated[Positive, Default(1)]
    """Devices that divide an engine's layers."""
    expert_parallel_size: Annotated[Positive, Default(1)]
    """Devices that divide an engine's experts: tensor_parallel_size, or 1, where they share each expert."""
    gpu_memory_utilization: Annotated[Share, Default(0.6)]
    """The engine's share of a GPU's memory, weights and cache; on a CPU the most of its free memory for the cache."""
    max_model_len: Annotated[Positive | None, Default(None)]
    """Longest prompt and response together, in tokens; null: policy.max_total_sequence_length."""
    enable_prefix_caching: Annotated[bool, Default(True)]
    """Compute what prompts begin with in common once, until the weights change."""
    enforce_eager: Annotated[bool, Default(False)]
    """Decode without CUDA graphs; a CPU always does."""
    load_format: Annotated[Literal["auto", "safetensors"], Default("auto")]
    """How the engine reads the start model's files."""
    env_vars: Annotated[dict[str, str] | None, Default(None)]
    """Environment variables of the engines' processes, {NAME: "value"}; null: none."""
    skip_tokenizer_init: Annotated[bool, Default(True)]
    """Load no tokenizer into the engine, which gets and gives token ids; with `stop_strings` it has one."""


@closed
class GenerationConfig(TypedDict):
    backend: Annotated[GenerationBackend, Default("megatron")]
    """Engine that generates the responses."""
    colocated: ColocatedConfig
    """Which workers generate."""
    max_new_tokens: Annotated[Positive, Default(256)]
    """Longest response, in tokens."""
    temperature: Annotated[float, Gt(0), Default(1.0)]
    """Sampling temperature in training."""
    top_p: Annotated[Share, Default(1.0)]
    """Nucleus sampling: keep the likeliest tokens with this mass; 1: all."""
    top_k: Annotated[Positive | None, Default(None)]
    """Sample among this many most likely tokens; null keeps all."""
    val_temperature: Annotated[NonNegative, Default("${policy.generation.temperature}")]
    """Sampling temperature in validation; 0 takes the likeliest token."""
    val_top_p: Annotated[Share, Default("${policy.generation.top_p}")]
    """`top_p` in validation."""
    val_top_k: Annotated[Positive | None, Default("${policy.generation.top_k}")]
    """`top_k` in validation; null keeps all."""
    stop_token_ids: Annotated[list[Count] | None, Default(None)]
    """Tokens that end a response, besides those that end a turn of the model."""
    stop_strings: Annotated[list[str] | None, Default(None)]
    """Texts that end a response, as its last part."""
    vllm_cfg: VllmConfig
    """With backend vllm: its engines."""
    vllm_kwargs: Annotated[dict[str, Any], Default({})]
    """With backend vllm: further arguments of vllm.LLM, such as {max_num_seqs: 64}."""


@closed
class DynamicBatchingConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Put samples of similar length together, as many as fit."""
    train_mb_tokens: Annotated[
        Positive, Default("${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}")
    ]
    """Tokens of a microbatch in training, padding included."""
    logprob_mb_tokens: Annotated[
        Positive, Default("${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}")
    ]
    """The same when log-probabilities are computed."""
    sequence_length_round: Annotated[Positive | Literal["power_of_two"], Default(64)]
    """Lengths are filled up to a multiple of this, or to the next power of two."""


@closed
class SequencePackingConfig(DynamicBatchingConfig):
    enabled: Annotated[bool, Default(False)]
    """Write samples one after another without padding, as many as fit."""
    algorithm: Annotated[
        Literal["concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"],
        Default("modified_first_fit_decreasing"),
    ]
    """How samples are chosen: in their order (concatenative), or so that microbatches get full."""


@closed
class PolicyConfig(TypedDict):
    model_name: Annotated[str, Default("???")]
    """Local folder with the start model in Hugging Face format."""
    hf_config_overrides: Annotated[dict[str, Any], Default({})]
    """What the folder's config.json should say of positions: rope_scaling, rope_theta, max_position_embeddings."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    precision: Annotated[Literal["float32", "bfloat16"], Default("bfloat16")]
    """Type of weights and activations."""
    train_global_batch_size: Annotated[Positive, Default(512)]
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size: Annotated[Positive, Default(4)]
    """Samples per forward and backward pass of a rank."""
    logprob_batch_size: Annotated[Positive, Default(4)]
    """Samples per forward pass of a rank when log-probabilities are computed."""
    logprob_chunk_size: Annotated[Positive | None, Default(None)]
    """Positions of a row that log-probabilities and entropy are computed of at a time; null: all."""
    generation_batch_size: Annotated[Positive, Default(32)]
    """Samples that a rank generates at a time."""
    max_total_sequence_length: Annotated[Positive, Default(512)]
    """Longest prompt and response together, in tokens."""

    # Microbatches by a number of tokens instead of samples. Not both.
    dynamic_batching: DynamicBatchingConfig
    """Microbatches by a number of tokens, padded."""
    sequence_packing: SequencePackingConfig
    """Microbatches by a number of tokens, packed."""

    megatron_cfg: MegatronConfig
    """Megatron-Core: parallelism, recomputation, offloading, optimizer."""

    generation: GenerationConfig
    """How responses are sampled."""


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
    """Response length in tokens from which on the penalty is whole; null: policy.generation.max_new_tokens."""
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
    seq_logprob_error_threshold: Annotated[Annotated[float, Ge(1)] | None, Default(None)]
    """Responses whose own token_mult_prob_error is above this are not learned from; null: all are."""
    val_num_generations_per_prompt: Annotated[Positive, Default(1)]
    """Responses to each problem in validation; with more than 1, pass_k is the share of problems with a right one."""
    stop_at_validation_metric: Annotated[Literal["accuracy", "reward", "pass_k"] | None, Default(None)]
    """The run ends, after a checkpoint, when this metric of a validation reaches stop_at_validation_threshold."""
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
class TeacherConfig(TypedDict):
    model_name: Annotated[str | None, Default(None)]
    """Local folder of the teacher in Hugging Face format, with the student's vocabulary."""
    precision: Annotated[Literal["float32", "bfloat16"] | None, Default(None)]
    """Type of its weights; null: policy.precision."""
    logprob_batch_size: Annotated[Positive | None, Default(None)]
    """Samples per forward pass of a rank; null: policy.logprob_batch_size."""


@closed
class WandbConfig(TypedDict):
    project: Annotated[str, Default("nemo-rl-offload")]
    """Project of the run."""
    name: Annotated[str | None, Default(None)]
    """Name of the run; null: that of the run directory."""


@closed
class MlflowConfig(TypedDict):
    experiment_name: Annotated[str, Default("nemo-rl-offload")]
    """Experiment of the run."""
    run_name: Annotated[str | None, Default(None)]
    """Name of the run; null: that of the run directory."""
    tracking_uri: Annotated[str | None, Default(None)]
    """Server or store; null: mlflow.db in the run directory."""


@closed
class ProfileConfig(TypedDict):
    steps: Annotated[list[Positive], Default([])]
    """Steps that are recorded with torch's profiler, counted from 1, each as profile/step_N_rank_R.json.gz."""
    all_ranks: Annotated[bool, Default(False)]
    """Record every rank that trains, not the first alone."""


@closed
class LoggerConfig(TypedDict):
    tensorboard_enabled: Annotated[bool, Default(True)]
    """Write metrics for TensorBoard."""
    jsonl_enabled: Annotated[bool, Default(True)]
    """Write metrics to metrics.jsonl."""
    num_val_samples_to_print: Annotated[Count, Default(2)]
    """Responses that each validation shows, from the lowest to the highest reward."""
    num_samples_to_keep: Annotated[Count, Default(16)]
    """Responses of each validation, and of steps of training, that are added to samples.jsonl; 0: no such file."""
    sample_period: Annotated[Count, Default(10)]
    """Steps between those of training whose responses are kept; 0: those of validation alone."""
    profile: ProfileConfig
    """Traces of single steps, which Perfetto opens."""
    wandb_enabled: Annotated[bool, Default(False)]
    """Write metrics for Weights & Biases (`uv sync --group wandb`), offline unless WANDB_MODE says otherwise."""
    mlflow_enabled: Annotated[bool, Default(False)]
    """Write metrics for MLflow (`uv sync --group mlflow`)."""
    wandb: WandbConfig
    """Weights & Biases."""
    mlflow: MlflowConfig
    """MLflow."""


@closed
class EvalConfig(TypedDict):
    metric: Annotated[Literal["pass@k"], Default("pass@k")]
    """What `nemo-rl-offload eval` measures: the chance that one of k_value responses to a problem is right."""
    num_tests_per_prompt: Annotated[Positive, Default(1)]
    """Responses to each problem, sampled as in validation."""
    k_value: Annotated[Positive, Default(1)]
    """The k of pass@k; at most num_tests_per_prompt."""
    seed: Annotated[Seed, Default(42)]
    """Seed of the sampling."""
    save_path: Annotated[str | None, Default(None)]
    """Folder for figures and responses, where --run-dir gives none; null: results/eval_<config name>."""


@closed
class CheckpointingConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Write checkpoints."""
    checkpoint_dir: Annotated[str | None, Default(None)]
    """The run directory, where --run-dir gives none; null: results/<config name>."""
    save_period: Annotated[Positive, Default(10)]
    """Steps between checkpoints."""
    keep_top_k: Annotated[Positive | None, Default(3)]
    """Checkpoints that are kept, best first; null keeps all."""
    metric_name: Annotated[
        Literal["val:accuracy", "val:reward", "val:loss", "train:reward", "train:loss", None], Default("val:accuracy")
    ]
    """Metric that ranks checkpoints; null: the latest are kept."""
    higher_is_better: Annotated[bool, Default(True)]
    """Whether a higher metric is better."""
    checkpoint_must_save_by: Annotated[str | None, Default(None)]
    """DD:HH:MM:SS after its start by which a run has saved a checkpoint and ended; null: no such end."""
    is_async: Annotated[bool, Default(False)]
    """Write checkpoints while training goes on, from a copy in host memory."""


@closed
class FaultToleranceConfig(TypedDict):
    max_restarts: Annotated[Count, Default(0)]
    """Times that a run starts its workers again after one died or failed, from the last checkpoint."""
    grace_period_s: Annotated[NonNegative, Default(25)]
    """Seconds that a step and a checkpoint may take after SIGTERM; 0: end at once, without a checkpoint."""
    max_skipped_steps: Annotated[Count, Default(5)]
    """Steps in a row that may be skipped because the loss or a gradient is not finite; one more ends the run."""


@closed
class ClusterConfig(TypedDict):
    num_nodes: Annotated[Positive, Default(1)]
    """Machines."""
    gpus_per_node: Annotated[Positive | Literal["auto"], Default("auto")]
    """Workers per machine, one per GPU where there are GPUs; auto: all GPUs, or one worker on the CPU."""
    bind: Annotated[str, Default("auto")]
    """Network interface on which workers listen for each other; auto: loopback on one machine, else Ray's."""


@closed
class MasterConfig(TypedDict):
    algorithm: Annotated[Algorithm, Default("grpo")]
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
    eval: EvalConfig
    """Evaluation without training."""
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
