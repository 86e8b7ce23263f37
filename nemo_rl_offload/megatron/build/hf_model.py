"""Megatron-Bridge's provider for a Hugging Face model, with the model's own peculiarities written into it.

Bridge reads most of a `config.json`. What it passes over, or takes from the defaults of one public model, is written
here from transformers' configuration of the model: `specs/model_families.py` says which values there may be, and
refuses the rest. Four things have no field in Megatron, so the built modules are told:

- Rotary positions other than the plain ones: the frequencies, and the factor by which cosine and sine are multiplied,
  are those that transformers computes. Megatron's own forms of llama3, linear and yarn take some of the parameters as
  constants.
- Biases of the attention's output or of the MLP: Megatron has one switch for all of them, and for the experts. The
  linears that have one get it when they are built, which those of Transformer Engine do not take.
- Latent attention's norms have an epsilon of their own.
- Gemma 3's second norms and its positions of two kinds are `layers/gemma.py`.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.gemma import make_gemma
from nemo_rl_offload.specs.hybrid_layers import EXPERTS, layer_pattern
from nemo_rl_offload.specs.model_families import FAMILIES, refusals
from nemo_rl_offload.specs.model_keys import LAYER_TYPES, Content
from nemo_rl_offload.specs.model_shape import has_delta_nets

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from transformers import PretrainedConfig

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of queries' and keys' latents in transformers' DeepSeek models, whatever `rms_norm_eps` is."""


def make_provider(
    auto_bridge: "AutoBridge", content: Content, source: object, max_length: int | None = None
) -> "GPTModelProvider":
    """The provider of a model whose `config.json` holds `content`; `source`, its path or name, is for messages;
    `max_length` is that of the run's longest sequence, in tokens.

    Raises ConfigError with every key that is not honoured.
    """
    if problems := refusals(content, max_length):
        raise ConfigError("\n".join(f"policy.model_name: {source}: {problem}" for problem in problems))
    held = auto_bridge.hf_pretrained
    config: PretrainedConfig = getattr(held, "config", held)
    if held is config:
        auto_bridge.hf_pretrained = _as_bridge_reads(config)
    else:
        held.config = _as_bridge_reads(config)
    provider = auto_bridge.to_megatron_provider(load_weights=False)
    if config.model_type == "nemotron_h":
        return _hybrid(provider, config)
    _honour(provider, config)
    return provider


def class_of(content: Content) -> dict[str, object]:
    """What `config.json` says of the model's class, by which Bridge goes, as transformers has it: by the family alone.

    Files name other classes, or none: of code of their own beside them, of older names, of what was trained on top.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(content.get("model_type")))
    return {} if name is None else {"architectures": [name], "auto_map": None}


def config_of(content: Content) -> "PretrainedConfig":
    """transformers' configuration of what a `config.json` holds, where infinity may be a section of its own."""
    from transformers import AutoConfig, PretrainedConfig

    return AutoConfig.for_model(**PretrainedConfig._decode_special_floats({**content, **class_of(content)}))


def _as_bridge_reads(config: "PretrainedConfig") -> "PretrainedConfig":
    """Without what the family does not have, which Bridge would take for another's, and with plain positions."""
    plain = copy.deepcopy(config)
    if config.model_type == "gpt_oss":
        plain.hidden_act = "silu"  # which nothing reads, and Bridge looks up
    if getattr(plain, "num_nextn_predict_layers", 0) is None:
        plain.num_nextn_predict_layers = 0  # which Bridge counts with
    for key in [key for key in vars(plain) if key not in FAMILIES[config.model_type] and not key.startswith("_")]:
        delattr(plain, key)
    has_positions = "rope_parameters" in FAMILIES[config.model_type] and config.model_type != "gemma3_text"
    if has_positions and "kv_lora_rank" not in vars(plain):
        plain.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    return plain


