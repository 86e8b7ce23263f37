"""Which keys of a Hugging Face `config.json` are honoured, for each family of models that can be trained.

A model is taken when everything that its `config.json` says about its function is done, and refused by the name of the
key otherwise. Nothing is ignored that transformers reads: training another model silently would be worse than an
error. So each family lists every key of its configuration class in transformers (a test compares them), and what
values of it are taken. What transformers itself does not read for the family is one of two things. A key that changes
the function in other families, or in a model's own code (`_ELSEWHERE`), is refused unless its value says "not so"; any
other is of no effect, and said to be.

The values are honoured in `megatron/build/hf_model.py`. Tests compare each with transformers, on tiny models: the same
loss, or a refusal. `docs/models.md` is written from these tables.

Rejected: taking whatever Megatron-Bridge converts. It reads what its authors needed, and passes over the rest: a
sliding window of Qwen2, a bias of Qwen3's attention, a linear scaling of its positions.
"""

from collections.abc import Iterator, Mapping

from nemo_rl_offload.errors import nearest
from nemo_rl_offload.specs.hybrid_layers import layer_pattern
from nemo_rl_offload.specs.model_keys import (
    ANY_STEP,
    DTYPE,
    HYBRID_LAYERS,
    LENGTH_LIMITS,
    PADDING,
    PARTIAL_ROTARY,
    QWEN_WINDOWS,
    ROPE_NUMBERS,
    ROUTER_TRAINING,
    WHOLE_ROTARY,
    WINDOWS,
    Content,
    Key,
    delta_layer_types,
    dense_first,
    divides,
    even,
    experts_chosen,
    flag,
    ignored,
    is_number,
    latent_rope,
    latent_rope_of_v2,
    layer_numbers,
    one_of,
    only,
    positive,
    quantized,
    rope,
    rope_by_layers,
    rope_of_global_layers,
    rope_section,
    rope_type,
    same_as,
    unknown_rope_keys,
    whole,
)
from nemo_rl_offload.specs.model_shape import has_delta_nets, has_windows

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")

_NO_EFFECT = dict.fromkeys(
    (
        *(
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_name_or_path",
            "architectures",
            "attn_implementation",
        ),
        *(
            "auto_map",
            "bos_token_id",
            "chunk_size_feed_forward",
            "eos_token_id",
            "id2label",
            "initializer_range",
        ),
        *("label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp"),
        *("problem_type", "return_dict", "transformers_version", "unsloth_fixed", "unsloth_version"),
        *("use_cache", "max_new_tokens", "num_labels"),
    ),
    ignored("no effect"),
)
_DROPOUT = ignored("no effect: trained without dropout")
_COMMON = {
    **_NO_EFFECT,
    "attention_dropout": _DROPOUT,
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "hidden_dropout": _DROPOUT,
    "head_dim": even(or_null=True),
    "hidden_act": one_of(ACTIVATIONS),
    "hidden_size": divides("hidden_size"),
    "intermediate_size": whole(),
    "is_encoder_decoder": only(False),
    "max_position_embeddings": whole(),
    "num_attention_heads": whole(),
    "num_hidden_layers": whole(),
    "num_key_value_heads": divides("num_attention_heads"),
    "pad_token_id": PADDING,
    "partial_rotary_factor": WHOLE_ROTARY,
    "quantization_config": quantized(),
    "rms_norm_eps": positive(),
    "rope_parameters": rope(tuple(ROPE_NUMBERS)),
    "rope_scaling": rope(tuple(ROPE_NUMBERS)),
    "rope_theta": positive(or_null=True),
    "original_max_position_embeddings": whole(or_null=True),
    "tie_word_embeddings": flag(),
    "vocab_size": whole(),
}
_MOE = {
    **ROUTER_TRAINING,
    "moe_intermediate_size": whole(),
    "norm_topk_prob": flag(),
}
LATENT_ROPE = rope(("default", "yarn"), latent_rope)
GEMMA_ROPES = ("default", "linear")
_NOT_READ = ignored("no effect")
_OF_FIRST_WEIGHTS = ignored("no effect: steps are clipped in no kernel, and in transformers' plain form alone")
_WITHOUT_MTP = only(0, because="`policy.megatron_cfg.mtp_num_layers: 0` leaves them out")
_RENAMED_OF_MAMBA = {
    "chunk_size": "chunk_size",
    "conv_bias": "use_conv_bias",
    "d_conv": "conv_kernel",
    "dt_init_floor": "time_step_floor",
    "dt_limit": "time_step_limit",
    "dt_max": "time_step_max",
    "dt_min": "time_step_min",
    "expand": "expand",
    "n_groups": "n_groups",
}


