"""Rules about quantization-aware training: what its configuration says, and beside what it trains."""

import fnmatch
from collections.abc import Iterator, Sequence

from nemo_rl_offload.config.loader import path_of_quantization
from nemo_rl_offload.config.rules.fp8 import is_on as is_in_eight_bits
from nemo_rl_offload.config.rules.fp8 import rolls_out
from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    ReportedError,
    Rule,
    algorithm_spec,
    megatron,
    model_content,
    model_shape,
)
from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.hybrid_layers import ATTENTION, MAMBA
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.quantization import (
    INPUT,
    NAMED,
    OF_ATTENTION,
    OUTPUT,
    WEIGHT,
    Quantization,
    find_quantization,
)

QUANT_CFG = "policy.quant_cfg"
OF_GENERATION = "policy.generation.quant_cfg"
_HEAD = "output_layer"


def is_on(get: Get) -> bool:
    """Whether weights are quantized in training."""
    return get(QUANT_CFG) is not None


def linears(
    shape: ModelShape, latent_size: int | None, num_parts: int, num_expert_parts: int
) -> Iterator[tuple[str, int]]:
    """Megatron's names of a model's linears, those in layers for further tokens apart, and the elements of a row on a
    rank, where so many ranks share each layer and each expert, which computes in `latent_size` elements if any."""
    hidden, experts = shape.hidden_size, shape.experts
    for number, has_experts in enumerate(shape.layers_with_experts):
        letter = shape.hybrid_layers[number : number + 1]
        parts: list[tuple[str, int]] = []
        if letter == MAMBA and (mamba := shape.mamba) is not None:
            parts += [("mixer.in_proj", hidden), ("mixer.out_proj", mamba.num_heads * mamba.head_dim // num_parts)]
        elif not letter or letter == ATTENTION:
            parts += [(f"self_attention.{name}", width) for name, width in _attention(shape, num_parts)]
        if shape.layer_kinds[number].mlp == "dense":
            parts += [("mlp.linear_fc1", hidden), ("mlp.linear_fc2", shape.ffn_hidden_size // num_parts)]
        if has_experts and experts is not None:
            parts += [
                ("mlp.experts.linear_fc1", latent_size or hidden),
                ("mlp.experts.linear_fc2", experts.ffn_hidden_size // num_expert_parts),
            ]
            if latent_size is not None:
                parts += [("mlp.fc1_latent_proj", hidden), ("mlp.fc2_latent_proj", latent_size)]
            if width := experts.shared_ffn_hidden_size:
                parts += [
                    ("mlp.shared_experts.linear_fc1", hidden),
                    ("mlp.shared_experts.linear_fc2", width // num_parts),
                ]
        yield from ((f"decoder.layers.{number}.{part}", width) for part, width in parts)
    yield _HEAD, hidden


def _attention(shape: ModelShape, num_parts: int) -> Iterator[tuple[str, int]]:
    hidden = shape.hidden_size
    if (latent := shape.latent_attention) is None:
        yield "linear_qkv", hidden
    else:
        if latent.query_rank is None:
            yield "linear_q_proj", hidden
        else:
            yield from (("linear_q_down_proj", hidden), ("linear_q_up_proj", latent.query_rank))
        yield from (("linear_kv_down_proj", hidden), ("linear_kv_up_proj", latent.key_value_rank))
    yield "linear_proj", shape.num_attention_heads * shape.value_head_dim // num_parts


def _found(get: Get) -> Quantization:
    """Ends the rule where the configuration is not known, which another rule reports."""
    try:
        return find_quantization(path_of_quantization(get(QUANT_CFG)))
    except ConfigError as error:
        raise ReportedError from error


def _rows(get: Get) -> dict[str, int]:
    sizes = [megatron(get, key) for key in ("tensor_model_parallel_size", "expert_tensor_parallel_size")]
    return dict(linears(model_shape(get), model_content(get).get("moe_latent_size"), *sizes))


def _configuration(get: Get) -> Iterator[str]:
    if not is_on(get) or (name := get(QUANT_CFG)) in NAMED:
        return
    try:
        find_quantization(path_of_quantization(name))
    except ConfigError as error:
        said = str(error) if str(error).endswith((".", "?")) else f"{error}."
        yield f"{QUANT_CFG}: {said}{nearest(name, NAMED)} ModelOpt's that are known by name: {', '.join(NAMED)}."


def _of_generation(get: Get) -> Iterator[str]:
    if algorithm_spec(get).generates and get(OF_GENERATION) != get(QUANT_CFG):
        yield (
            f"{OF_GENERATION}: '{get(OF_GENERATION)}' is not {QUANT_CFG}, and responses come from the weights that are "
            f"trained. Set it to ${{{QUANT_CFG}}}."
        )


def _linears(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    shape, found = model_shape(get), _found(get)
    rows = _rows(get)
    names = [*rows]
    if shape.num_delta_heads:
        yield (
            f"{QUANT_CFG}: this asks for quantization of a model with gated delta nets, not supported here: nobody has "
            "tried it. Set it to null."
        )
    if inputs := [name for name in names if found.block(f"{name}.{INPUT}") is not None]:
        weights_alone = "W4A16_NVFP4_CFG or NVFP4_MLP_WEIGHT_ONLY_CFG"
        yield (
            f"{QUANT_CFG}: this asks for quantization of linears' inputs, not supported here: weights alone are "
            f"quantized, and {inputs[0]}.{INPUT} is on. Take {weights_alone}, or turn off '*{INPUT}'."
        )
    for quantizer, what in _others(names).items():
        if found.block(quantizer) is not None:
            yield (
                f"{QUANT_CFG}: this asks for quantization of {what}, not supported here: weights alone are quantized, "
                f"and {quantizer} is on. Turn it off, or begin with '*', which is off."
            )
            break
    weights = [name for name in names if found.block(f"{name}.{WEIGHT}") is not None]
    if not weights:
        yield f"{QUANT_CFG}: no linear of the model has a name as in it. They are called {names[0]}.{WEIGHT} and alike."
    if _HEAD in weights and shape.tied_embeddings:
        yield f"{QUANT_CFG}: the model's output layer is its embedding, which stays wide. Turn off '*{_HEAD}*'."
    for name in weights:
        if rows[name] % (block := found.block(f"{name}.{WEIGHT}") or 1):
            yield (
                f"{QUANT_CFG}: {name} has rows of {rows[name]} elements on a rank, which are no multiple of {block}, "
                "of which elements share a scale. Leave it out, or change tensor_model_parallel_size."
            )
            break


def _others(names: Sequence[str]) -> dict[str, str]:
    """Quantizers beside those of linears' weights and inputs, and what they quantize."""
    found = {f"{name}.{OUTPUT}": "linears' outputs" for name in names}
    mixers = [name.partition(".self_attention.") for name in names]
    layers = dict.fromkeys(layer for layer, is_attention, _ in mixers if is_attention)
    for layer in layers:
        found |= {f"{layer}.self_attention.core_attention.{name}": what for name, what in OF_ATTENTION.items()}
    return found


def _beside(get: Get) -> Iterator[str]:
    if not is_on(get):
        return
    if get("policy.precision") != "bfloat16":
        yield f"policy.precision: {QUANT_CFG} needs bfloat16, beside which weights learn in float32. Set that."
    if get(path := f"{MEGATRON}.peft.enabled"):
        yield (
            f"{path}: true beside {QUANT_CFG} asks for adapters beside quantized weights, not supported here: nobody "
            f"has tried it. Set it to false, or {QUANT_CFG} to null."
        )
    if is_in_eight_bits(get) or rolls_out(get):
        path = "policy.generation.vllm_cfg.precision" if rolls_out(get) else f"{MEGATRON}.fp8_cfg.enabled"
        yield (
            f"{path}: fp8 beside {QUANT_CFG} asks for two formats of a weight, not supported here. Turn one of them "
            "off."
        )


def _without_effect(get: Get) -> Iterator[str]:
    for path, why in {
        f"{MEGATRON}.optimizer.use_precision_aware_optimizer": "main weights are kept whole beside quantized ones",
        f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": "weights are gathered to be quantized",
    }.items():
        if is_on(get) and get(path):
            yield f"{path}: true has no effect beside {QUANT_CFG}: {why}."


def _fits_nothing(get: Get) -> Iterator[str]:
    """Of files, for ModelOpt's own configurations have patterns for many models."""
    if not is_on(get) or get(QUANT_CFG) in NAMED:
        return
    names = [*_rows(get)]
    quantizers = [f"{name}.{each}" for name in names for each in (WEIGHT, INPUT)]
    for entry in _found(get).entries:
        is_of_further_tokens = entry.pattern.startswith("mtp")
        if entry.block is not None and not is_of_further_tokens and not fnmatch.filter(quantizers, entry.pattern):
            yield (
                f"{QUANT_CFG}: '{entry.pattern}' turns on nothing: no linear of the model has such a name. They are "
                f"called {names[0]}.{WEIGHT} and alike."
            )


QUANTIZATION_RULES: tuple[Rule, ...] = (_configuration, _of_generation, _linears, _beside)
QUANTIZATION_WARNINGS: tuple[Rule, ...] = (_without_effect, _fits_nothing)
