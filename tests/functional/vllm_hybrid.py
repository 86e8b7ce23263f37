"""Whether vLLM's own Nemotron-H takes new weights in place: `python tests/functional/vllm_hybrid.py` prints JSON.

vLLM has no kernels of Mamba-2 for CPUs, and of experts without a gate none either: what stands here is a model of
other layers, which loads and does not compute.
"""

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.vllm.settings import engine_arguments, engine_env

os.environ |= engine_env(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["policy"]["generation"], "cpu")

import torch
from models import write_model
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, replace, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from nemo_rl_offload.generation.vllm import extension

POLICY = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["policy"]
PATTERN = "M-M*-M"
PATTERN_OF_DRAFTS = "**"
DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
OF_TRANSFORMERS, PUBLIC = "backbone.embedding.weight", "backbone.embeddings.weight"
"""The embedding in a folder that transformers has written, and in public ones, which vLLM reads alone."""


def loaded(folder: Path) -> tuple[Any, Any, VllmConfig]:
    """The model, and its layer for further tokens as vLLM has it draft."""
    arguments = engine_arguments(POLICY, folder, is_cpu=True, can_sleep=False, cache_bytes=1 << 24)
    config = EngineArgs(**arguments, speculative_config=DRAFTS).create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
        of_drafts = config.speculative_config.draft_model_config
        drafting = get_model(vllm_config=replace(config), model_config=of_drafts)
    del drafting.model.embed_tokens, drafting.lm_head  # vLLM puts the model's own there
    return model, drafting, config


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


def main() -> None:
    torch.cpu._is_amx_tile_supported = lambda: True  # then vLLM packs convolutions, on any machine
    extension.keep_weights_plain()
    with tempfile.TemporaryDirectory() as scratch:
        patterns = {"hybrid_override_pattern": PATTERN, "mtp_hybrid_override_pattern": PATTERN_OF_DRAFTS}
        folder = write_model("nemotron_h_mtp", Path(scratch) / "model", **patterns)
        weights = load_file(folder / "model.safetensors")
        weights[PUBLIC] = weights.pop(OF_TRANSFORMERS)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        model, drafting, config = loaded(folder)
        worker = extension.WeightsInPlace()
        worker.model_runner = SimpleNamespace(
            model=model, drafter=SimpleNamespace(model=drafting), speculative_config=config.speculative_config
        )
        worker.vllm_config, worker.model_config = config, config.model_config
        changed = {name: each * 1.25 + 0.01 for name, each in weights.items()}
        worker.begin_update()
        named = list(changed.items())
        for start in range(0, len(named), 5):
            worker.load_named_weights(named[start : start + 5])
        missing = worker.finish_update()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        expected = [state(each) for each in loaded(folder)[:2]]
        found = [state(each) for each in (model, drafting)]
        different = [
            name
            for values, wanted in zip(found, expected, strict=True)
            for name, each in values.items()
            if not torch.equal(each, wanted[name])
        ]
        worker.begin_update()
        worker.load_named_weights([each for each in named if "A_log" not in each[0]])
        without = worker.finish_update()
    print(json.dumps({"missing": missing, "different": different, "num": [*map(len, found)], "without": without}))


if __name__ == "__main__":
    main()
