"""Where generation's choice of experts can be replayed, and what is said elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest

Refuses = Callable[..., None]
ON = "policy.router_replay.enabled=true"
OFF = "policy.router_replay.enabled=false"
ENABLED = "policy.router_replay.enabled"
VLLM = "policy.generation.backend=vllm"
M = "policy.megatron_cfg"


@pytest.mark.parametrize(
    ("broken", "path", "words", "legal"),
    [
        (f"{VLLM} {ON}", ENABLED, "the model has no experts", OFF),
        (f"MOE {ON}", ENABLED, "router replay of generation by Megatron-Core, not supported", VLLM),
        (
            f"MOE {ON} algorithm=sft checkpointing.metric_name=null",
            ENABLED,
            "router replay without GRPO, not supported here: in sft",
            OFF,
        ),
        (
            f"MOE {VLLM} {ON} policy.generation.vllm_cfg.pipeline_parallel_size=2",
            "policy.generation.vllm_cfg.pipeline_parallel_size",
            "vLLM returns no experts of them. Set it to 1",
            "policy.generation.vllm_cfg.pipeline_parallel_size=1",
        ),
        (
            f"MOE {VLLM} {ON} M.moe_router_load_balancing_type=sinkhorn M.moe_aux_loss_coeff=0",
            f"{M}.moe_router_load_balancing_type",
            "router replay of sinkhorn balancing, not supported",
            "M.moe_router_load_balancing_type=none",
        ),
        (
            f"MOE {VLLM} {ON} +M.model_overrides.moe_router_fusion=true",
            f"{M}.model_overrides.moe_router_fusion",
            "chooses experts by itself",
            OFF,
        ),
        (
            f"MOE {VLLM} {ON} +policy.generation.vllm_kwargs.enable_return_routed_experts=false",
            "policy.generation.vllm_kwargs.enable_return_routed_experts",
            f"{ENABLED} says it. Set that, and remove this",
            "~policy.generation.vllm_kwargs.enable_return_routed_experts",
        ),
    ],
)
def test_rules(refuses: Refuses, broken: str, path: str, words: str, legal: str) -> None:
    refuses(broken, path, words, legal)


def test_layers_for_further_tokens_are_left_out(refuses: Refuses, make_model: Callable[..., Path]) -> None:
    model = f"policy.model_name={make_model(n_routed_experts=8, num_nextn_predict_layers=1)}"
    legal = f"M.mtp_num_layers=0 {model}"
    refuses(f"{VLLM} {ON} {model}", ENABLED, "router replay beside layers for further tokens", legal)
