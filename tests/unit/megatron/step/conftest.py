import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from step_batches import MODEL

from nemo_rl_offload.megatron.build.model import MegatronModel, build_model

SETTINGS = (
    "scheduler.lr_warmup_iters=0",
    "optimizer.lr=0.25",
    "optimizer.optimizer=sgd",
    "fine_grained_activation_offloading=false",
)


@pytest.fixture
def build(process_group: None, make_policy: Callable[..., Any]) -> Callable[[], MegatronModel]:
    policy = make_policy(*SETTINGS)
    return lambda: build_model(policy, MODEL, num_steps=4)


@pytest.fixture
def build_adapted(process_group: None, make_policy: Callable[..., Any], tmp_path: Path) -> Callable[[], MegatronModel]:
    """The model with an output layer of its own, which has an adapter that is not zero."""
    folder = shutil.copytree(MODEL, tmp_path / "untied")
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(MODEL / "model.safetensors")
    head = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    adapter = ("dim=4", "alpha=8", "target_modules=[linear_proj,output_layer]", "lora_B_init_method=normal")
    policy = make_policy(*SETTINGS, "peft.enabled=true", *(f"peft.{text}" for text in adapter))
    return lambda: build_model(policy, folder, num_steps=4)