def _honour(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    from megatron.bridge.utils.activation_map import ACTIVATION_FUNC_MAP

    provider.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
    if hf_config.model_type != "gpt_oss":
        key = "hidden_activation" if hf_config.model_type == "gemma3_text" else "hidden_act"
        name = getattr(hf_config, key)
        provider.activation_func = gelu_tanh if name == "gelu_pytorch_tanh" else ACTIVATION_FUNC_MAP[name]
    if provider.attention_backend == AttnBackend.flash:  # Gemma's, for head sizes of older kernels
        provider.attention_backend = AttnBackend.auto
    if has_delta_nets(hf_config.model_type):
        _delta_nets(provider, hf_config)
    _windows(provider, hf_config)
    _experts(provider, hf_config)
    _biases(provider, hf_config)
    if provider.multi_latent_attention:
        _latent_positions(provider, hf_config)
        provider.register_pre_wrap_hook(_set_latent_epsilon)
    elif hf_config.model_type == "gemma3_text":
        _gemma(provider, hf_config)
    else:
        _positions(provider, hf_config)


# --- layers


def gelu_tanh(x: Tensor) -> Tensor:
    """One operator, which saves its input alone; Megatron's own form is ten of them. Of any shape."""
    return F.gelu(x, approximate="tanh")


def _windows(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    """`window_size` counts the tokens before a query, transformers' `sliding_window` the query too."""
    keys = FAMILIES[hf_config.model_type]
    window: int | None = hf_config.sliding_window if "sliding_window" in keys else None
    if "use_sliding_window" in keys and not hf_config.use_sliding_window:
        window = None
    types = hf_config.layer_types if "layer_types" in keys else None
    is_windowed = [
        window is not None and (types is None or types[n] == "sliding_attention") for n in range(provider.num_layers)
    ]
    provider.window_size = (window - 1, 0) if window is not None and any(is_windowed) else None
    provider.window_attn_skip_freq = [int(one) for one in is_windowed] if any(is_windowed) else None
    if any(is_windowed):
        provider.cp_comm_type = "a2a"  # Transformer Engine's ring has no windows


def _experts(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    if provider.num_moe_experts is None:
        return
    if (num_shared := getattr(hf_config, "n_shared_experts", None)) is not None:
        provider.moe_shared_expert_intermediate_size = num_shared * hf_config.moe_intermediate_size
    if hf_config.model_type == "qwen3_moe":
        step, dense = hf_config.decoder_sparse_step, hf_config.mlp_only_layers or []
        has_experts = [int(n not in dense and (n + 1) % step == 0) for n in range(provider.num_layers)]
        if not any(has_experts):
            provider.num_moe_experts = None
        elif not all(has_experts):  # a list changes the names in a checkpoint
            provider.moe_layer_freq = has_experts
            # Bridge's own layers have experts everywhere. Those of plain torch take the place of either.
            provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
    if hf_config.model_type == "deepseek_v2" and hf_config.topk_method == "greedy":
        provider.moe_router_num_groups = provider.moe_router_group_topk = None


def _biases(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    if hf_config.model_type in ("gpt_oss", "qwen2"):  # Bridge has them
        return
    of_attention = bool(getattr(hf_config, "attention_bias", False))
    of_output = of_attention and hf_config.model_type != "glm4_moe"
    of_mlp = bool(getattr(hf_config, "mlp_bias", False))
    provider.add_qkv_bias, provider.add_bias_linear = of_attention, False
    if of_output or of_mlp:
        provider.register_pre_wrap_hook(partial(_add_biases, of_output=of_output, of_mlp=of_mlp))


def _add_biases(chunks: list[nn.Module], of_output: bool, of_mlp: bool) -> list[nn.Module]:
    for attention in _modules(chunks, Attention) if of_output else ():
        _add_bias(attention.linear_proj, is_split=False)
    for mlp in _modules(chunks, MLP) if of_mlp else ():
        _add_bias(mlp.linear_fc1, is_split=True)
        _add_bias(mlp.linear_fc2, is_split=False)
    return chunks


def _add_bias(linear: ColumnParallelLinear | RowParallelLinear, is_split: bool) -> None:
    """A bias for each output of this rank's, which a column-parallel linear splits and a row-parallel one does not."""
    bias = nn.Parameter(linear.weight.new_zeros(linear.weight.shape[0]))
    bias.allreduce = True  # type: ignore[attr-defined]
    if is_split:
        set_tensor_model_parallel_attributes(bias, True, 0, 1)
    else:
        bias.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]
    linear.bias = bias


# --- hybrid models


def _hybrid(read: Any, hf_config: "PretrainedConfig") -> "GPTModelProvider":
    """A `GPTModel` of the layers that Bridge would make Megatron's `HybridModel` of, one each; `read` is its provider.

    Megatron's own has no seam for a head without logits, and builds Transformer Engine's norm behind its last layer.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.utils.activation_map import ACTIVATION_FUNC_MAP

    shared = {field.name for field in fields(GPTModelProvider) if field.init} & {field.name for field in fields(read)}
    provider = GPTModelProvider(**{name: getattr(read, name) for name in shared})
    pattern = layer_pattern(hf_config.to_dict())
    assert pattern is not None, "checked with the keys"
    provider.hybrid_layer_pattern = pattern
    provider.mamba_chunk_size, provider.mamba_conv_kernel = hf_config.chunk_size, hf_config.conv_kernel
    provider.num_layers, provider.mtp_num_layers = len(pattern), read.mtp_num_layers or None
    provider.mtp_use_repeated_layer = False
    provider.is_hybrid_model = True
    provider.position_embedding_type = "none"
    provider.attention_backend = AttnBackend.auto
    provider.layernorm_epsilon = hf_config.layer_norm_epsilon
    provider.activation_func = ACTIVATION_FUNC_MAP[hf_config.mlp_hidden_act]
    provider.share_embeddings_and_output_weights = False
    provider.first_last_layers_bf16 = False  # of FP8
    provider.moe_layer_freq = [int(letter == EXPERTS) for letter in pattern]  # a list: layers of a checkpoint by name
    if EXPERTS not in pattern:
        provider.num_moe_experts = provider.moe_shared_expert_intermediate_size = None
        provider.moe_router_num_groups = provider.moe_router_group_topk = None
    return provider


# --- gated delta nets


def _delta_nets(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    """Bridge's own layers of them are Megatron's variant of attention, which needs kernels; here they are mixers."""
    provider.experimental_attention_variant = None
    provider.linear_attention_freq = [int(kind == "linear_attention") for kind in hf_config.layer_types]
    provider.hetereogenous_dist_checkpoint = True  # layers of a checkpoint by name
    provider.mtp_num_layers = None


# --- positions


def _positions(provider: "GPTModelProvider", hf_config: "PretrainedConfig") -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    provider.position_embedding_type = "rope"
    provider.rotary_base = parameters["rope_theta"]
    provider.rotary_percent = parameters.get("partial_rotary_factor", 1.0)
    provider.rope_scaling, provider.seq_len_interpolation_factor = False, None
    provider.yarn_rotary_scaling_factor = None
    provider.apply_rope_fusion = True
    if (kind := parameters["rope_type"]) == "default":
        return
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    provider.register_pre_wrap_hook(partial(_set_positions, frequencies=frequencies, factor=factor))
    provider.apply_rope_fusion = factor == 1  # Transformer Engine's kernel has no such factor


def _set_positions(chunks: list[nn.Module], frequencies: Tensor, factor: float) -> list[nn.Module]:
    """`frequencies` [rotary dims / 2], float32: what a position is multiplied by."""
    for chunk in chunks:
        rotary: Any = chunk.rotary_pos_emb
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    for attention in _modules(chunks, Attention):
        attention._yarn_concentration_factor = factor
    return chunks


def _gemma(provider: Any, hf_config: "PretrainedConfig") -> None:
    """Bridge builds a table of positions for each kind of layers, of plain ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sections = {kind: hf_config.rope_parameters[kind] for kind in LAYER_TYPES}
    provider.rotary_base = tuple(sections[kind]["rope_theta"] for kind in ("sliding_attention", "full_attention"))
    provider.rope_scaling, provider.rope_scaling_factor, provider.seq_len_interpolation_factor = False, 1.0, None
    frequencies = {
        kind: ROPE_INIT_FUNCTIONS[name](hf_config, torch.device("cpu"), layer_type=kind)[0]
        for kind, section in sections.items()
        if (name := section["rope_type"]) != "default"
    }
    provider.register_pre_wrap_hook(partial(_make_gemma, frequencies=frequencies))


def _make_gemma(chunks: list[nn.Module], frequencies: Mapping[str, Tensor]) -> list[nn.Module]:
    """`frequencies` [head dim / 2] of the kinds of layers whose positions are not plain."""
    make_gemma(chunks)
    for chunk in chunks:
        rotary: Any = chunk.rotary_pos_emb
        for kind, of_kind in frequencies.items():
            table = rotary if kind == "full_attention" else rotary.rope_local
            table.inv_freq = of_kind.to(table.inv_freq.device)
    return chunks


def _latent_positions(provider: Any, hf_config: "PretrainedConfig") -> None:
    """Megatron's yarn of latent attention, which with a factor of 1 is none."""
    parameters = hf_config.rope_parameters
    is_yarn = parameters["rope_type"] == "yarn"
    provider.rope_type = "yarn"
    provider.rotary_base = parameters["rope_theta"]
    provider.rotary_scaling_factor = parameters["factor"] if is_yarn else 1.0
    provider.original_max_position_embeddings = (
        parameters["original_max_position_embeddings"] if is_yarn else hf_config.max_position_embeddings
    )
    provider.beta_fast = parameters.get("beta_fast") or 32
    provider.beta_slow = parameters.get("beta_slow") or 1
    provider.mscale = (is_yarn and parameters.get("mscale")) or 1.0
    provider.mscale_all_dim = (is_yarn and parameters.get("mscale_all_dim")) or 0.0


def _set_latent_epsilon(chunks: list[nn.Module]) -> list[nn.Module]:
    for attention in _modules(chunks, MLASelfAttention):
        for name in ("linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"):
            norm: Any = getattr(attention, name, None)
            if hasattr(norm, "eps"):
                norm.eps = LATENT_NORM_EPSILON
    return chunks


def _modules(chunks: list[nn.Module], kind: type) -> Iterator[Any]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, kind))
