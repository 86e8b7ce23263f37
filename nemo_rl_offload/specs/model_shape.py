"""The shape of a transformer, read from the contents of a Hugging Face `config.json`.

There is one reader, `parse_model_shape`, for two kinds of readers. The planner computes with every number, so it takes
nothing that is missing or of an unknown family: `read_model_shape` raises what is wrong. The configuration's rules ask
a few questions of any model that Megatron-Bridge may know, so they go on with what can be read: a number that cannot is
the least that says nothing, such as no experts, one layer, or a vocabulary of 0.

The reader also tells which keys it asked for (`honoured_keys`). What else a `config.json` holds has no part in a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from nemo_rl_offload.errors import ConfigError, nearest
from nemo_rl_offload.specs.hybrid_layers import ATTENTION, EXPERTS, MAMBA, MLP, layer_pattern, mtp_layer_pattern

DELTA_CHUNK = 64
"""Tokens whose triangular system a gated delta net solves at once, as in transformers."""


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), in elements per token."""

    query_rank: int | None
    """Rank of the compressed queries; None: queries are not compressed."""
    key_value_rank: int
    nope_head_dim: int
    """Part of a query's or key's head without positions."""
    rope_head_dim: int
    """Part of a query's head with positions; all heads share one such key."""
    value_head_dim: int


