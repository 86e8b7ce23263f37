"""Rules about replaying generation's choice of experts: who makes the choice, and whose routers can take it."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, algorithm_has, megatron, model_shape
from nemo_rl_offload.config.rules.vllm import BACKEND, CFG

ENABLED = "policy.router_replay.enabled"
COMPARES = "seq_logprob_error_threshold"
"""A key of algorithms that compare training's log-probabilities with generation's."""


def _generation_chooses(get: Get) -> Iterator[str]:
    if not get(ENABLED):
        return
    if not algorithm_has(COMPARES, get):
        yield (
            f"{ENABLED}: true asks for router replay without GRPO, not supported here: in {get('algorithm')} no loss "
            "compares training with generation. Set it to false."
        )
    elif get(BACKEND) != "vllm":
        yield (
            f"{ENABLED}: true asks for router replay of generation by Megatron-Core, not supported here: it does not "
            f"say which experts it chose. Set it to false, or {BACKEND} to vllm."
        )
    elif get(f"{CFG}.pipeline_parallel_size") > 1:
        yield (
            f"{CFG}.pipeline_parallel_size: {ENABLED}: true asks for router replay of engines with pipeline "
            "parallelism, not supported here: vLLM returns no experts of them. Set it to 1."
        )


def _routers_can_replay(get: Get) -> Iterator[str]:
    if not get(ENABLED):
        return
    shape = model_shape(get)
    if not shape.has_experts:
        yield f"{ENABLED}: the model has no experts whose choice could be replayed. Set it to false."
    if shape.predicts_further_tokens:
        yield (
            f"{ENABLED}: true asks for router replay beside layers for further tokens, not supported here: generation "
            f"has no such layers. Set it to false, or {MEGATRON}.mtp_num_layers to 0."
        )
    if megatron(get, "moe_router_load_balancing_type") == "sinkhorn":
        yield (
            f"{MEGATRON}.moe_router_load_balancing_type: {ENABLED}: true asks for router replay of sinkhorn "
            "balancing, not supported here: it chooses the experts of all tokens together. Set another."
        )
    if megatron(get, "model_overrides").get("moe_router_fusion"):
        yield (
            f"{MEGATRON}.model_overrides.moe_router_fusion: the fused kernel chooses experts by itself, and {ENABLED} "
            "replays others. Remove one of the two."
        )


REPLAY_RULES: tuple[Rule, ...] = (_generation_chooses, _routers_can_replay)
