"""Compares what a vLLM engine in 8 bits has after updates with weights that are quantized here, on a CPU.

`python tests/functional/vllm_eight_bits.py` prints what it found as JSON. vLLM's kernels of 8 bits need
a GPU or AMX: in their place stands a product with the weights times their scales. What is kept of buckets, when a layer
is quantized, and where it is written, is vLLM's and this project's.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.vllm.settings import engine_env

os.environ |= engine_env(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["policy"]["generation"], "cpu")

import torch
from models import write_model
from safetensors.torch import load_file
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.model_loader.reload import meta
from vllm.platforms.interface import PlatformEnum
from vllm_agreement import SHAPES, changed, hand_over, responses

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm import extension
from nemo_rl_offload.generation.vllm import worker as worker_module
from nemo_rl_offload.generation.vllm.worker import VllmWorker

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class PlainKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
    """[tokens, in] times the weights in the type of the tokens."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, None]:
        return True, None

    def __init__(self, config: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply_block_scaled_mm(self, *_: Tensor) -> Tensor:
        raise NotImplementedError

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        return torch.nn.functional.linear(x, dequantized(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """[out, in] in 8 bits, and a scale for each block of it, as float32."""
    rows, columns = weight.shape
    return weight.float() * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The oracle: block for block, the largest element is the largest number of 8 bits."""
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), []
    for row in range(0, len(weight), BLOCK):
        scales.append([])
        for column in range(0, weight.shape[1], BLOCK):
            block = weight[row : row + BLOCK, column : column + BLOCK].float()
            scale = block.abs().max().clamp(min=1e-4) / LARGEST
            values[row : row + BLOCK, column : column + BLOCK] = (block * (1.0 / scale)).to(torch.float8_e4m3fn)
            scales[-1].append(scale)
    return values, torch.tensor(scales)


def expected(weights: dict[str, Tensor], path: str) -> Tensor:
    *parents, name = path.split(".")
    return torch.cat([weights[".".join([*parents, part, "weight"])] for part in PARTS.get(name, (name,))])


def different(model: torch.nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """The layers that are not what their weights make, in 8 bits or not."""
    found = []
    for path, layer in model.named_modules():
        scale = getattr(layer, "weight_scale_inv", None)
        if scale is None:
            continue
        values, scales = quantized(expected(weights, path))
        is_narrow = layer.weight.dtype == values.dtype
        is_same = is_narrow and torch.equal(layer.weight.view(torch.uint8), values.view(torch.uint8))
        if not (is_same and torch.equal(scale, scales)):
            found.append(path)
    return found


def main() -> dict[str, Any]:
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [PlainKernel]
    worker_module.is_in_eight_bits = lambda _: False  # type: ignore[attr-defined]  # which a CPU is refused
    make = meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda description: make(description).zero_()  # as memory may be
    extension.find_lacking_parts()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model("qwen2", path, **SHAPES["qwen2"] | {"hidden_size": 192, "intermediate_size": 320})
        weights = {name: weight.bfloat16() for name, weight in load_file(path / "model.safetensors").items()}
        overrides = [
            f"policy.model_name={path}",
            "policy.precision=bfloat16",
            "policy.generation.backend=vllm",
            "policy.generation.vllm_cfg.precision=fp8",
            "policy.generation.vllm_cfg.num_last_layers_in_bf16=1",
            "policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj]",
        ]
        policy = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
        worker = VllmWorker(policy, path, (1,), can_sleep=False)
        model = worker._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        layers = {path for path, each in model.named_modules() if hasattr(each, "weight_scale_inv")}
        said: dict[str, Any] = {"layers": sorted(layers), "different": [different(model, weights)]}
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        prompt = [[3, 4, 5, 6, 7]]
        for update in range(3):
            weights = {name: each.bfloat16() for name, each in changed(weights, update).items()}
            hand_over(worker, weights)
            said["different"].append(different(model, weights))
            answer = responses(worker, prompt, 0, [0], Sampling(4, top_k=1))[0]
            said["finite"] = all(abs(each) < 100 for each in answer.logprobs)
        said["different_with_others"] = len(different(model, changed(weights, 9)))
        said["same_places"] = addresses == [parameter.data_ptr() for parameter in model.parameters()]
        said["missing"] = []
        for lacking in (
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.norm.weight",
        ):
            given = {name: each for name, each in weights.items() if name != lacking}
            try:
                hand_over(worker, given)
            except ConfigError as error:
                said["missing"].append(str(error))
        hand_over(worker, weights)
        said["different"].append(different(model, weights))
    return said


if __name__ == "__main__":
    print(json.dumps(main()))