@dataclass(frozen=True)
class Experts:
    """The experts of a layer that has them."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    """Width of one expert."""
    shared_ffn_hidden_size: int
    """Width of all shared experts together; 0: none."""
    has_shared_gate: bool
    latent_size: int | None = None
    """Width of what the experts read and give, with a projection of the layer's on either side; None: `hidden_size`."""


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 layer (arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Of heads, which share what reads and writes the state."""
    state_dim: int
    """Of each element of a head."""
    conv_kernel: int
    chunk: int
    """Tokens whose products are made at once."""


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net (arXiv 2412.06464)."""

    num_key_heads: int
    """Of keys, and of queries."""
    num_value_heads: int
    """A multiple of those of keys."""
    key_dim: int
    value_dim: int
    conv_kernel: int


class LayerKind(NamedTuple):
    """What a layer is made of."""

    mixer: Literal["attention", "mamba", "delta_net"] | None
    """What mixes tokens; None: the layer is an MLP alone."""
    mlp: Literal["dense", "experts"] | None
    """None: the layer mixes tokens alone."""


DENSE_LAYER, MOE_LAYER = LayerKind("attention", "dense"), LayerKind("attention", "experts")
_HYBRID_KINDS = {
    MAMBA: LayerKind("mamba", None),
    ATTENTION: LayerKind("attention", None),
    MLP: LayerKind(None, "dense"),
    EXPERTS: LayerKind(None, "experts"),
}


@dataclass(frozen=True)
class ModelShape:
    """What memory and time depend on. Sizes are counts of elements."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    """0 where the model does not say, to the rules alone."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    """Width of the MLP in layers without experts."""
    layers_with_experts: tuple[bool, ...]
    """Of each layer whether it has experts."""
    experts: Experts | None
    has_shared_experts: bool
    latent_attention: LatentAttention | None
    delta_net: DeltaNet | None
    """None: there are no such layers."""
    delta_layers: tuple[int, ...]
    """Layers that are gated delta nets, counted from 0."""
    num_mtp_layers: int
    """Layers that predict further tokens (multi-token prediction)."""
    tied_embeddings: bool
    qk_norm: bool
    output_norms: bool
    """Whether what attention and MLP give is normed before it is added."""
    qkv_bias: bool
    attention_output_bias: bool
    attention_gate: bool
    """Whether attention's output is multiplied by a gate, which the projection of queries gives too."""
    mlp_bias: bool
    """Biases in the MLP, experts and router included."""
    attention_sinks: bool
    windows: tuple[int, ...]
    """Of each layer how many keys a query sees, its own included; 0: all before it."""
    activation: str
    """Hugging Face's name of the activation in the MLP."""
    max_positions: int
    """Longest sequence that the model is made for; 0 where it does not say."""
    hybrid_layers: str
    """A letter for each layer of a hybrid model (`specs/hybrid_layers.py`); empty: it is none."""
    hybrid_mtp_layers: str
    """Likewise of what stands in each layer for a further token."""
    mamba: Mamba | None
    """Of a hybrid model."""

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer."""
        if self.hybrid_layers:
            return tuple(_HYBRID_KINDS[letter] for letter in self.hybrid_layers)
        return tuple(
            LayerKind("delta_net" if layer in self.delta_layers else "attention", "experts" if has_experts else "dense")
            for layer, has_experts in enumerate(self.layers_with_experts)
        )

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has an MLP without experts."""
        return any(kind.mlp == "dense" for kind in self.layer_kinds)

    @property
    def mtp_kinds(self) -> tuple[LayerKind, ...]:
        """What stands in each layer for a further token: one like the model's last, or a hybrid model's several."""
        return tuple(_HYBRID_KINDS[letter] for letter in self.hybrid_mtp_layers) or self.layer_kinds[-1:]

    @property
    def all_kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer, and then of each that stands in one for a further token."""
        return (*self.layer_kinds, *self.mtp_kinds * self.num_mtp_layers)

    @property
    def sliding_windows(self) -> bool:
        """Whether a query of any layer sees only the keys next to it."""
        return any(self.windows)

    @property
    def rotates(self) -> bool:
        """Whether positions rotate queries and keys: a hybrid model's recurrent layers know them without that."""
        return not self.hybrid_layers

    @property
    def gated_mlp(self) -> bool:
        """Whether an MLP's first linear gives a gate beside what the second one reads."""
        return not self.hybrid_layers

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(self.layers_with_experts)

    @property
    def has_latent_attention(self) -> bool:
        """Whether it has multi-latent attention."""
        return self.latent_attention is not None

    @property
    def predicts_further_tokens(self) -> bool:
        """Whether it has multi-token prediction."""
        return self.num_mtp_layers > 0

    @property
    def has_states(self) -> bool:
        """Whether layers hand a state from token to token: Mamba-2 layers, or gated delta nets."""
        return self.mamba is not None or self.delta_net is not None

    @property
    def num_mamba_groups(self) -> int:
        """Groups of heads in each Mamba-2 layer; 0: there are no such layers."""
        return 0 if self.mamba is None else self.mamba.num_groups

    @property
    def num_delta_heads(self) -> int:
        """Heads of keys in each gated delta net; 0: there are no such layers."""
        return 0 if self.delta_net is None else self.delta_net.num_key_heads

    def vocabulary_rows(self, num_parts: int) -> int:
        """Of embedding and output layer on each of so many tensor-parallel ranks, those that pad included."""
        return -(-self.vocab_size // num_parts)

    @property
    def query_head_dim(self) -> int:
        """Elements of one query head."""
        latent = self.latent_attention
        return latent.nope_head_dim + latent.rope_head_dim if latent else self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Elements of one value head."""
        return self.latent_attention.value_head_dim if self.latent_attention else self.head_dim


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "gpt_oss": {"mlp_bias": True, "attention_sinks": True},
    "qwen3_5_text": {"qk_norm": True, "attention_gate": True},
    "qwen3_5_moe_text": {"qk_norm": True, "attention_gate": True, "shared_gate": True},
    "nemotron_h": {},
    "gemma3_text": {"qk_norm": True, "output_norms": True, "activation": "hidden_activation"},
}
"""What `model_type` alone tells."""
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "n_shared_experts": 1}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "deepseek_v2": _LATENT
    | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "intermediate_size": 11008},
    "deepseek_v3": _LATENT | {"n_routed_experts": 256, "moe_intermediate_size": 2048, "first_k_dense_replace": 3},
    "glm4_moe_lite": _LATENT
    | {"q_lora_rank": 768, "n_routed_experts": 64, "moe_intermediate_size": 1536, "first_k_dense_replace": 1},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128, "attention_bias": True},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256, "shared_expert_intermediate_size": 512},
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "mlp_hidden_act": "relu2",
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
"""Of keys that are absent, what transformers' classes have: those that the model's size depends on."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ParsedShape:
    """What a `config.json` says of a model's shape."""

    shape: ModelShape
    problems: tuple[str, ...]
    """What a plan cannot do with: an unknown family alone, else all keys that are missing or no such number."""
    honoured_keys: frozenset[str]
    """The keys that were asked for, whether they are there or not."""


def read_model_shape(content: Mapping[str, Any], source: str) -> ModelShape:
    """Read a `config.json`'s content. `source` (its path or the model's name) begins every message.

    Raises ConfigError with all problems: an unknown family, a missing key, a value that is no positive whole number.
    """
    parsed = parse_model_shape(content)
    if parsed.problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in parsed.problems))
    return parsed.shape


def parse_model_shape(content: Mapping[str, Any]) -> ParsedShape:
    """Read what can be read of a `config.json`'s content, and say what cannot."""
    name = content.get("model_type")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    reader = _Reader(content, _DEFAULTS.get(str(name), {}))
    shape = _shape(reader, family or {})
    problems = reader.problems
    if family is None:
        hint = nearest(name, _FAMILIES) if isinstance(name, str) else ""
        problems = [f"model_type {name!r} is not known. Known: {', '.join(_FAMILIES)}.{hint}"]
    return ParsedShape(shape, tuple(problems), frozenset(reader.asked))


