"""What is said to a vLLM engine: environment, arguments, sampling parameters, and who gets which prompts.

Imports nothing of vLLM, so that the driver and a test without it can ask.
"""

import re
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.rules.rule import read_shape
from nemo_rl_offload.config.rules.vllm import context_length, devices_of_engine
from nemo_rl_offload.config.schema import GenerationConfig, PolicyConfig, VllmConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.specs.catalogue import read_config_file, read_text_part
from nemo_rl_offload.specs.generation import (
    ENV,
    ENV_OF_CPU,
    ENV_OF_CUDA,
    ENV_OF_DEEP_GEMM,
    ENV_OF_FIRST_RUNNER,
    ENV_OF_SEVERAL_DEVICES,
)
from nemo_rl_offload.specs.model_keys import Content, rope_section, rope_type, with_overrides

MAX_NUM_SEQS = 256
"""Responses that an engine works on at a time, vLLM's own default; others wait for a place."""
CPU_BLOCK_SIZE = 128
"""Tokens of a block of the key/value cache on a CPU."""
PEER_TIMEOUT_S = 600
"""How long one device of an engine waits for another; they work in step."""

ROUTING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
}
"""By `model_type`, where experts are and how they are chosen, where vLLM asks a `config.json` for it and transformers
does not: a file that transformers has written says nothing of it, and vLLM would take another way."""


class Request(NamedTuple):
    """One response that an engine is asked for, by itself."""

    number: int
    """Its name between driver and engine."""
    prompt: list[int]
    seed: int
    place: int
    """Among all that `seed` is for."""
    sampling: Sampling


def engine_env(config: GenerationConfig, device: str) -> dict[str, str]:
    """Environment variables of the engines' processes, of no others; `device` is "cuda" or "cpu"."""
    env = ENV | (ENV_OF_SEVERAL_DEVICES if devices_of_engine(config["vllm_cfg"]) > 1 else {})
    if device == "cpu":
        env |= ENV_OF_CPU
    else:
        # The second runner draws with one seed a request in one kernel, the first in one each. But the first alone can
        # be told what log-probabilities to return where top-k or top-p cut the distribution, and what it does with
        # drafts is what has been tried.
        env |= ENV_OF_CUDA | (ENV_OF_FIRST_RUNNER if is_truncated(config) or speculates(config) else {})
        env |= ENV_OF_DEEP_GEMM if is_in_eight_bits(config) and config["vllm_cfg"]["use_deep_gemm"] else {}
    return (config["vllm_cfg"]["env_vars"] or {}) | env


def is_in_eight_bits(config: GenerationConfig) -> bool:
    """Whether an engine quantizes the weights that it gets."""
    return config["vllm_cfg"]["precision"] == "fp8"


def is_truncated(config: GenerationConfig) -> bool:
    """Whether sampling leaves tokens out, in training or in validation."""
    is_cut = config["top_k"] is not None or config["top_p"] < 1
    return is_cut or config["val_top_k"] is not None or config["val_top_p"] < 1


def speculates(config: GenerationConfig) -> bool:
    """Whether engines check drafts of several tokens at once."""
    return config["vllm_kwargs"].get("speculative_config") is not None


def dtype_of_engine(config: PolicyConfig) -> str:
    """Type of what an engine does not keep in 8 bits."""
    precision = config["generation"]["vllm_cfg"]["precision"]
    return config["precision"] if precision in (None, "fp8") else precision