_DELTA_NETS = {
    "attention_bias": only(False),
    "attn_output_gate": only(True),
    "full_attention_interval": whole(),
    "head_dim": even(),
    "hidden_act": only("silu"),
    "layer_types": Key("honoured", delta_layer_types),
    "linear_conv_kernel_dim": whole(minimum=2),
    "linear_key_head_dim": whole(),
    "linear_num_key_heads": divides("linear_num_value_heads"),
    "linear_num_value_heads": whole(),
    "linear_value_head_dim": whole(),
    "mamba_ssm_dtype": _NOT_READ,
    "mtp_num_hidden_layers": _WITHOUT_MTP,
    "mtp_use_dedicated_embeddings": _NOT_READ,
    "partial_rotary_factor": PARTIAL_ROTARY,
    "rope_parameters": rope(("default",), is_partial=True),
    "rope_scaling": rope(("default",), is_partial=True),
}


def _renamed(new: str) -> Key:
    return Key("refused", lambda value, content: f"its newer name {new} in its place")


_DEEPSEEK = {
    **_COMMON,
    **_MOE,
    "attention_bias": only(False),
    "aux_loss_alpha": ignored("no effect: `moe_aux_loss_coeff` is the run's"),
    "ep_size": ignored("no effect"),
    "first_k_dense_replace": whole(minimum=0),
    "head_dim": ignored("no effect"),
    "kv_lora_rank": whole(),
    "moe_layer_freq": only(1),
    "n_routed_experts": whole(),
    "n_shared_experts": whole(),
    "num_experts_per_tok": experts_chosen(),
    "q_lora_rank": whole(or_null=True),
    "qk_head_dim": ignored("no effect: the sum of its parts"),
    "qk_nope_head_dim": whole(),
    "qk_rope_head_dim": even(),
    "rope_parameters": LATENT_ROPE,
    "rope_scaling": LATENT_ROPE,
    "routed_scaling_factor": positive(),
    "seq_aux": ignored("no effect"),
    "tie_word_embeddings": only(False),
    "v_head_dim": whole(),
}