class _Reader:
    """Reads values, and collects which keys were asked for and what is wrong with them."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.content, self._defaults = content, defaults
        self.problems: list[str] = []
        self.asked: set[str] = set()

    def get(self, key: str) -> Any:
        self.asked.add(key)
        return self.content.get(key, self._defaults.get(key))

    def whole(self, key: str, default: int | None = None, minimum: int = 1, fallback: int | None = None) -> int:
        """A number; ``default`` where it is not given, and ``fallback``, else the default or 1, where it is wrong."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            given = "is missing" if value is None else f"is {value!r}"
            self.problems.append(f"{key} {given}; a whole number from {minimum} on is needed.")
            return fallback if fallback is not None else 1 if default is None else default
        return value

    def flag(self, key: str) -> bool:
        return bool(self.get(key))


def _shape(reader: _Reader, family: Mapping[str, Any]) -> ModelShape:
    name = reader.get("model_type")
    pattern = layer_pattern(reader.content) if name == "nemotron_h" else None
    num_layers = reader.whole("num_hidden_layers", None if pattern is None else len(pattern))
    hidden_size = reader.whole("hidden_size")
    num_heads = reader.whole("num_attention_heads")
    latent = _latent_attention(reader) if reader.get("kv_lora_rank") else None
    experts = _experts(reader, family) if pattern is None or EXPERTS in pattern else None
    if pattern is None:
        with_experts = _layers_with_experts(reader, num_layers, experts is not None)
        has_dense = not all(with_experts)
    else:
        with_experts, has_dense = tuple(letter == EXPERTS for letter in pattern), MLP in pattern
    delta_net = _delta_net(reader) if has_delta_nets(name) else None
    num_mtp_layers = reader.whole("num_nextn_predict_layers", 0, minimum=0)
    vocab_size, num_key_value_heads = (
        reader.whole("vocab_size", fallback=0),
        reader.whole("num_key_value_heads", num_heads),
    )
    activation = reader.get(family.get("activation", "hidden_act"))
    if pattern is not None:
        activation = reader.get("mlp_hidden_act")
    max_positions = reader.get("max_position_embeddings")
    has_shared = bool(reader.get("n_shared_experts") or reader.get("shared_expert_intermediate_size"))
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads if latent else num_key_value_heads,
        head_dim=reader.whole("head_dim", max(1, hidden_size // num_heads)),
        ffn_hidden_size=reader.whole("intermediate_size", None if has_dense else 0),
        layers_with_experts=with_experts,
        experts=experts,
        has_shared_experts=has_shared if pattern is None else EXPERTS in pattern,
        latent_attention=latent,
        delta_net=delta_net,
        delta_layers=() if delta_net is None else _delta_layers(reader, num_layers),
        num_mtp_layers=num_mtp_layers,
        tied_embeddings=reader.flag("tie_word_embeddings"),
        qk_norm=bool(family.get("qk_norm")),
        output_norms=bool(family.get("output_norms")),
        qkv_bias=bool(family.get("qkv_bias")) or reader.flag("attention_bias"),
        attention_output_bias=reader.flag("attention_bias"),
        attention_gate=bool(family.get("attention_gate")),
        mlp_bias=bool(family.get("mlp_bias")) or reader.flag("mlp_bias"),
        attention_sinks=bool(family.get("attention_sinks")),
        windows=layer_windows(reader.content, num_layers),
        activation=activation if isinstance(activation, str) else "silu",
        max_positions=max_positions if isinstance(max_positions, int) else 0,
        hybrid_layers=pattern or "",
        hybrid_mtp_layers=(mtp_layer_pattern(reader.content) or "") if pattern is not None and num_mtp_layers else "",
        mamba=None if pattern is None else _mamba(reader),
    )


def has_delta_nets(family: object) -> bool:
    """Whether the family, a `model_type`, has layers that are gated delta nets."""
    return family in ("qwen3_5_text", "qwen3_5_moe_text")


def has_windows(content: Mapping[str, Any]) -> bool:
    """Whether a layer has a sliding window, by transformers' defaults too."""
    name, layers = content.get("model_type"), content.get("layer_types")
    if name in ("qwen2", "qwen3", "gpt_oss", "gemma3_text") and isinstance(layers, list):
        return "sliding_attention" in layers
    if name == "gemma3_text":
        return content.get("sliding_window", 4096) is not None and content.get("sliding_window_pattern") != 1
    if name in ("qwen2", "qwen3"):
        first, num_layers = content.get("max_window_layers", 28), content.get("num_hidden_layers")
        are_left_out = isinstance(first, int) and isinstance(num_layers, int) and first >= num_layers
        return bool(content.get("use_sliding_window")) and not are_left_out
    if name == "qwen3_moe":
        return bool(content.get("use_sliding_window"))
    return name == "gpt_oss" or (name == "mistral" and content.get("sliding_window", 4096) is not None)


def layer_windows(content: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Of each layer how many keys a query sees, by transformers' defaults too; 0: all before it."""
    if not has_windows(content):
        return (0,) * num_layers
    name, layers = content["model_type"], content.get("layer_types")
    window = _whole(content, "sliding_window", 128 if name == "gpt_oss" else 4096)
    if isinstance(layers, list):
        slides = [kind == "sliding_attention" for kind in layers]
    elif name in ("gemma3_text", "gpt_oss"):
        period = _whole(content, "sliding_window_pattern", 6) if name == "gemma3_text" else 2
        slides = [(layer + 1) % max(1, period) != 0 for layer in range(num_layers)]
    else:
        first = _whole(content, "max_window_layers", 28) if name in ("qwen2", "qwen3") else 0
        slides = [layer >= first for layer in range(num_layers)]
    return tuple(window if slide else 0 for slide in slides)


def _whole(content: Mapping[str, Any], key: str, default: int) -> int:
    """A key's number; the default's where it is none, of which its family's table tells."""
    value = content.get(key, default)
    return value if isinstance(value, int) else default


def _latent_attention(reader: _Reader) -> LatentAttention:
    compressed = reader.get("q_lora_rank") is not None
    return LatentAttention(
        query_rank=reader.whole("q_lora_rank") if compressed else None,
        key_value_rank=reader.whole("kv_lora_rank"),
        nope_head_dim=reader.whole("qk_nope_head_dim"),
        rope_head_dim=reader.whole("qk_rope_head_dim"),
        value_head_dim=reader.whole("v_head_dim"),
    )


def _experts(reader: _Reader, family: Mapping[str, Any]) -> Experts | None:
    given = [key for key in _NUM_EXPERTS if reader.content.get(key) is not None]
    key = next((key for key in given or _NUM_EXPERTS if reader.get(key)), None)
    if key is None:
        return None
    width = reader.whole("moe_intermediate_size" if reader.get("moe_intermediate_size") else "intermediate_size")
    shared = reader.whole("n_shared_experts", 0, minimum=0) * width
    if reader.get("model_type") == "nemotron_h":
        shared = reader.whole("moe_shared_expert_intermediate_size", 7688)
    return Experts(
        num_experts=reader.whole(key),
        experts_per_token=reader.whole("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared or reader.whole("shared_expert_intermediate_size", 0, minimum=0),
        has_shared_gate=bool(family.get("shared_gate")),
        latent_size=reader.whole("moe_latent_size") if reader.get("moe_latent_size") else None,
    )


def _mamba(reader: _Reader) -> Mamba:
    defaults = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
    defaults |= {"conv_kernel": 4, "chunk_size": 128}
    return Mamba(*(reader.whole(key, default) for key, default in defaults.items()))


def _delta_net(reader: _Reader) -> DeltaNet:
    defaults = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    defaults |= {"conv_kernel_dim": 4}
    return DeltaNet(*(reader.whole(f"linear_{key}", default) for key, default in defaults.items()))


def _delta_layers(reader: _Reader, num_layers: int) -> tuple[int, ...]:
    """transformers takes `layer_types` where both keys are there; of the other, every so many-th layer is attention."""
    types, interval = reader.get("layer_types"), reader.whole("full_attention_interval", 4)
    if isinstance(types, list):
        return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)


def _layers_with_experts(reader: _Reader, num_layers: int, has_experts: bool) -> tuple[bool, ...]:
    """Qwen counts every `decoder_sparse_step`-th layer and names exceptions; DeepSeek has dense layers first."""
    step, frequency = reader.whole("decoder_sparse_step", 1), reader.whole("moe_layer_freq", 1)
    first = reader.whole("first_k_dense_replace", 0, minimum=0)
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        reader.problems.append(f"mlp_only_layers is {dense!r}; a list of layers is needed.")
        dense = []
    return tuple(
        has_experts and (layer + 1) % step == 0 and layer % frequency == 0 and layer >= first and layer not in dense
        for layer in range(num_layers)
    )