def _quantization(cfg: VllmConfig, num_layers: int) -> dict[str, Any]:
    """Weights in 8 bits with a scale for each 128 x 128 of them, made from those of a folder or an update.

    Routers stay as they are, by whose choice experts differ. Words stand anywhere in a linear's path, as in NeMo-RL.
    """
    first, last = cfg["num_first_layers_in_bf16"], cfg["num_last_layers_in_bf16"]
    whole = [*range(first), *range(num_layers - last, num_layers)]
    patterns = [r".*\.gate$", *(f".*{re.escape(word)}" for word in cfg["quantization_ignored_layer_kws"])]
    if whole:
        patterns.append(rf".*\.layers\.({'|'.join(map(str, whole))})\.")
    ignored = [f"re:{pattern}" for pattern in patterns]
    return {
        "quantization": "online",
        "quantization_config": {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": ignored},
    }


def engine_arguments(
    config: PolicyConfig, model_path: Path, *, is_cpu: bool, can_sleep: bool, cache_bytes: int | None
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; the user's `vllm_kwargs` come last. `cache_bytes` is of the cache on a CPU."""
    generation = config["generation"]
    cfg, longest = generation["vllm_cfg"], context_length(config)
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "dtype": dtype_of_engine(config),
        "kv_cache_dtype": cfg["kv_cache_dtype"],
        "load_format": cfg["load_format"],
        "tensor_parallel_size": cfg["tensor_parallel_size"],
        "pipeline_parallel_size": cfg["pipeline_parallel_size"],
        "enable_expert_parallel": cfg["expert_parallel_size"] > 1,
        "gpu_memory_utilization": cfg["gpu_memory_utilization"],
        "max_model_len": longest,
        "enforce_eager": cfg["enforce_eager"],
        "skip_tokenizer_init": cfg["skip_tokenizer_init"],
        "max_num_seqs": MAX_NUM_SEQS,
        "enable_prefix_caching": cfg["enable_prefix_caching"],
        "enable_return_routed_experts": config["router_replay"]["enabled"],
        "generation_config": "vllm",  # not the model's: nothing is sampled otherwise than the configuration says
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        "worker_extension_cls": "nemo_rl_offload.generation.vllm.extension.WeightsInPlace",
    }
    if is_in_eight_bits(generation):
        arguments |= _quantization(cfg, read_shape(str(model_path)).num_layers)
    if generation["stop_strings"]:  # which an engine finds in the text
        tokenizer = resolve_tokenizer_path(config["tokenizer"]["name"])
        arguments |= {"tokenizer": str(tokenizer.resolve()), "skip_tokenizer_init": False}
    if read_text_part(model_path / "config.json") is not None:
        arguments["language_model_only"] = True  # prompts are text, and an update brings no weights of a tower
    if overrides := _overrides(model_path, config["hf_config_overrides"]):
        arguments["hf_overrides"] = overrides
    if speculates(generation):
        # What an update brings begins with a token that is known; with a step under way it would be one of several.
        arguments["async_scheduling"] = False
        if "hf_overrides" in arguments:
            arguments["hf_overrides"] = partial(_overridden, arguments["hf_overrides"])  # which drafts are told as well
    if devices_of_engine(cfg) > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
        # Its own sums open memory of the other devices, by numbers that processes which see one device do not share.
        arguments["disable_custom_all_reduce"] = True
        for group in ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"):
            arguments[group] = PEER_TIMEOUT_S
    if is_cpu:
        # Random numbers of one request cannot be taken back there, which a prompt in pieces would need.
        pieces = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, longest)}
        arguments |= {**pieces, "enforce_eager": True, "kv_cache_memory_bytes": cache_bytes}
    else:
        arguments["enable_sleep_mode"] = can_sleep
        arguments["moe_backend"] = "triton"  # others put weights into an order of their own, once
        if not cfg["enforce_eager"]:
            # Graphs of decoding without a compiler: as fast as with it, and built in a fifth of the time.
            arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    own = dict(generation["vllm_kwargs"])
    if speculates(generation) and (model := own["speculative_config"].get("model")) is not None:
        own["speculative_config"] = {**own["speculative_config"], "model": str(resolve_model_path(model))}
    return arguments | own


def _overridden(changes: Content, config: Any) -> Any:
    config.update(changes)
    return config


def _overrides(model_path: Path, overrides: Content | None) -> dict[str, Any]:
    content = read_config_file(model_path / "config.json")
    positions = _positions(with_overrides(content, overrides)) if overrides else {}
    return positions | ROUTING.get(content.get("model_type", ""), {})


def _positions(content: Content) -> dict[str, Any]:
    """What `policy.hf_config_overrides` make of the model's positions, as transformers' newer files say it."""
    theta = {key: content[key] for key in ("rope_theta",) if key in content}
    section = {"rope_type": rope_type(content), **theta, **rope_section(content)}
    longest = {key: content[key] for key in ("max_position_embeddings",) if key in content}
    return {"rope_parameters": {key: value for key, value in section.items() if key != "type"}, **longest}


def sampling_arguments(sampling: Sampling, end_ids: Sequence[int], num_left: int) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` but for the seed; the same distribution as `megatron_sampling.sample`.

    `num_left`: tokens that the prompt leaves of the longest sequence.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "max_tokens": min(sampling.max_new_tokens, num_left),
        "stop_token_ids": list(end_ids),
        "stop": list(sampling.stop_strings),
        "ignore_eos": True,  # `end_ids` say what ends a response
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop_strings),
    }


def request_seed(seed: int, number: int) -> int:
    """The seed of a request, by its place among all prompts: who answers it makes no difference."""
    return int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()) >> 1


def check_room(prompts: Sequence[Sequence[int]], sampling: Sampling, longest: int) -> None:
    """Raise ConfigError where a prompt leaves no room for a response in `longest` tokens."""
    if (most := max(map(len, prompts), default=0)) >= longest:
        raise ConfigError(
            f"policy.generation.vllm_cfg.max_model_len: {longest} tokens are too few for a prompt of {most} and a "
            f"response. Set at least {most + sampling.max_new_tokens}."
        )


def divide(num_tokens: Sequence[int], num_engines: int) -> list[slice]:
    """Cut requests into one piece an engine, in order, so that the pieces have about as many tokens.

    Neighbours stay together: they are answers to one prompt, whose cache an engine computes once.
    """
    total, sums = sum(num_tokens), [0]
    for count in num_tokens:
        sums.append(sums[-1] + count)
    cuts = [0]
    for engine in range(1, num_engines):
        wanted = total * engine / num_engines
        nearest = min(range(len(sums)), key=lambda place: abs(sums[place] - wanted))
        cuts.append(max(nearest, cuts[-1]))
    return [slice(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(num_tokens)], strict=True)]
