"""The arguments of vLLM's engine (`EngineArgs` of `VLLM_VERSION`), which `policy.generation.vllm_kwargs` may name.

A check asks without vLLM; a test compares the table where it is installed. Kinds are those of values in YAML; `any`
are sections, lists and words of vLLM's own, which it checks itself.
"""

from collections.abc import Mapping

_TABLE = """
any: additional_config all2all_backend allowed_media_domains attention_backend attention_config
  collect_detailed_traces compilation_config convert cpu_offload_params cudagraph_capture_sizes data_parallel_backend
  dcp_comm_backend default_mm_loras device_ids diffusion_config distributed_executor_backend dtype ec_transfer_config
  eplb_config expert_placement_strategy gdn_prefill_backend hf_overrides ignore_patterns ir_op_priority
  jit_monitor_mode kernel_config kv_cache_dtype kv_cache_dtype_skip_layers kv_events_config kv_offloading_backend
  kv_transfer_config limit_mm_per_prompt linear_backend logits_processors logprobs_mode lora_dtype lora_target_modules
  mamba_backend mamba_cache_dtype mamba_cache_mode mamba_config mamba_ssm_cache_dtype max_lora_rank media_io_kwargs
  mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_type mm_processor_kwargs mm_tensor_ipc
  model_class_overrides model_loader_extra_config moe_backend numa_bind_cpus numa_bind_nodes offload_params
  optimization_level override_generation_config performance_mode pooler_config prefix_caching_hash_algo
  profiler_config pt_load_map_location quantization_config reasoning_config runner safetensors_load_strategy
  scheduler_cls scheduling_policy served_model_name speculative_config structured_outputs_config tokenizer_mode
  weight_transfer_config
bool: aggregate_engine_logging allow_deprecated_quantization calculate_kv_scales cudagraph_metrics
  data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb disable_cascade_attn
  disable_chunked_mm_input disable_custom_all_reduce disable_log_stats disable_sliding_window enable_cumem_allocator
  enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel enable_flashinfer_autotune
  enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
  enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
  enable_prompt_embeds enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora enforce_eager
  fail_on_environ_validation fully_sharded_loras interleave_mm_strings jit_monitor_verbose kv_cache_metrics
  kv_sharing_fast_prefill language_model_only mm_encoder_only numa_bind ray_workers_use_nsight
  scheduler_reserve_full_isl skip_mm_profiling skip_tokenizer_init specialize_active_lora tokens_only
  trust_remote_code use_fp64_gumbel use_tqdm_on_load
bool|null: async_scheduling disable_hybrid_kv_cache_manager disable_nccl_for_dp_synchronization
  enable_bf16x3_router_gemm enable_chunked_prefill enable_prefix_caching
bool|null|text: hf_token
int: _api_process_count _api_process_rank cp_kv_cache_interleave_size data_parallel_size dbo_decode_token_threshold
  dbo_prefill_token_threshold dcp_kv_cache_interleave_size decode_context_parallel_size long_prefill_token_threshold
  mamba_cache_philox_rounds master_port max_logprobs max_long_partial_prefills max_loras max_model_len
  max_num_partial_prefills mm_shm_cache_max_object_size_mb nnodes node_rank offload_group_size offload_num_in_group
  offload_prefetch_step pipeline_parallel_size prefill_context_parallel_size prefill_schedule_interval
  renderer_num_workers safetensors_prefetch_block_size safetensors_prefetch_num_threads seed shutdown_timeout
  stream_interval tensor_parallel_size ubatch_size
int|null: block_size cpu_distributed_timeout_seconds data_parallel_rank data_parallel_rpc_port
  data_parallel_size_local data_parallel_start_rank distributed_timeout_seconds kv_cache_memory_bytes mamba_block_size
  max_cpu_loras max_cudagraph_capture_size max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
  max_parallel_loading_workers num_gpu_blocks_override prefix_match_unit spec_tokens
null|num: kv_offloading_size video_pruning_rate
null|text: code_revision data_parallel_address download_dir hf_config_path io_processor_plugin mm_encoder_attn_dtype
  mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path otlp_traces_endpoint override_attention_dtype quantization
  reasoning_parser_plugin revision show_hidden_metrics_for_version spec_method spec_model tokenizer tokenizer_revision
num: cpu_offload_gb gpu_memory_utilization kv_cache_metrics_sample mm_encoder_fp8_scale_save_margin
  mm_ipc_gpu_memory_gb mm_processor_cache_gb watermark
text: allowed_local_media_path config_format generation_config load_format master_addr model model_impl model_weights
  offload_backend reasoning_parser worker_cls worker_extension_cls
"""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "num": (int, float),
    "text": (str,),
    "null": (type(None),),
}
_WORDS = {"bool": "true or false", "int": "a whole number", "num": "a number", "text": "text", "null": "null"}


def _parsed() -> Mapping[str, str]:
    kinds: dict[str, str] = {}
    for line in _TABLE.replace("\n  ", " ").split("\n"):
        kind, _, names = line.partition(": ")
        kinds |= dict.fromkeys(names.split(), kind)
    return kinds


KINDS = _parsed()
"""Of each argument by its name, such as `int|null`."""


def fits(name: str, value: object) -> bool:
    """Whether a value is of a kind that an argument takes."""
    kinds = KINDS[name].split("|")
    return "any" in kinds or any(
        isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool)) for kind in kinds
    )


def allowed(name: str) -> str:
    """The kinds that an argument takes, in words."""
    return ", or ".join(_WORDS[kind] for kind in reversed(KINDS[name].split("|")) if kind != "any")