FAMILIES: dict[str, dict[str, Key]] = {
    "llama": {**_COMMON, "attention_bias": flag(), "mlp_bias": flag()},
    "mistral": {**_COMMON, "sliding_window": whole(or_null=True)},
    "qwen2": {**_COMMON, **QWEN_WINDOWS, "head_dim": even()},
    "qwen3": {**_COMMON, **QWEN_WINDOWS, "attention_bias": flag(), "head_dim": even(), "use_qk_norm": only(True)},
    "qwen3_moe": {
        **_COMMON,
        **_MOE,
        "attention_bias": flag(),
        "decoder_sparse_step": whole(),
        "head_dim": even(),
        "max_window_layers": ignored("no effect"),
        "mlp_only_layers": Key("honoured", layer_numbers),
        "num_experts": whole(),
        "num_experts_per_tok": experts_chosen(),
        "num_local_experts": whole(),
        "sliding_window": whole(minimum=0, or_null=True),
        "use_qk_norm": only(True),
        "use_sliding_window": flag(),
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "mlp_bias": only(False),
        "n_group": divides("n_routed_experts"),
        "norm_topk_prob": only(False, because="transformers' DeepSeek-V2 does not normalize, and other code does"),
        "rope_parameters": rope(("default", "yarn"), latent_rope_of_v2),
        "rope_scaling": rope(("default", "yarn"), latent_rope_of_v2),
        "scoring_func": only("softmax"),
        "topk_group": whole(or_null=True),
        "topk_method": only("greedy"),
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "head_dim": same_as("qk_rope_head_dim"),
        "n_group": divides("n_routed_experts"),
        "norm_topk_prob": only(True),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "num_local_experts": whole(),
        "num_nextn_predict_layers": whole(minimum=0, or_null=True),
        "quantization_config": quantized("fp8"),
        "rope_interleave": only(True),
        "scoring_func": only("sigmoid"),
        "topk_group": whole(),
        "topk_method": only("noaux_tc"),
    },
    "glm4_moe_lite": {
        **_DEEPSEEK,
        "first_k_dense_replace": only(1, because="transformers' GLM-4.7-Flash reads mlp_layer_types in its place"),
        "head_dim": same_as("qk_rope_head_dim"),
        "mlp_layer_types": Key("honoured", dense_first),
        "n_group": divides("n_routed_experts"),
        "norm_topk_prob": only(True),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "num_local_experts": whole(),
        "num_nextn_predict_layers": whole(minimum=0, or_null=True),
        "rope_interleave": only(True),
        "rope_parameters": rope(("default",)),
        "rope_scaling": rope(("default",)),
        "scoring_func": only("sigmoid"),
        "topk_group": whole(),
        "topk_method": only("noaux_tc"),
    },
    "gpt_oss": {
        **_COMMON,
        **ROUTER_TRAINING,
        **WINDOWS,
        "attention_bias": only(True),
        "hidden_act": ignored("no effect: its experts have an activation of their own"),
        "num_experts": whole(),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "num_local_experts": whole(),
        "quantization_config": quantized("mxfp4"),
        "swiglu_limit": only(7.0),
    },
    "gemma": {
        **_COMMON,
        "attention_bias": only(False),
        "hidden_activation": only(None, "gelu_pytorch_tanh"),
        "tie_word_embeddings": only(True),
        "use_bidirectional_attention": only(None, False),
    },
    "gemma3_text": {
        **{key: what for key, what in _COMMON.items() if key != "hidden_act"},
        **WINDOWS,
        **dict.fromkeys(("_sliding_window_pattern", "cache_implementation"), ignored("no effect")),
        "attention_bias": only(False),
        "attn_logit_softcapping": only(None, because="transformers' Gemma 3 does not read it, and other code does"),
        "final_logit_softcapping": only(None),
        "head_dim": even(),
        "hidden_activation": one_of(ACTIVATIONS),
        "num_attention_heads": divides("hidden_size"),
        "query_pre_attn_scalar": positive(),
        "rope_local_base_freq": positive(),
        "rope_parameters": rope_by_layers(GEMMA_ROPES),
        "rope_scaling": rope_of_global_layers(GEMMA_ROPES),
        "rope_theta": positive(),
        "sliding_window_pattern": whole(),
        "tie_word_embeddings": only(True),
        "use_bidirectional_attention": only(None, False),
    },
    "glm4_moe": {
        **_COMMON,
        **_MOE,
        "attention_bias": flag(),
        "first_k_dense_replace": whole(minimum=0),
        "n_group": divides("n_routed_experts"),
        "n_routed_experts": whole(),
        "n_shared_experts": whole(),
        "norm_topk_prob": only(True),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "num_local_experts": whole(),
        "num_nextn_predict_layers": whole(minimum=0, or_null=True),
        "head_dim": even(),
        "partial_rotary_factor": PARTIAL_ROTARY,
        "rope_parameters": rope(tuple(ROPE_NUMBERS), is_partial=True),
        "rope_scaling": rope(tuple(ROPE_NUMBERS), is_partial=True),
        "routed_scaling_factor": positive(),
        "tie_word_embeddings": only(False),
        "topk_group": whole(),
        "use_qk_norm": flag(),
    },
    "qwen3_5_text": {**_COMMON, **_DELTA_NETS},
    "qwen3_5_moe_text": {
        **_COMMON,
        **_DELTA_NETS,
        **ROUTER_TRAINING,
        "intermediate_size": _NOT_READ,
        "moe_intermediate_size": whole(),
        "norm_topk_prob": only(True),
        "num_experts": whole(),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "num_local_experts": whole(),
        "shared_expert_intermediate_size": whole(),
    },
    "nemotron_h": {
        **{key: what for key, what in _COMMON.items() if not key.startswith(("rope_", "rms_", "original_"))},
        **dict.fromkeys(("norm_eps", "rms_norm_eps", "rope_theta", "partial_rotary_factor"), _NOT_READ),
        **dict.fromkeys(("expand", "num_logits_to_keep", "rescale_prenorm_residual", "use_mamba_kernels"), _NOT_READ),
        "mamba_ssm_cache_dtype": _NOT_READ,
        **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor"), _OF_FIRST_WEIGHTS),
        **HYBRID_LAYERS,
        **{f"mamba_{old}": _renamed(new) for old, new in _RENAMED_OF_MAMBA.items()},
        "attention_bias": only(False),
        "chunk_size": whole(),
        "conv_kernel": whole(),
        "head_dim": even(),
        "hidden_act": _NOT_READ,
        "layer_norm_epsilon": positive(),
        "mamba_head_dim": whole(),
        "mamba_hidden_act": only("silu"),
        "mamba_num_heads": whole(),
        "mamba_proj_bias": only(False),
        "mlp_bias": only(False),
        "mlp_hidden_act": one_of(ACTIVATIONS),
        "moe_intermediate_size": whole(),
        "moe_latent_size": whole(or_null=True),
        "moe_shared_expert_intermediate_size": whole(),
        "moe_shared_expert_overlap": ignored("no effect: the run's key of that name says it"),
        "n_group": divides("n_routed_experts"),
        "n_groups": divides("mamba_num_heads"),
        "n_routed_experts": whole(),
        "n_shared_experts": only(1),
        "norm_topk_prob": only(True),
        "num_experts_per_tok": experts_chosen(minimum=2),
        "residual_in_fp32": only(False),
        "routed_scaling_factor": positive(),
        "sliding_window": only(None),
        "ssm_state_size": whole(),
        "tie_word_embeddings": only(False),
        "time_step_limit": ANY_STEP,
        "topk_group": whole(),
        "use_bias": only(False),
        "use_conv_bias": only(True),
    },
}
"""The families that can be trained, by `model_type`, and their keys."""

