"""The section `policy.megatron_cfg`: how Megatron-Core builds, offloads and optimizes the model.

Where a key may be null and nothing else is said, null leaves what the model's own configuration says.
"""

from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Gt, Le

from nemo_rl_offload.config.types import Beta, Count, Fraction, NonNegative, Positive, Share, Size, closed


@closed
class ActivationOffloadConfig(TypedDict):
    engine: Literal["native", "megatron"]
    """Who moves the activations: this project's engine, or Megatron-Core's (needs Transformer Engine)."""
    gpu_memory_budget: Size | None
    """Device memory that a rank may use ("72GiB"): what offload_modules: auto has to reach."""
    host_memory_budget: Share | Size
    """Host memory: share of the node's free memory, divided by its ranks, or a size per rank ("32GiB")."""


@closed
class CpuAffinityConfig(TypedDict):
    enabled: bool
    """Bind each worker to the cores near its GPU; a mask that it was given is never widened."""
    bind_memory: bool
    """Take host memory from the node of those cores too."""
    map: dict[Count, Count] | None
    """NUMA node of each GPU, by GPU index; null: asked from the system."""


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
    use_precision_aware_optimizer: bool
    """Let Transformer Engine's Adam keep the main weights; needs adam and the distributed optimizer."""
    optimizer_cpu_offload: bool
    """Keep the optimizer's state in host memory and step there; only false so far."""
    optimizer_offload_fraction: Fraction
    """Share of the optimizer's state that optimizer_cpu_offload keeps in host memory."""


