"""Adapters beside Transformer Engine's linears train as those beside this project's, and offloading changes no bit."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import make_policy, offload, take_step

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.specs.lora import is_adapter

HAS_TRANSFORMER_ENGINE = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="needs a CUDA device and Transformer Engine"),
    pytest.mark.usefixtures("any_device_process_group"),
]
ON = ("peft.enabled=true", "peft.dim=8", "peft.alpha=16", "optimizer.lr=1e-2", "scheduler.lr_warmup_iters=0")
FUSED = "peft.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
EACH = "peft.target_modules=[linear_q,linear_k,linear_v,linear_proj,linear_fc1_gate,linear_fc1_up,linear_fc2]"
TRANSFORMER_ENGINE = ("transformer_impl=transformer_engine", "attention_backend=unfused")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MODULES = ("qkv_linear", "core_attn", "attn_proj")


def train(folder: Path, *overrides: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # where Megatron-Core keeps the choice of attention, and refuses another one
    policy = make_policy(*ON, *overrides)
    engine = install_offloading(policy)
    model = build_model(policy, folder, num_steps=10)
    if engine is not None:
        exclude_parameters(engine, model.modules)
    named = [pair for module in model.modules for pair in module.named_parameters()]
    frozen = {name: weight.detach().clone() for name, weight in named if not is_adapter(name)}
    metrics = [take_step(model, step) for step in range(4)]
    adapters = {name: weight.detach().float().cpu() for name, weight in named if is_adapter(name)}
    assert all(torch.equal(weight, frozen[name]) for name, weight in named if name in frozen)
    assert not any(hasattr(weight, "main_grad") for name, weight in named if name in frozen)
    use_engine(None)
    if engine is not None:
        assert sum(each.bytes_out for each in engine.stats().per_module.values()) > 0
        engine.close()
    return metrics, adapters


@pytest.mark.parametrize(("family", "targets"), [("llama", FUSED), ("llama", EACH), ("qwen3_moe", FUSED)])
def test_adapters_train_beside_either_layers(family: str, targets: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder(family, **SHAPE)
    metrics, adapters = train(folder, targets, *TRANSFORMER_ENGINE)
    torch_metrics, torch_adapters = train(folder, targets, "transformer_impl=torch")
    for found, expected in zip(metrics, torch_metrics, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert adapters.keys() == torch_adapters.keys()
    offloaded, same = train(folder, targets, *TRANSFORMER_ENGINE, *offload(MODULES))
    assert offloaded == metrics
    assert all(torch.equal(same[name], weight) for name, weight in adapters.items())