_OF_OTHERS = (
    *("alibi", "attn_logit_softcapping", "bias", "clip_qkv", "dim_model_base", "final_logit_softcapping"),
    *("layer_norm_eps", "moe_num_experts", "mtp_num_hidden_layers", "no_rope_layers", "num_experts_shared"),
    *("parallel_attn", "qk_layernorm", "qkv_bias", "query_pre_attn_scalar", "scale_depth", "scale_emb"),
    *("shared_expert_intermediate_size", "sliding_window_pattern", "use_alibi", "use_bias", "use_mrope", "use_mup"),
    *("use_parallel_residual", "use_qk_norm"),
)
_SCALES = ("attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier")
_ELSEWHERE = {
    **dict.fromkeys(_OF_OTHERS, ignored("")),
    **dict.fromkeys(_SCALES, Key("", lambda value, content: None, neutral=(None, 1, 1.0))),
    **{key: what for keys in FAMILIES.values() for key, what in keys.items() if what.text != "no effect"},
}
"""Keys that change the function of some model."""


def refusals(content: Content, max_length: int | None = None) -> list[str]:
    """What of a `config.json` is not honoured, a line for each key; none for a model that is trained as it is.

    `max_length`: tokens of the longest sequence of the run, where it is known.
    """
    name = content.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
        return [f"model_type {name!r} of config.json is not trained here. Families: {', '.join(FAMILIES)}.{hint}"]
    return [*_refused_values(str(name), family, content), *_refused_together(content, max_length)]


TORCH_LAYERS = (
    "{key} of config.json needs policy.megatron_cfg.transformer_impl: torch. Transformer Engine's layers have biases "
    "everywhere or in queries, keys and values alone, and no norms behind attention and MLP; their weights of queries "
    "without q_lora_rank have no name in Megatron-Bridge, and Mamba-2 layers and gated delta nets have not been tried "
    "with them."
)


def needs_torch_layers(content: Content) -> str | None:
    """What Transformer Engine's layers, as Megatron builds them, do not do: a key and its value; None for nothing."""
    name = content.get("model_type")
    if name == "gemma3_text":
        return "model_type gemma3_text"
    for key in ("attention_bias", "mlp_bias"):
        if name in ("llama", "qwen3", "qwen3_moe") and content.get(key):
            return f"{key} true"
    if name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite") and content.get("q_lora_rank", 0) is None:
        return "q_lora_rank null"
    return f"model_type {name}" if name == "nemotron_h" or has_delta_nets(name) else None


SPLIT_PACKS = (
    "{num_ranks} ranks share the sequences of packs, for which Transformer Engine has no attention with {what} "
    "({path}). Set transformer_impl to torch, this to 1, or sequence_packing.enabled to false."
)


def windows_or_sinks(content: Content) -> str | None:
    """What a model's attention has beside a causal mask; None for nothing."""
    if content.get("model_type") == "gpt_oss":
        return "attention sinks"
    return "sliding windows" if has_windows(content) else None