@closed
class SchedulerConfig(TypedDict):
    lr_decay_style: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after warm-up."""
    lr_warmup_iters: Count
    """Steps of linear warm-up."""
    lr_decay_iters: Positive | None
    """Step at which min_lr is reached; null: the last."""
    lr_warmup_init: NonNegative
    """Learning rate at the start of the warm-up."""
    start_weight_decay: NonNegative | None
    """Weight decay of the first step; null: optimizer.weight_decay."""
    end_weight_decay: NonNegative | None
    """Weight decay from the step on at which the learning rate's decay ends; null: optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    """How weight decay grows from the one to the other."""


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
    env_vars: dict[str, str] | None
    """Environment variables of the workers, set before they import anything; null: none."""
    empty_unused_memory_level: Annotated[int, Ge(0), Le(2)]
    """Hand cached device memory back: 0 never, 1 after training, 2 also after generation."""
    model_overrides: dict[str, Any]
    """Fields of Megatron-Core's TransformerConfig that have no key here, by name."""
    cpu_affinity: CpuAffinityConfig
    """Cores and memory near the GPU."""

    tensor_model_parallel_size: Positive
    """Ranks that share each layer's weights."""
    pipeline_model_parallel_size: Positive
    """Ranks that share the layers."""
    virtual_pipeline_model_parallel_size: Positive | None
    """Parts of the layers that each pipeline rank takes turns with; null: one."""
    num_layers_in_first_pipeline_stage: Positive | None
    """Layers of the first pipeline rank; null: an even share."""
    num_layers_in_last_pipeline_stage: Positive | None
    """Layers of the last pipeline rank; null: an even share."""
    overlap_p2p_comm: bool
    """Send between pipeline ranks during computation."""
    batch_p2p_comm: bool
    """Send between pipeline ranks in batches; excludes overlap_p2p_comm."""
    context_parallel_size: Positive
    """Ranks that share a sequence."""
    expert_model_parallel_size: Positive
    """Ranks that share the experts."""
    expert_tensor_parallel_size: Positive
    """Ranks that share each expert's weights; only 1 so far."""
    sequence_parallel: bool
    """Split norms and dropout over the tensor-parallel ranks."""

    activation_checkpointing: bool | None
    """NeMo-RL's switch: true recomputes, whole layers unless recompute_granularity says less; false does not."""
    recompute_granularity: Literal["full", "selective"] | None
    """Recompute whole layers, or the modules in recompute_modules, in the backward pass; null: nothing."""
    recompute_modules: list[str] | None
    """Modules that selective recomputation covers, Megatron-Core's and mlp_act, mlp_fc1; null: core_attn."""
    recompute_method: Literal["uniform", "block"] | None
    """Which layers full recomputation covers: uniform groups of layers, or the first ones."""
    recompute_num_layers: Positive | None
    """Full: layers per uniform group, or number of first. Selective: layers with mlp or mlp_fc1; null: all."""

    fine_grained_activation_offloading: bool | None
    """Keep the activations of offload_modules in host memory; false clears what the model says, null keeps it."""
    offload_modules: list[str] | Literal["auto"] | None
    """Modules whose saved activations are offloaded; auto chooses for gpu_memory_budget; null: none."""
    min_offloaded_tensor_size: Count
    """Smallest tensor that is offloaded, in elements."""
    activation_offload_fraction: Fraction
    """Share of the groups of activations that is offloaded, the earliest of a forward."""
    delta_offload_bytes_across_pp_ranks: Count
    """Bytes that each pipeline rank offloads less than the one before, in a step."""
    fine_grained_offloading_max_inflight_offloads: Count | None
    """Copies of a module on their way at a time; null: no limit."""
    delay_offload_until_cuda_graph: bool
    """Start copies when the CUDA graph of the next layer is launched."""
    activation_offload: ActivationOffloadConfig
    """How activations are offloaded."""
    cpu_offloading: bool
    """Transformer Engine's offloading of whole layers; excludes fine_grained_activation_offloading."""
    cpu_offloading_num_layers: Count
    """First layers that cpu_offloading covers."""

    moe_paged_stash: bool
    """Keep what the experts save for backward in pages instead of worst-case buffers."""
    moe_paged_stash_page_size: Positive
    """Size of a page, in tokens."""
    moe_paged_stash_buffer_size_factor_cuda: float
    """Size of the device's pages: positive, times the balanced case; negative, times the most a step needed."""
    moe_paged_stash_buffer_size_factor_cpu: float
    """Size of the pinned host pages for what the device's do not hold, with the same sign; 0: none."""
    moe_expert_rank_capacity_factor: Annotated[float, Gt(0)] | None
    """Rows of the buffer that a rank's experts get, times the balanced case; null: as many as come, read each time."""

    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"]
    """Who captures CUDA graphs; only none so far."""
    cuda_graph_modules: list[str] | None
    """Parts of a layer that are captured; null: the whole layer."""
    cuda_graph_warmup_steps: Count
    """Steps before the capture."""

    freeze_moe_router: bool
    """Do not train the weights that choose the experts."""
    moe_router_dtype: Literal["fp32", "fp64"] | None
    """Type in which experts are chosen and weighted."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    """How the load of the experts is balanced."""
    moe_router_bias_update_rate: NonNegative | None
    """Step of the bias that balances experts without a loss, for models that have one."""
    moe_aux_loss_coeff: NonNegative | None
    """Weight of the experts' load-balancing loss."""
    moe_per_layer_logging: bool
    """Log the experts' balancing losses of each layer, besides their mean."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"]
    """How tokens reach their experts; flex is not available yet."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] | None
    """Library behind the flex dispatcher; null: deepep."""
    moe_permute_fusion: bool | None
    """Sort tokens for their experts with Transformer Engine's kernels."""
    moe_shared_expert_overlap: bool | None
    """Compute the shared experts while tokens travel; needs the alltoall or flex dispatcher."""

    apply_rope_fusion: bool | None
    """Rotate positions with Transformer Engine's kernel."""
    bias_activation_fusion: bool | None
    """Fuse bias and activation; null with transformer_impl: torch: where a GPU and a C compiler are there."""
    gradient_accumulation_fusion: bool | None
    """Add weight gradients inside the matrix product, with Transformer Engine."""
    use_transformer_engine_op_fuser: bool | None
    """Let Transformer Engine fuse operations; fused_group_mlp needs it."""
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None
    """Transformer Engine's attention kernel."""
    layernorm_epsilon: Annotated[float, Gt(0)] | None
    """Term that keeps the norms' denominator from zero."""

    optimizer: OptimizerConfig
    """The optimizer."""
    scheduler: SchedulerConfig
    """The learning rate and the weight decay over the steps."""
    distributed_data_parallel_config: DistributedDataParallelConfig
    """How gradients and parameters travel between data-parallel ranks."""
