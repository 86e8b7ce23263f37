"""Tiny models of each family whose `config.json` is changed, here and in transformers: the same loss, or refused.

The whole table, every key of every family with several values, and as many mutated models as are asked for:

    python tests/functional/model_variants.py --cases 500
"""

import argparse
import itertools
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from models import make_policy
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import build_model, export_hf
from nemo_rl_offload.specs.model_families import FAMILIES, refusals

VOCABULARY_SIZE, LENGTH, TOLERANCE = 264, 48, 1e-5
ABSENT = "(absent)"
"""A value that takes the key out."""

_SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
}
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,  # transformers saves no layers for further tokens
}
_MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, **_MOE, "num_experts": 4, "norm_topk_prob": True},
    "deepseek_v2": {key: value for key, value in _LATENT.items() if key != "num_nextn_predict_layers"},
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"},
    "gpt_oss": {
        **_HEAD,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
            "rope_theta": 150000.0,
        },
    },
    "gemma": _HEAD,
    "gemma3_text": {**_HEAD, "sliding_window": 8, "layer_types": _MIXED},
    "glm4_moe": {**_HEAD, **_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "num_nextn_predict_layers": 0},
    "qwen3_5_text": {**_HEAD, **_DELTA},
    "qwen3_5_moe_text": {**_HEAD, **_DELTA, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "nemotron_h": {
        **_HEAD,
        **_MOE,
        "hybrid_override_pattern": "M*E-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 48,
    },
}
"""Each family's tiny shape, over `_SHAPE`."""


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": kind, **parameters}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
ROPES = [
    _rope("default"),
    {"rope_theta": 1e6},
    _rope("linear", factor=4.0),
    _rope("linear"),
    _rope("dynamic", factor=4.0),
    _rope("yarn", factor=4.0),
    _rope("yarn", **_YARN),
    _rope("yarn", **_YARN, beta_fast=8.0, beta_slow=2.0),
    _rope("yarn", **_YARN, attention_factor=1.3),
    _rope("yarn", **_YARN, mscale=0.7, mscale_all_dim=1.2),
    _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=1.0),
    _rope("yarn", **_YARN, mscale=0.7),
    _rope("yarn", **_YARN, mscale_all_dim=0.7),
    _rope("yarn", **_YARN, truncate=False),
    _rope("yarn"),
    _rope("llama3", factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0),
    _rope("llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=2.0, high_freq_factor=3.0),
    _rope("llama3", factor=8.0, original_max_position_embeddings=32),
    _rope("longrope", **_LONG, original_max_position_embeddings=48),
    _rope("longrope", **_LONG, original_max_position_embeddings=48, factor=2.0),
    _rope("longrope", **_LONG, original_max_position_embeddings=48, attention_factor=1.2),
    _rope("longrope", **_LONG, original_max_position_embeddings=20),
    _rope("longrope", original_max_position_embeddings=48),
    _rope("proportional", partial_rotary_factor=0.5),
    _rope("unheard_of"),
]
ROPES_BY_LAYERS = [
    {"full_attention": _rope("linear", factor=4.0), "sliding_attention": {"rope_type": "default", "rope_theta": 99.0}},
    {"full_attention": _rope("default"), "sliding_attention": _rope("linear", factor=2.0)},
    {"full_attention": _rope("default")},
    {"full_attention": {"type": "linear", "factor": 2.0}, "sliding_attention": {}},
    {"full_attention": _rope("yarn", factor=4.0), "sliding_attention": _rope("default")},
    {"full_attention": _rope("default"), "chunked_attention": _rope("default")},
]
VALUES: dict[str, list[dict[str, Any]]] = {
    "attention_bias": [{"attention_bias": True}, {"attention_bias": False}],
    "attention_dropout": [{"attention_dropout": 0.5}],
    "attention_multiplier": [{"attention_multiplier": 0.5}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": 5.0}],
    "chunk_size": [{"chunk_size": 16}, {"chunk_size": 7}],
    "clip_qkv": [{"clip_qkv": 0.5}, {"clip_qkv": None}],
    "conv_kernel": [{"conv_kernel": size} for size in (1, 2, 5)],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}, {"decoder_sparse_step": 5}],
    "embedding_multiplier": [{"embedding_multiplier": 2.0}, {"embedding_multiplier": 1.0}],
    "final_logit_softcapping": [{"final_logit_softcapping": 3.0}],
    "first_k_dense_replace": [{"first_k_dense_replace": number} for number in (0, 3, 4)],
    "head_dim": [{"head_dim": 24}, {"head_dim": 8}, {"head_dim": None}, {"head_dim": ABSENT}, {"head_dim": 15}],
    "hidden_act": [
        {"hidden_act": name} for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "swish")
    ],
    "hidden_activation": [{"hidden_activation": name} for name in ("gelu", "silu", "relu", None)],
    "hybrid_override_pattern": [
        {"layers_block_type": ABSENT, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        for pattern in ("M-M*", "MMM", "**", "EE", "M?")
    ],
    "intermediate_size": [{"intermediate_size": 40}],
    "layer_norm_epsilon": [{"layer_norm_epsilon": 1e-2}],
    "layers_block_type": [{"layers_block_type": kinds} for kinds in (["mamba", "mlp"], ["attention", "moe"], "M*", [])],
    "layer_types": [{"layer_types": _MIXED}, {"layer_types": _MIXED, "sliding_window": 8}, {"layer_types": _MIXED[:2]}],
    "logits_scaling": [{"logits_scaling": 2.0}],
    "mlp_bias": [{"mlp_bias": True}, {"mlp_bias": True, "attention_bias": True}],
    "mamba_d_conv": [{"mamba_d_conv": 4}],
    "mamba_head_dim": [{"mamba_head_dim": 6}],
    "mamba_num_heads": [{"mamba_num_heads": number} for number in (2, 6, 7)],
    "mlp_hidden_act": [{"mlp_hidden_act": name} for name in ("silu", "gelu", "relu")],
    "mlp_only_layers": [{"mlp_only_layers": layers} for layers in ([], [0, 2], [0, 1, 2, 3], [9], "0")],
    "moe_intermediate_size": [{"moe_intermediate_size": 48}],
    "moe_latent_size": [{"moe_latent_size": 16}],
    "moe_layer_freq": [{"moe_layer_freq": 1}, {"moe_layer_freq": 2}],
    "n_group": [{"n_group": 2, "topk_group": 1}, {"n_group": 2, "topk_group": 2}, {"n_group": 3}],
    "n_groups": [{"n_groups": number} for number in (1, 3, 8)],
    "n_shared_experts": [{"n_shared_experts": number} for number in (1, 3, 0, None)],
    "norm_topk_prob": [{"norm_topk_prob": True}, {"norm_topk_prob": False}],
    "num_experts": [{"num_experts": 8}, {"num_local_experts": 8}, {"num_experts": 0}],
    "num_experts_per_tok": [{"num_experts_per_tok": number} for number in (1, 3, 4, 9)],
    "num_hidden_layers": [{"num_hidden_layers": 1}, {"num_hidden_layers": 0}],
    "num_key_value_heads": [{"num_key_value_heads": number} for number in (1, 3, 4, None)],
    "num_nextn_predict_layers": [{"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": None}],
    "partial_rotary_factor": [{"partial_rotary_factor": share} for share in (0.25, 1.0, 0.0)],
    "q_lora_rank": [{"q_lora_rank": None}, {"q_lora_rank": 16}],
    "qk_rope_head_dim": [{"qk_rope_head_dim": 16}],
    "quantization_config": [{"quantization_config": {"quant_method": "gptq", "bits": 4}}],
    "query_pre_attn_scalar": [{"query_pre_attn_scalar": number} for number in (4, 0)],
    "residual_multiplier": [{"residual_multiplier": 0.5}],
    "rms_norm_eps": [{"rms_norm_eps": 1e-2}, {"rms_norm_eps": 0}, {"rms_norm_eps": "1e-6"}],
    "rope_interleave": [{"rope_interleave": False}, {"rope_interleave": True}],
    "rope_local_base_freq": [{"rope_parameters": ABSENT, "rope_local_base_freq": 500.0, "rope_theta": 2000.0}],
    "rope_parameters": [{"rope_parameters": parameters} for parameters in [*ROPES, *ROPES_BY_LAYERS]],
    "rope_scaling": [
        {"rope_parameters": ABSENT, "rope_theta": 5000.0},
        {"rope_parameters": ABSENT, "rope_theta": 5000.0, "rope_scaling": None},
        {"rope_parameters": ABSENT, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": _rope("linear", factor=2.0)},
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    "routed_scaling_factor": [{"routed_scaling_factor": 0.5}, {"routed_scaling_factor": 2.5}],
    "scoring_func": [{"scoring_func": "softmax"}, {"scoring_func": "sigmoid"}],
    "sliding_window": [{"sliding_window": number} for number in (8, 1, 100, 0, None)],
    "sliding_window_pattern": [{"sliding_window_pattern": number, "layer_types": ABSENT} for number in (1, 2, 3, 0)],
    "ssm_state_size": [{"ssm_state_size": 12}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}],
    "time_step_limit": [{"time_step_limit": [0.0, 0.5]}],
    "topk_method": [{"topk_method": name} for name in ("greedy", "noaux_tc", "group_limited_greedy")],
    "use_bias": [{"use_bias": True}, {"use_conv_bias": False}],
    "use_bidirectional_attention": [{"use_bidirectional_attention": True}],
    "use_qk_norm": [{"use_qk_norm": True}, {"use_qk_norm": False}],
    "use_sliding_window": [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": _MIXED},
        {"use_sliding_window": True, "sliding_window": None},
    ],
    "v_head_dim": [{"v_head_dim": 20}],
    "vocab_size": [{"vocab_size": 300}],
}
"""What each key is changed to, with keys beside it."""


class Variant(NamedTuple):
    """A family with changes of its `config.json`."""

    family: str
    changes: Mapping[str, Any]

    @property
    def content(self) -> dict[str, Any]:
        """The changed `config.json`."""
        config = CONFIG_MAPPING[self.family](**_SHAPE | SHAPES[self.family])
        content = {**config.to_dict(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family]]}
        if "num_hidden_layers" in self.changes or "sliding_window" in self.changes:
            content.pop("layer_types", None)
        content = json.loads(json.dumps(content)) | json.loads(json.dumps(self.changes))
        return {key: value for key, value in content.items() if value != ABSENT}


_SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {**_SCALED, "rope_type": "yarn", "attention_factor": 1.3}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
HONOURED = [
    Variant("llama", {"attention_bias": True, "rope_parameters": _LLAMA3}),
    Variant("llama", {"mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    Variant("mistral", {"sliding_window": 8, "hidden_act": "gelu"}),
    Variant("qwen2", {**_WINDOW, "head_dim": 24}),
    Variant("qwen3", {"attention_bias": True, "rope_parameters": _YARN}),
    Variant("qwen3_moe", {"mlp_only_layers": [0, 2], "norm_topk_prob": False, "attention_bias": True}),
    Variant("deepseek_v2", {"q_lora_rank": None, "rms_norm_eps": 1e-2}),
    Variant("deepseek_v3", {"n_group": 2, "topk_group": 1, "n_shared_experts": 3, "num_nextn_predict_layers": None}),
    Variant("glm4_moe_lite", {"n_group": 2, "topk_group": 1, "mlp_layer_types": None, "rms_norm_eps": 1e-2}),
    Variant("gpt_oss", {"sliding_window": 4, "num_experts_per_tok": 3}),
    Variant("gemma", {"head_dim": 24}),
    Variant("gemma3_text", {"query_pre_attn_scalar": 40, "rope_parameters": ROPES_BY_LAYERS[0], "sliding_window": 4}),
    Variant("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 3}),
    Variant("qwen3_5_text", {"linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-2, "partial_rotary_factor": 0.75}),
    Variant("qwen3_5_moe_text", {"layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"]}),
    Variant("nemotron_h", {"moe_latent_size": 24, "n_group": 2}),
    Variant("nemotron_h", {"chunk_size": 7, "conv_kernel": 3, "layer_norm_epsilon": 1e-2, "n_group": 2}),
]
"""What Megatron-Bridge alone leaves out, or takes for something else."""


def table() -> list[Variant]:
    """Every family with every value, whether it has the key or not."""
    changes = [{}, *itertools.chain.from_iterable(VALUES.values())]
    return [Variant(family, change) for family in SHAPES for change in changes]


def mutated(seed: int) -> Variant:
    """One of the families, with one to three of its keys changed to anything."""
    rng = random.Random(seed)
    family = rng.choice(list(SHAPES))
    content = Variant(family, {}).content
    changes: dict[str, Any] = {}
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            changes |= rng.choice(list(itertools.chain.from_iterable(VALUES.values())))
        else:
            key = rng.choice([key for key, what in FAMILIES[family].items() if not what.text.startswith("no effect")])
            changes[key] = _anything(rng, content.get(key))
    return Variant(family, changes)


def _anything(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        return {**value, key: _anything(rng, value[key])}
    choices: list[Any] = [None, True, False, 0, 1, 2, 3, 7, -1, 0.5, 1.5, "x", [], {}, [1], ABSENT]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [value * 2, value / 2, value + 1, str(value)] * 3
    if isinstance(value, bool):
        choices += [not value] * 6
    return rng.choice(choices)


def write_variant(variant: Variant, folder: Path) -> Any:
    """Write a random model as transformers would, with the changed `config.json`; returns transformers' model.

    No norm is 1 and no bias 0, so that a weight left out shows. None where transformers does not take the model: the
    weights are then those of the unchanged one.
    """
    content = variant.content
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[variant.family]
    try:
        model = _random_model(name, AutoConfig.from_pretrained(folder, attn_implementation="eager"))
        with torch.no_grad():
            model(make_ids()[:, :2], use_cache=False)
    except Exception:  # noqa: BLE001  # whatever transformers raises: it does not take this model
        model = None
    written = model or _random_model(name, CONFIG_MAPPING[variant.family](**_SHAPE | SHAPES[variant.family]))
    written.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content))
    return model


def _random_model(name: str, config: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).float().eval()
    for module in model.modules():
        if hasattr(
            module, "conv1d"
        ):  # over several chunks, and for small steps, its plain form is none of its kernels'
            module.chunk_size, module.time_step_min = LENGTH, 0.0
    with torch.no_grad():
        for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
            if "sinks" in name or "e_score_correction_bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.3)
            elif weight.ndim == 1 and not name.endswith("inv_freq"):
                weight.copy_(torch.randn_like(weight) * 0.3 + ("norm" in name))
            elif "experts" in name or name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.1)
    return model


def make_ids() -> Tensor:
    """Tokens [2, LENGTH]."""
    return torch.randint(0, VOCABULARY_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(logits: Tensor) -> float:
    """The mean loss of `make_ids` by logits [2, LENGTH, vocabulary]."""
    flat = logits[:, :-1, :VOCABULARY_SIZE].reshape(-1, VOCABULARY_SIZE)
    return F.cross_entropy(flat.double(), make_ids()[:, 1:].reshape(-1)).item()


def outcome(variant: Variant, folder: Path, *, exports: bool = False) -> str:
    """`honoured`, `refused`, or what went wrong; `exports`: also of writing it and loading it in transformers."""
    if refusals(variant.content, LENGTH):
        return "refused"
    reference = write_variant(variant, folder)
    policy = make_policy(f".max_total_sequence_length={LENGTH}")
    try:
        model = build_model(policy, folder, num_steps=None)
        with torch.no_grad():
            logits = model.modules[0].eval()(make_ids(), torch.arange(LENGTH).expand_as(make_ids()), None)
    except ConfigError as error:
        named = "policy.model_name" in str(error) or "policy.megatron_cfg" in str(error)
        return "refused" if named else f"refused without a key: {error}"
    except Exception as error:  # noqa: BLE001  # the very fault that is looked for
        return f"raised {type(error).__name__}: {error}"
    if reference is None:
        return "trained, though transformers does not take it"
    with torch.no_grad():
        ours, theirs = loss_of(logits), loss_of(reference(make_ids(), use_cache=False).logits)
    if not abs(ours - theirs) <= TOLERANCE:
        return f"another model: loss {ours:.6f}, in transformers {theirs:.6f}"
    return _exported(model, reference, folder) if exports else "honoured"


def _exported(model: Any, reference: Any, source: Path) -> str:
    destination = source.with_name(f"{source.name}_exported")
    export_hf(model, source, destination)
    again, info = type(reference).from_pretrained(destination, dtype=torch.float32, output_loading_info=True)
    shutil.rmtree(destination)
    if any(info.values()):
        return f"exported with {dict(info)}"
    left, right = reference.state_dict(), again.state_dict()
    same = left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    return "honoured" if same else "exported with other weights"


def failures(variants: Iterator[Variant], *, exports: bool) -> tuple[Counter[str], list[tuple[Variant, str]]]:
    """How often each outcome was seen, and the variants that were neither honoured nor refused."""
    counts: Counter[str] = Counter()
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, variant in enumerate(variants):
            folder = Path(scratch) / str(number)
            seen = outcome(variant, folder, exports=exports)
            shutil.rmtree(folder, ignore_errors=True)
            counts[seen if seen in ("honoured", "refused") else "neither"] += 1
            if seen not in ("honoured", "refused"):
                failed.append((variant, seen))
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="mutated models, beside the whole table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-table", action="store_true")
    args = parser.parse_args()
    from nemo_rl_offload.megatron.build.model import init_process_groups
    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    init_process_groups(make_policy(), seed=1)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    num_failed = 0
    for title, variants in (
        ("family x key x value", iter([] if args.no_table else table())),
        (f"mutated, seed {args.seed}", (mutated(args.seed + number) for number in range(args.cases))),
    ):
        counts, failed = failures(variants, exports=True)
        num_failed += len(failed)
        print(f"\n{title}: " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
        for variant, seen in failed:
            print(f"  {variant.family} {json.dumps(variant.changes)}: {seen}")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
