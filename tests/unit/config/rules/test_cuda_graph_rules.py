"""CUDA graphs of layers: what breaks each rule, the essential words, the nearest legal configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest

Refusals = Callable[[str], list[str]]
MakeModel = Callable[..., Path]
M = "policy.megatron_cfg"

GRAPH, PARTS = "M.cuda_graph_impl", "M.cuda_graph_modules"
PLAIN = "M.transformer_impl=transformer_engine policy.precision=bfloat16 M.fine_grained_activation_offloading=false"
ON = f"{PLAIN} {GRAPH}=transformer_engine"
OFF = f"{GRAPH}=none {PARTS}=null"
ROUTER = f"{ON} MOE {PARTS}=[attn,moe_router] M.moe_shared_expert_overlap=false"
EXPERTS = f"{ROUTER} {PARTS}=[attn,moe_router,moe_preprocess] M.moe_permute_fusion=true"
OFFLOADS = "M.fine_grained_activation_offloading=true M.offload_modules"
SELECTIVE = "M.recompute_granularity=selective M.recompute_modules"
PACKS = "policy.sequence_packing.enabled=true"
VLLM = "policy.generation.backend=vllm"


@pytest.mark.parametrize(
    "legal",
    [
        ON,
        f"{ON} {PARTS}=[attn]",
        f"{ON} {PARTS}=[attn,mlp]",
        f"{ON} {PARTS}=[mlp] {PACKS}",
        ROUTER,
        EXPERTS,
        f"{ON} MOE {PARTS}=[attn] M.expert_model_parallel_size=2",
        f"{ON} M.tensor_model_parallel_size=2 M.sequence_parallel=true",
        f"{ON} {PARTS}=[attn] {OFFLOADS}=[mlp_fc1,mlp_act]",
        f"{ON} {PARTS}=[mlp] {OFFLOADS}=[qkv_linear,core_attn,attn_proj]",
        f"{EXPERTS} {OFFLOADS}=[expert_fc1,moe_act]",
        f"{EXPERTS} {OFFLOADS}=[expert_fc1] M.activation_offload.engine=megatron",
        f"{ON} {PARTS}=[attn] {SELECTIVE}=[mlp]",
        f"{EXPERTS} {SELECTIVE}=[moe_act]",
    ],
)
def test_what_is_captured(refusals: Refusals, legal: str) -> None:
    assert refusals(legal) == []


@pytest.mark.parametrize(
    ("broken", "key", "words", "legal"),
    [
        (f"{PLAIN} {GRAPH}=local", "cuda_graph_impl", "fails on a microbatch of another shape", OFF),
        (f"{PLAIN} {GRAPH}=full_iteration", "cuda_graph_impl", "losses and metrics are read on the host", ON),
        (f"{ON} M.transformer_impl=torch", "cuda_graph_impl", "which transformer_impl: torch leaves out", ON),
        (f"{ON} {PARTS}=[atn]", "cuda_graph_modules", "Did you mean 'attn'?", f"{PARTS}=[attn]"),
        (f"{ON} {PARTS}=[attn,moe_router]", "cuda_graph_modules", "needs layers with experts", ROUTER),
        (f"{ROUTER} {PARTS}=[attn,mlp]", "cuda_graph_modules", "needs layers without experts", f"{PARTS}=[attn]"),
        (f"{ROUTER} {PARTS}=[moe]", "cuda_graph_modules", "drop and pad tokens", f"{PARTS}=[moe_router]"),
        (f"{ROUTER} {PARTS}=null", "cuda_graph_modules", "null captures whole layers", f"{PARTS}=[attn]"),
        (f"{EXPERTS} {PARTS}=[moe_preprocess]", "cuda_graph_modules", "needs 'moe_router'", EXPERTS),
        (f"{EXPERTS} M.moe_permute_fusion=null", "cuda_graph_modules", "without which the host counts", ROUTER),
        (f"{EXPERTS} M.expert_model_parallel_size=2", "cuda_graph_modules", "microbatches of other shapes", ROUTER),
        (
            f"{EXPERTS} M.moe_token_dispatcher_type=flex M.expert_model_parallel_size=2",
            "cuda_graph_modules",
            "cannot be captured with moe_token_dispatcher_type flex",
            ROUTER,
        ),
        (
            f"{ROUTER} M.moe_router_load_balancing_type=sinkhorn M.moe_aux_loss_coeff=0",
            "cuda_graph_modules",
            "it counts until it is even",
            f"{PARTS}=[attn]",
        ),
        (
            f"{ROUTER} M.moe_router_load_balancing_type=global_aux_loss",
            "cuda_graph_modules",
            "ranks would wait for each other",
            "M.moe_router_load_balancing_type=aux_loss",
        ),
        (f"{ROUTER} M.moe_shared_expert_overlap=null", "moe_shared_expert_overlap", "Set it to false", ROUTER),
        (f"{ON} {PACKS}", "cuda_graph_modules", "where a pack's sequences end", f"{PARTS}=[mlp]"),
        (f"{ON} {PARTS}=[attn] {PACKS}", "cuda_graph_modules", "'attn' asks for", f"{PARTS}=[mlp]"),
        (f"{ON} M.pipeline_model_parallel_size=2", "pipeline_model_parallel_size", "a graph holds one", OFF),
        (f"{ON} M.context_parallel_size=2", "context_parallel_size", "what ranks send each other", OFF),
        (
            f"{ON} M.distributed_data_parallel_config.overlap_param_gather=true "
            "M.distributed_data_parallel_config.overlap_grad_reduce=true M.optimizer.use_distributed_optimizer=true",
            "distributed_data_parallel_config.overlap_param_gather",
            "a replay waits for no weights",
            OFF,
        ),
        (f"{ON} M.peft.enabled=true", "peft.enabled", "nobody has tried it", OFF),
        (f"{ON} M.use_transformer_engine_op_fuser=true", "use_transformer_engine_op_fuser", "nobody has tried", OFF),
        (f"{ON} M.gradient_accumulation_fusion=true", "gradient_accumulation_fusion", "and they move", OFF),
        (f"{ON} M.cpu_offloading=true", "cpu_offloading", "a replay moves nothing", OFF),
        (
            f"{ON} M.cuda_graph_warmup_steps=0",
            "cuda_graph_warmup_steps",
            "Set 1 or more",
            "M.cuda_graph_warmup_steps=1",
        ),
        (
            f"{ON} +M.model_overrides.fp32_residual_connection=true",
            "model_overrides.fp32_residual_connection",
            "cannot be combined",
            OFF,
        ),
        (f"{ON} +M.model_overrides.cuda_graph_scope=full", "model_overrides.cuda_graph_scope", "is set by policy.", ""),
        (
            f"{ON} M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1",
            "cuda_graph_impl",
            "a recomputed layer cannot be captured",
            OFF,
        ),
        (f"{ON} M.activation_checkpointing=true", "cuda_graph_impl", "a recomputed layer", OFF),
        (f"{ON} {SELECTIVE}=[core_attn]", "recompute_modules", "within 'attn'", f"{PARTS}=[mlp]"),
        (f"{ON} {PARTS}=[mlp] {SELECTIVE}=[mlp_act]", "recompute_modules", "within 'mlp'", f"{PARTS}=[attn]"),
        (f"{ROUTER} {SELECTIVE}=[moe]", "recompute_modules", "within 'moe_router'", f"{PARTS}=[attn]"),
        (f"{ON} {OFFLOADS}=[core_attn]", "offload_modules", "whole layers are captured", f"{PARTS}=[mlp]"),
        (f"{ON} {PARTS}=[attn] {OFFLOADS}=[qkv_linear]", "offload_modules", "'attn' is captured", f"{PARTS}=[mlp]"),
        (f"{ON} {PARTS}=[mlp] {OFFLOADS}=[mlp_act]", "offload_modules", "'mlp' is captured", f"{PARTS}=[attn]"),
        (f"{EXPERTS} {OFFLOADS}=[mlp_norm]", "offload_modules", "'attn' is captured", f"{OFFLOADS}=[moe_act]"),
        (
            f"{ROUTER} {OFFLOADS}=[qkv_linear] M.activation_offload.engine=megatron",
            "offload_modules",
            "'attn' is captured",
            f"{PARTS}=[moe_router]",
        ),
        (
            f"{ON} {PARTS}=[attn] {OFFLOADS}=auto M.activation_offload.gpu_memory_budget=72GiB",
            "offload_modules",
            "List modules",
            f"{OFFLOADS}=[mlp_act]",
        ),
    ],
)
def test_a_rule_refuses(refusals: Refusals, broken: str, key: str, words: str, legal: str) -> None:
    lines = refusals(broken)
    found = [line for line in lines if line.startswith(f"{M}.{key}: ") and words in line]
    assert found, lines
    if legal:
        assert not any(line in found for line in refusals(f"{broken} {legal}"))


@pytest.mark.parametrize(
    ("broken", "path", "words", "legal"),
    [
        (f"{ON} policy.precision=float32", "policy.precision", "in bfloat16 alone", "policy.precision=bfloat16"),
        (f"{ON} policy.quant_cfg=W4A16_NVFP4_CFG", "policy.quant_cfg", "nobody has tried it", "policy.quant_cfg=null"),
        (f"{ON} M.fp8_cfg.enabled=true", f"{M}.fp8_cfg.enabled", "at other addresses", "M.fp8_cfg.enabled=false"),
        (
            f"{ON} {VLLM} policy.generation.colocated.enabled=true",
            "policy.generation.colocated.enabled",
            "weights may leave the GPUs",
            "policy.generation.backend=megatron",
        ),
        (
            f"{ROUTER} {VLLM} policy.router_replay.enabled=true",
            f"{M}.cuda_graph_modules",
            "the experts of another batch",
            f"{PARTS}=[attn]",
        ),
    ],
)
def test_what_others_say_refuses(refusals: Refusals, broken: str, path: str, words: str, legal: str) -> None:
    assert [line for line in refusals(broken) if line.startswith(f"{path}: ") and words in line]
    assert not [line for line in refusals(f"{broken} {legal}") if words in line]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8}, "CUDA graphs of latent attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "CUDA graphs of attention with yarn"),
        ({"num_nextn_predict_layers": 1}, "CUDA graphs of layers for further tokens"),
    ],
)
def test_models_whose_layers_are_not_captured(
    shape: dict[str, object], words: str, refusals: Refusals, make_model: MakeModel
) -> None:
    model = f"policy.model_name={make_model(**shape)}"
    assert [line for line in refusals(f"{ON} {model}") if words in line]
    assert not [line for line in refusals(f"{PLAIN} {model}") if words in line]
