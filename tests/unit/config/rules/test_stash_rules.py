"""Rules about the experts' buffers and the paged stash: what breaks each, and the nearest legal configuration."""

from collections.abc import Callable

import pytest

Refuses = Callable[[str, str, str, str], None]
M = "policy.megatron_cfg"

TE = "M.activation_offload.engine=megatron M.transformer_impl=transformer_engine"
FUSER = "M.use_transformer_engine_op_fuser=true"
HYBRID = "M.moe_token_dispatcher_type=flex M.moe_flex_dispatcher_backend=hybridep"
STASH = f"MOE {TE} M.offload_modules=[core_attn] M.moe_paged_stash=true {HYBRID} {FUSER}"
CAPACITY = "M.moe_expert_rank_capacity_factor=1.5"
OURS = f"MOE M.transformer_impl=torch M.offload_modules=[core_attn] M.moe_paged_stash=true {CAPACITY}"
SELECTIVE = "M.recompute_granularity=selective"
FULL = "M.recompute_granularity=full M.recompute_method=uniform M.recompute_num_layers=1 M.offload_modules=[attn_norm]"

CASES = [
    (STASH, "moe_expert_rank_capacity_factor", "moe_paged_stash needs it", CAPACITY),
    (
        f"{STASH} {CAPACITY} M.offload_modules=[expert_fc1]",
        "offload_modules",
        "'expert_fc1' is covered by moe_paged_stash already",
        "M.offload_modules=[core_attn]",
    ),
    (f"{STASH} {CAPACITY} DENSE", "moe_paged_stash", "needs layers with experts", "MOE"),
    (
        f"{STASH} {CAPACITY} M.moe_flex_dispatcher_backend=null",
        "moe_expert_rank_capacity_factor",
        "needs moe_flex_dispatcher_backend hybridep or ncclep",
        "M.moe_flex_dispatcher_backend=ncclep",
    ),
    (
        f"{STASH} {CAPACITY} M.use_transformer_engine_op_fuser=null",
        "moe_expert_rank_capacity_factor",
        "needs use_transformer_engine_op_fuser with hybridep",
        FUSER,
    ),
    (
        f"{OURS} M.moe_expert_rank_capacity_factor=null",
        "moe_expert_rank_capacity_factor",
        "moe_paged_stash needs it",
        CAPACITY,
    ),
    (
        f"{OURS} M.offload_modules=[core_attn,expert_fc2]",
        "offload_modules",
        "'expert_fc2' is covered by moe_paged_stash already",
        "M.offload_modules=[core_attn]",
    ),
    (
        f"{OURS} {SELECTIVE} M.recompute_modules=[moe]",
        "moe_paged_stash",
        "experts save nothing while recompute_modules has 'moe'",
        "M.recompute_modules=[moe_act]",
    ),
    (
        f"{OURS} {FULL}",
        "moe_paged_stash",
        "experts save nothing with recompute_granularity full",
        "M.moe_paged_stash=false",
    ),
    (
        f"{OURS} M.transformer_impl=auto",
        "moe_expert_rank_capacity_factor",
        "only layers in torch have such buffers",
        "M.transformer_impl=torch",
    ),
    (
        f"{OURS} M.expert_model_parallel_size=2 M.moe_token_dispatcher_type=alltoall",
        "moe_token_dispatcher_type",
        "by an all-gather. Set allgather",
        "M.moe_token_dispatcher_type=allgather",
    ),
    (
        f"{OURS} M.moe_shared_expert_overlap=true M.moe_token_dispatcher_type=alltoall",
        "moe_expert_rank_capacity_factor",
        "cannot be combined with moe_shared_expert_overlap",
        "M.moe_shared_expert_overlap=null",
    ),
]


@pytest.mark.parametrize(("broken", "key", "words", "legal"), CASES)
def test_rules(refuses: Refuses, broken: str, key: str, words: str, legal: str) -> None:
    refuses(broken, f"{M}.{key}", words, legal)