def unknown_keys(content: Content) -> list[str]:
    """Keys that have no effect, as transformers does not read them for this family; none of a family not taken."""
    name = content.get("model_type")
    if not isinstance(name, str) or (family := FAMILIES.get(name)) is None:
        return []
    known = {*family, *_ELSEWHERE, "unk_token_id"}  # the last is the tokenizer's, in older files
    return [key for key in content if key not in known and not key.startswith("_")] + unknown_rope_keys(content)


def _refused_values(name: str, family: Mapping[str, Key], content: Content) -> Iterator[str]:
    for key, value in content.items():
        if key in family:
            if (allowed := family[key].refuse(value, content)) is not None:
                yield f"{key} {value!r} of config.json is not taken in a {name}. Allowed: {allowed}."
        elif key in _ELSEWHERE and not _is_neutral(value, _ELSEWHERE[key].neutral):
            yield (
                f"{key} {value!r} of config.json changes the model, and transformers' {name} does not read it: the "
                "weights were made by other code. Take it out if they were not."
            )


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return value in neutral if not isinstance(value, list | dict) else not value


def _refused_together(content: Content, max_length: int | None) -> Iterator[str]:
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    if content.get("model_type") == "nemotron_h":
        yield from _refused_layers(content)
    elif "kv_lora_rank" in content:
        if content.get("num_key_value_heads", heads) != heads:
            yield f"num_key_value_heads {content['num_key_value_heads']} of config.json is not {heads}, as the heads."
    elif isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        yield from _refused_heads(hidden, heads, content)
    is_divided = content.get("model_type") == "qwen3_moe" and content.get("norm_topk_prob")
    if is_divided and content.get("num_experts_per_tok") == 1:
        yield "num_experts_per_tok 1 of config.json is not taken beside norm_topk_prob true."
    of_all = content.get("layer_types") or content.get("sliding_window_pattern") == 1
    if content.get("model_type") == "gemma3_text" and content.get("sliding_window", 1) is None and not of_all:
        yield "sliding_window null of config.json is not taken without layer_types that are full_attention."
    if content.get("use_sliding_window") and content.get("sliding_window") == 0:
        yield "sliding_window 0 of config.json is not taken beside use_sliding_window true."
    theta = rope_section(content).get("rope_theta", content.get("rope_theta", 1))
    if theta is None and content.get("model_type") != "gemma3_text":
        yield "rope_theta null of config.json is not taken. Give a number above 0, or leave it out."
    yield from _refused_lengths(content, max_length)


def _refused_lengths(content: Content, max_length: int | None) -> Iterator[str]:
    kind, key = rope_type(content), "original_max_position_embeddings"
    if kind in ("llama3", "longrope", "yarn") and content.get(key, 1) is None:
        yield f"{key} null of config.json is not taken with rope_type {kind}. Give a number, or leave it out."
    elif kind in LENGTH_LIMITS:
        key, limit_of = LENGTH_LIMITS[kind]
        if (limit := limit_of(content)) is None:
            yield f"{key} is not in config.json, and rope_type {kind} depends on it. Write it there."
        elif not is_number(limit):  # which is said of its key
            return
        elif kind == "longrope" and limit <= 1:
            yield f"{key} {limit} of config.json is not taken with rope_type {kind}. Allowed: a number above 1."
        elif max_length is not None and max_length > limit:
            yield (
                f"rope_type {kind} of config.json turns positions otherwise in sequences of more than {limit} tokens, "
                f"which is not done here. Set policy.max_total_sequence_length to at most {limit} (it is {max_length})."
            )


def _refused_layers(content: Content) -> Iterator[str]:
    pattern, given = layer_pattern(content), content.get("num_hidden_layers")
    if pattern is not None and given is not None and given != len(pattern):
        yield f"num_hidden_layers {given!r} of config.json is not {len(pattern)}, as the layers of {pattern}."


def _refused_heads(hidden: int, heads: int, content: Content) -> Iterator[str]:
    if content.get("head_dim") is None and hidden % heads:
        yield f"hidden_size {hidden} of config.json is not divided by num_attention_heads {heads}, without a head_dim."
    size = content.get("head_dim") or hidden // heads
    default = 0.25 if has_delta_nets(content.get("model_type")) else 1
    share = rope_section(content).get("partial_rotary_factor", content.get("partial_rotary_factor")) or default
    if isinstance(size, int) and is_number(share) and (int(size * share) < 2 or int(size * share) % 2):
        yield f"a head of config.json has {int(size * share)} elements with positions: an even number is needed."
