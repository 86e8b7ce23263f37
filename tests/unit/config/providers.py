"""Megatron's configuration objects of tiny models, without weights and process groups."""

import copy
from pathlib import Path
from typing import Any

from mutations import set_at
from safetensors.numpy import save_file

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config


class Model:
    """A Megatron-Bridge provider of a tiny model, made from its configuration alone, and a policy for it."""

    def __init__(self, config: Any, folder: Path) -> None:
        from nemo_rl_offload.megatron.build.bridge import bridge

        config.save_pretrained(folder)
        (folder / "tokenizer_config.json").write_text("{}")
        save_file({}, folder / "model.safetensors")
        self._provider = bridge().AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        self._raw = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [f"policy.model_name={folder}"])

    def raw(self, changes: dict[tuple[str, ...], Any]) -> dict[str, Any]:
        """The tiny exemplar with offloading off and with these changes."""
        raw = copy.deepcopy(self._raw)
        off = {("fine_grained_activation_offloading",): None, ("offload_modules",): None}
        for path, value in (off | changes).items():
            set_at(raw, ("policy", "megatron_cfg", *path), copy.deepcopy(value))
        return raw

    def provider(self) -> Any:
        return copy.deepcopy(self._provider)


def pretend_transformer_engine(monkeypatch: Any) -> None:
    """Let Megatron's checks believe that Transformer Engine is installed; nothing of it is called."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda _version: True)
    for module in (rope_utils, moe_utils):
        for name in [name for name in vars(module) if name.startswith("fused_") and getattr(module, name) is None]:
            monkeypatch.setattr(module, name, object())


class NoOptimizer:
    param_groups: list[dict[str, Any]] = []


def build(model: Model, raw: dict[str, Any]) -> Any:
    """Build all of Megatron's configuration objects as a worker does; returns the provider."""
    from nemo_rl_offload.megatron.build import optimizer, transformer_config

    provider = model.provider()
    transformer_config.configure_provider(provider, raw["policy"])
    optimizer.optimizer_config(raw["policy"])
    optimizer.ddp_config(raw["policy"])
    optimizer.learning_rate_scheduler(raw["policy"], NoOptimizer(), raw["grpo"]["max_num_steps"])
    return provider


def make_models(folder: Path) -> list[Model]:
    """Return a dense model and one with experts; `folder` receives their `config.json`."""
    from transformers import Qwen2Config, Qwen3MoeConfig

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "architectures": ["Qwen2ForCausalLM"],
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    moe = shape | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    return [
        Model(Qwen2Config(**shape), folder / "qwen2"),
        Model(Qwen3MoeConfig(**moe), folder / "qwen3_moe"),
    ]
