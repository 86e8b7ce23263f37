"""Keys of `policy.megatron_cfg`: optimizer, schedule, adapters, layout, recomputation, offloading, experts."""

from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Le

from nemo_rl_offload.config.types import (
    Beta,
    Count,
    Default,
    Forwarded,
    Fraction,
    NonNegative,
    Positive,
    Share,
    Size,
    closed,
)


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
    """Weight decay; biases and norms have none."""
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
    """Steps after which min_lr is reached; null: all, so that the last is a little above it."""
    lr_warmup_init: Annotated[NonNegative, Default(0.0)]
    """Learning rate at the start of the warm-up."""
    start_weight_decay: Annotated[NonNegative | None, Default(None)]
    """Weight decay of the first step; null: optimizer.weight_decay."""
    end_weight_decay: Annotated[NonNegative | None, Default(None)]
    """Weight decay when the learning rate's decay has ended; null: optimizer.weight_decay."""
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
    # linear_qkv, linear_proj, linear_fc1, linear_fc2, output_layer, or patterns of paths: "*.layers.0.*.linear_proj".
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
    share_expert_adapters: Annotated[bool, Default(True)]
    """All experts of a layer share an adapter for each of their linears; false: each expert has its own."""
    lora_dtype: Annotated[Literal["float32", "bfloat16", "None"] | None, Default(None)]
    """Type of the adapters: policy.precision, as null says, too."""


@closed
class Fp8Config(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Multiply in 8 bits in the linears of the layers, forward and backward; needs Transformer Engine."""
    fp8: Annotated[Literal["e4m3", "hybrid"], Default("e4m3")]
    """Format of 8 bits: e4m3 for all, or hybrid, with e5m2 for gradients."""
    fp8_recipe: Annotated[Literal["tensorwise", "delayed", "blockwise", "mxfp8"], Default("blockwise")]
    """What shares a scale: a tensor, or 128 x 128 weights and 128 activations; mxfp8 needs Blackwell."""
    fp8_param: Annotated[bool, Default(False)]
    """Keep the weights themselves in 8 bits; only false so far."""


@closed
class MegatronConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Train with Megatron-Core, the only backend."""
    transformer_impl: Annotated[Literal["auto", "torch", "transformer_engine"], Default("auto")]
    """Layer implementation; auto: Transformer Engine where it imports and has the model's layers, else torch."""
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
    """Ranks that share each expert's weights, whatever tensor_model_parallel_size is."""
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

    # CUDA graphs of layers in training, with Transformer Engine's layers: one for each shape of microbatches that comes
    # again.

    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"], Default("none"), Forwarded()
    ]
    """Who captures CUDA graphs of layers: transformer_engine, or none; local and full_iteration are refused."""
    cuda_graph_modules: Annotated[list[str] | None, Default(None), Forwarded(unless_null=True)]
    """Parts of a layer that are captured; null: the whole layer."""
    cuda_graph_warmup_steps: Annotated[Count, Default(3), Forwarded()]
    """Steps that a shape of microbatches was in before it is captured."""

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
    """How many are trained: all, as null says too, or 0, which leaves them out. Of a repeated one, how many times."""
    mtp_loss_scaling_factor: Annotated[NonNegative | None, Default(None), Forwarded(unless_null=True)]
    """Weight of their loss beside the model's; null: Megatron-Bridge's for the family, 0.1 or 0.3."""
    mtp_detach_heads: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Keep their loss from training the rest of the model; null: false."""
    mtp_use_repeated_layer: Annotated[bool, Default(False)]
    """Use a hybrid model's one layer mtp_num_layers times, each time on what it gave; no effect with 1."""

    peft: PeftConfig
    """Adapters that are trained in place of the weights."""

    fp8_cfg: Fp8Config
    """Products in 8 bits."""
    first_last_layers_bf16: Annotated[bool, Default(False), Forwarded()]
    """With fp8_cfg, keep the first and the last layers out of it, as many as the next two keys say."""
    num_layers_at_start_in_bf16: Annotated[Count, Default(1), Forwarded()]
    """First layers that stay in bfloat16 then."""
    num_layers_at_end_in_bf16: Annotated[Count, Default(1), Forwarded()]
    """Last layers that stay in bfloat16 then."""

    # The output head.
    use_fused_linear_logprobs: Annotated[bool, Default(True)]
    """Compute log-probabilities, entropy and top-k from hidden states, without the logits of all tokens."""
    fused_linear_logprobs_chunk_size: Annotated[Positive | None, Default(None)]
    """Tokens that are computed at a time then, by blocks of the vocabulary; null: at most 65,536."""

    # Kernels. Null leaves what the layer implementation takes by itself.
    apply_rope_fusion: Annotated[bool | None, Default(None), Forwarded(unless_null=True)]
    """Rotate positions with Transformer Engine's kernel; null: with its layers, but for latent attention."""
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
