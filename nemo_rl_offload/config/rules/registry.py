"""All rules, in the order in which `check` prints what they say."""

from nemo_rl_offload.config.rules.async_grpo import ASYNC_RULES, ASYNC_WARNINGS
from nemo_rl_offload.config.rules.batching import BATCHING_RULES, BATCHING_WARNINGS
from nemo_rl_offload.config.rules.cuda_graphs import CUDA_GRAPH_RULES, CUDA_GRAPH_WARNINGS
from nemo_rl_offload.config.rules.effects import EFFECT_WARNINGS
from nemo_rl_offload.config.rules.fp8 import FP8_RULES, FP8_WARNINGS
from nemo_rl_offload.config.rules.generation import GENERATION_RULES
from nemo_rl_offload.config.rules.lora import LORA_RULES, LORA_WARNINGS
from nemo_rl_offload.config.rules.machine import (
    LOCAL_PATH_RULES,
    MACHINE_RULES,
    bind_interface,
    env_vars,
    function_fits,
    model_can_be_read,
    model_is_unknown,
    split_of_a_file,
)
from nemo_rl_offload.config.rules.megatron import MEGATRON_RULES, MEGATRON_WARNINGS, model_overrides
from nemo_rl_offload.config.rules.model import MODEL_RULES, MODEL_WARNINGS
from nemo_rl_offload.config.rules.nemo_gym import GYM_MACHINE_RULES, GYM_RULES, GYM_WARNINGS
from nemo_rl_offload.config.rules.offload import OFFLOAD_RULES, OFFLOAD_WARNINGS, STASH_RULES
from nemo_rl_offload.config.rules.parallel import PARALLEL_RULES
from nemo_rl_offload.config.rules.quantization import QUANTIZATION_RULES, QUANTIZATION_WARNINGS
from nemo_rl_offload.config.rules.router_replay import REPLAY_RULES
from nemo_rl_offload.config.rules.rule import Rule
from nemo_rl_offload.config.rules.speculative import SPECULATIVE_RULES
from nemo_rl_offload.config.rules.tasks import TASK_RULES, TASK_WARNINGS
from nemo_rl_offload.config.rules.turns import TURN_RULES, TURN_WARNINGS
from nemo_rl_offload.config.rules.vllm import VLLM_MACHINE_RULES, VLLM_RULES
from nemo_rl_offload.config.rules.vllm_devices import VLLM_DEVICE_RULES

RULES: tuple[Rule, ...] = (
    *LOCAL_PATH_RULES,
    *STASH_RULES,
    model_can_be_read,
    *MODEL_RULES,
    *OFFLOAD_RULES,
    *CUDA_GRAPH_RULES,
    *MEGATRON_RULES,
    *LORA_RULES,
    *PARALLEL_RULES,
    bind_interface,
    env_vars,
    model_overrides,
    *BATCHING_RULES,
    *TASK_RULES,
    function_fits,
    *TURN_RULES,
    *GENERATION_RULES,
    *VLLM_RULES,
    *SPECULATIVE_RULES,
    *VLLM_DEVICE_RULES,
    *REPLAY_RULES,
    *FP8_RULES,
    *QUANTIZATION_RULES,
    *ASYNC_RULES,
    *GYM_RULES,
)
RULES_OF_THIS_MACHINE: tuple[Rule, ...] = (*MACHINE_RULES, *VLLM_MACHINE_RULES, *GYM_MACHINE_RULES)
"""What a run needs here, and a check elsewhere does not."""
WARNINGS: tuple[Rule, ...] = (
    model_is_unknown,
    split_of_a_file,
    *MODEL_WARNINGS,
    *OFFLOAD_WARNINGS,
    *CUDA_GRAPH_WARNINGS,
    *MEGATRON_WARNINGS,
    *LORA_WARNINGS,
    *BATCHING_WARNINGS,
    *TASK_WARNINGS,
    *TURN_WARNINGS,
    *ASYNC_WARNINGS,
    *GYM_WARNINGS,
    *FP8_WARNINGS,
    *QUANTIZATION_WARNINGS,
    *EFFECT_WARNINGS,
)
