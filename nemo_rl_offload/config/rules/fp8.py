"""Rules about 8 bits: products in training (`policy.megatron_cfg.fp8_cfg`), and linears of vLLM's engines.

What only the GPU can tell, such as whether it has the kernels of a recipe, is looked at when a worker builds its model.
"""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    algorithm_spec,
    is_native,
    megatron,
    model_shape,
    offloaded,
    read_shape,
    recompute,
    recomputed,
)
from nemo_rl_offload.config.rules.vllm import BACKEND, CFG, is_used
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.model_shape import ModelShape

FP8 = f"{MEGATRON}.fp8_cfg"
LEAST_WIDTH = 16
"""What divides both sides of a weight in 8 bits (Transformer Engine's `assert_dim_for_fp8_exec`, and for gradients
the other side, too)."""
WIDTH_OF_SCALES = {"mxfp8": 32}
"""The same where one scale is of so many elements."""
IGNORED = f"{CFG}.quantization_ignored_layer_kws"
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)
"""Linears that vLLM multiplies at once, in 8 bits or not."""

ROUTED = "routed experts' intermediate_size"


def is_on(get: Get) -> bool:
    """Whether training multiplies in 8 bits."""
    return bool(get(f"{FP8}.enabled"))


def rolls_out(get: Get) -> bool:
    """Whether responses come from engines in 8 bits."""
    return is_used(get) and get(f"{CFG}.precision") == "fp8"


def _refused(path: str, value: str, feature: str, why: str, fix: str) -> str:
    return f"{path}: {value} asks for {feature}, not supported here: {why}. {fix}"


