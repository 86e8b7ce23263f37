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
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from nemo_rl_offload.generation.vllm import extension

POLICY = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["policy"]
PATTERN = "M-M*-M"
OF_TRANSFORMERS, PUBLIC = "backbone.embedding.weight", "backbone.embeddings.weight"
"""The embedding in a folder that transformers has written, and in public ones, which vLLM reads alone."""


def loaded(folder: Path) -> tuple[Any, VllmConfig]:
    arguments = engine_arguments(POLICY, folder, is_cpu=True, can_sleep=False, cache_bytes=1 << 24)
    config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config), config


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in (*model.named_parameters(), *model.named_buffers())}


def main() -> None:
    extension.keep_weights_plain()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model("nemotron_h", Path(scratch) / "model", hybrid_override_pattern=PATTERN)
        weights = load_file(folder / "model.safetensors")
        weights[PUBLIC] = weights.pop(OF_TRANSFORMERS)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        model, config = loaded(folder)
        worker = extension.WeightsInPlace()
        worker.model_runner, worker.model_config = SimpleNamespace(model=model), config.model_config
        changed = {name: each * 1.25 + 0.01 for name, each in weights.items()}
        worker.begin_update()
        named = list(changed.items())
        for start in range(0, len(named), 5):
            worker.load_named_weights(named[start : start + 5])
        missing = worker.finish_update()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        expected = state(loaded(folder)[0])
        found = state(model)
        different = [name for name, each in found.items() if not torch.equal(each, expected[name])]
        worker.begin_update()
        worker.load_named_weights([each for each in named if "A_log" not in each[0]])
        without = worker.finish_update()
    print(json.dumps({"missing": missing, "different": different, "num": len(found), "without": without}))


if __name__ == "__main__":
    main()