def _training(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    if get("policy.precision") != "bfloat16":
        yield f"policy.precision: {FP8}.enabled needs bfloat16, in which the rest is computed. Set that."
    if get(f"{FP8}.fp8_recipe") == "delayed":
        yield _refused(
            f"{FP8}.fp8_recipe",
            "delayed",
            "delayed scaling",
            "scales would come from the batches before, of validation and log-probabilities as well",
            "Set tensorwise or blockwise.",
        )
    if get(f"{FP8}.fp8_param"):
        yield _refused(
            f"{FP8}.fp8_param",
            "true",
            "weights in 8 bits",
            "exports, checkpoints and engines get those in bfloat16",
            "Set it to false.",
        )
    if megatron(get, "peft.enabled"):
        yield _refused(
            f"{MEGATRON}.peft.enabled",
            "true",
            "LoRA beside linears in 8 bits",
            "nobody has tried it",
            f"Set it to false, or {FP8}.enabled.",
        )
    if megatron(get, "cpu_offloading"):
        yield _refused(
            f"{MEGATRON}.cpu_offloading",
            "true",
            "offloading of whole layers in 8 bits",
            "nobody has tried it",
            "Set it to false, and take fine_grained_activation_offloading.",
        )
    if algorithm_spec(get).generates and get(BACKEND) == "megatron":
        yield _refused(
            BACKEND,
            "megatron",
            "generation in 8 bits by Megatron-Core",
            f"products of single tokens have no {LEAST_WIDTH} rows",
            f"Set it to vllm, or {FP8}.enabled to false.",
        )


def _model_in_training(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    sizes = [megatron(get, key) for key in ("tensor_model_parallel_size", "expert_tensor_parallel_size")]
    multiple = WIDTH_OF_SCALES.get(get(f"{FP8}.fp8_recipe"), LEAST_WIDTH)
    for owner, shape in _models(get):
        if shape.has_states:
            yield _refused(
                f"{FP8}.enabled",
                "true",
                f"8 bits in layers with states of the {owner}",
                "nobody has tried it",
                "Set it to false.",
            )
            continue
        for what, width in _widths(shape, *sizes):
            if width % multiple:
                yield (
                    f"{FP8}.enabled: the {owner}'s {what} {width} on a rank is no multiple of {multiple}, which "
                    f"products in 8 bits need. Set it to false, or change "
                    f"{'expert_tensor' if ROUTED in what else 'tensor_model'}_parallel_size."
                )
        if megatron(get, "first_last_layers_bf16"):
            yield from _wide_layers(get, owner, shape.num_layers)


def _wide_layers(get: Get, owner: str, num_layers: int) -> Iterator[str]:
    ends = [f"num_layers_at_{end}_in_bf16" for end in ("start", "end")]
    counts = [megatron(get, end) for end in ends]
    most = num_layers // megatron(get, "pipeline_model_parallel_size")
    for end, count in zip(ends, counts, strict=True):
        if count > most:
            yield f"{MEGATRON}.{end}: {count} is above the {most} layers of the {owner} in a pipeline stage. Lower it."
    if max(counts) <= most and sum(counts) >= num_layers:
        yield (
            f"{MEGATRON}.{ends[0]}: with {ends[1]}, {counts[0]} + {counts[1]} of the {owner}'s {num_layers} layers "
            f"leave none in 8 bits. Lower them, or set {FP8}.enabled to false."
        )


def _models(get: Get) -> Iterator[tuple[str, ModelShape]]:
    """Those that training's workers compute in 8 bits."""
    yield "model", model_shape(get)
    if algorithm_spec(get).needs_teacher and (name := get("teacher.model_name")) is not None:
        try:
            yield "teacher", read_shape(name)
        except ConfigError:  # which another rule reports
            return


def _inputs_of_recomputation(get: Get) -> Iterator[str]:
    """In 8 bits Megatron-Core recomputes by Transformer Engine's checkpoint, which has no region of the engine."""
    if not is_on(get) or not is_native(get) or not megatron(get, "fine_grained_activation_offloading"):
        return
    path = f"{MEGATRON}.offload_modules"
    is_whole = recompute(get)["recompute_granularity"] == "full"
    if is_whole or ("mlp" in recomputed(get) and "mlp_fc1" in offloaded(get)):
        yield _refused(
            path,
            "this" if is_whole else "'mlp_fc1'",
            f"offloading of what {'full recomputation' if is_whole else 'recomputation of mlp'} keeps in 8 bits",
            "Transformer Engine keeps it",
            "Recompute less, or set fine_grained_activation_offloading to false." if is_whole else "Remove it.",
        )


def _widths(shape: ModelShape, tensor: int, expert_tensor: int) -> Iterator[tuple[str, int]]:
    """The sides of linears in the layers, in elements on each of `tensor` ranks, or of those that share each expert,
    and what they are."""
    yield "hidden_size", shape.hidden_size
    if shape.has_dense_layers:
        yield "intermediate_size", shape.ffn_hidden_size // tensor
    if (experts := shape.experts) is not None:
        yield ROUTED, experts.ffn_hidden_size // expert_tensor
        if experts.shared_ffn_hidden_size:
            yield "shared experts' intermediate_size", experts.shared_ffn_hidden_size // tensor
    heads = shape.num_attention_heads // tensor
    yield "width of attention's output", heads * shape.value_head_dim
    if (latent := shape.latent_attention) is not None:
        yield "width of queries", heads * shape.query_head_dim
        yield "width of keys and values", heads * (latent.nope_head_dim + latent.value_head_dim)
        yield "kv_lora_rank", latent.key_value_rank
        yield "kv_lora_rank with positions", latent.key_value_rank + latent.rope_head_dim
        if latent.query_rank is not None:
            yield "q_lora_rank", latent.query_rank
    else:
        groups = max(1, shape.num_key_value_heads // tensor)
        yield "width of queries, keys and values", (heads + 2 * groups) * shape.head_dim


def _rollouts(get: Get) -> Iterator[str]:
    if not rolls_out(get):
        return
    if get("policy.precision") != "bfloat16":
        yield f"policy.precision: {CFG}.precision fp8 needs bfloat16, in which the rest is computed. Set that."
    if get(f"{CFG}.is_mx"):
        yield _refused(
            f"{CFG}.is_mx", "true", "MXFP8 in generation", "it needs Blackwell, and nobody has tried it", "Set false."
        )
    shape = model_shape(get)
    if shape.has_states or shape.attention_sinks:
        part = "states" if shape.has_states else "sinks of attention"
        yield _refused(
            f"{CFG}.precision", "fp8", f"engines in 8 bits of a model with {part}", "nobody has tried it", "Set null."
        )
    first, last = (get(f"{CFG}.num_{end}_layers_in_bf16") for end in ("first", "last"))
    if first + last >= shape.num_layers:
        yield (
            f"{CFG}.num_first_layers_in_bf16: with num_last_layers_in_bf16, {first} + {last} of the model's "
            f"{shape.num_layers} layers leave none in 8 bits. Lower them, or set precision to bfloat16."
        )
    words = get(IGNORED)
    if not all(words):
        yield f"{IGNORED}: an empty word is in every path. Remove it."
    elif words:
        yield from _ignored_words(words, shape)


def _ignored_words(words: list[str], shape: ModelShape) -> Iterator[str]:
    """A word stands in the path of a linear; what is multiplied at once is in 8 bits as a whole or not at all."""
    paths = [
        [f"model.layers.{number}.{name}" for name in group]
        for number, has_experts in enumerate(shape.layers_with_experts)
        for group in _linears(shape, has_experts)
    ]
    for word in words:
        if not any(word in path for group in paths for path in group):
            known = ", ".join(dict.fromkeys(path.split(".", 3)[-1] for group in paths for path in group))
            yield f"{IGNORED}: '{word}' is in no linear's path. Remove it, or take part of a name: {known}."
    told = set()
    for group in paths:
        ignored = [path.rsplit(".", 1)[-1] for path in group if any(word in path for word in words)]
        others = [path.rsplit(".", 1)[-1] for path in group if not any(word in path for word in words)]
        if ignored and others and (pair := (*ignored, "", *others)) not in told:
            told.add(pair)
            yield (
                f"{IGNORED}: these words leave {', '.join(ignored)} out and not {', '.join(others)}, which vLLM "
                "multiplies at once. Name all of them, or none."
            )


def _linears(shape: ModelShape, has_experts: bool) -> Iterator[tuple[str, ...]]:
    """By Hugging Face's names below a layer, those in a group that vLLM joins; routers are never in 8 bits."""
    yield ("self_attn.o_proj",)
    if (latent := shape.latent_attention) is None:
        yield JOINED[0]
    else:
        yield ("self_attn.kv_b_proj",)
        if latent.query_rank is None:
            yield from (("self_attn.q_proj",), ("self_attn.kv_a_proj_with_mqa",))
        else:
            yield from (("self_attn.q_b_proj",), JOINED[1])
    if not has_experts:
        yield from (JOINED[2], ("mlp.down_proj",))
        return
    yield ("mlp.experts",)
    if shape.experts is not None and shape.experts.shared_ffn_hidden_size:
        yield from (JOINED[3], ("mlp.shared_experts.down_proj",))


FP8_RULES: tuple[Rule, ...] = (_training, _model_in_training, _inputs_of_recomputation, _rollouts)


def _other_probabilities(get: Get) -> Iterator[str]:
    key = "use_importance_sampling_correction"
    is_learned_from = key in algorithm_spec(get).loss_fn_keys
    if not is_learned_from or get(f"loss_fn.{key}") or not (is_on(get) or rolls_out(get)):
        return
    what = f"{CFG}.precision is fp8" if rolls_out(get) else f"{FP8}.enabled is true"
    yield (
        f"loss_fn.{key}: false while {what}: responses have other probabilities in the engine than in training. "
        "Set it to true."
    )


FP8_WARNINGS: tuple[Rule, ...] = (_other_probabilities,)
