"""Quantization-aware training: the model's weights hold what they are worth in NVFP4, and learn in float32.

Mechanism. Beside weights in bfloat16 an optimizer keeps main weights in float32, and writes the former from the latter
at the end of a step. Here they are then quantized where they lie. So every forward, every backward's product with a
weight, every export and every engine has the quantized weight, and the gradient with respect to it goes to the main
weight as it is (a straight-through estimator). It costs no memory, and time once a step instead of once a product.

Rejected: quantizers in front of every product (ModelOpt's, for models of any kind). Autograd would keep a second copy
of each weight from forward to backward, and every microbatch would quantize anew what has not changed.

Limits. The scale of a whole weight follows the weight; ModelOpt's stays what it was at the start, which clips where a
weight grows. Quantizing twice changes nothing where a block's largest element is at least 1/28,672 of the weight's,
below which scales of E4M3 are coarse. A weight is quantized as Megatron has it: queries, keys and values together, gate
and up together, each expert alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.mamba import TorchMambaMixer
from nemo_rl_offload.specs.quantization import WEIGHT, Quantization

E2M1_MAX, E4M3_MAX = 6.0, 448.0
_PART_ELEMENTS = 1 << 24
"""Of a weight, so many are quantized at a time: what that needs besides is float32, several times."""


def nvfp4(x: Tensor, block: int, amax: Tensor) -> Tensor:
    """What `x` [..., in] is worth in NVFP4, in its dtype, computed in float32.

    `block` neighbours along the last axis share a scale, their largest magnitude / 6, which is rounded to E4M3 as a
    multiple of amax / (6 * 448); `amax`, 0-dim float32, is the largest magnitude of all. Elements are rounded to E2M1,
    ties to even. As ModelOpt's kernel (`nvfp4_scalar_qdq`); a block whose scale is rounded to zero becomes zero.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, block)
    # A tensor on both sides: by a number, a GPU multiplies with its reciprocal, and differs from a CPU in the last bit.
    unit = amax / torch.full_like(amax, E2M1_MAX * E4M3_MAX)
    unit = torch.where(unit > 0, unit, 1.0)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = (largest / (E2M1_MAX * unit)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * unit
    scaled = blocks / torch.where(scale > 0, scale, 1.0)
    magnitude = scaled.abs().clamp(max=E2M1_MAX)
    spacing = torch.where(magnitude > 4, 2.0, torch.where(magnitude > 2, 1.0, 0.5))
    rounded = (magnitude / spacing).round() * spacing
    return (rounded * scale).copysign(scaled).reshape(x.shape).to(x.dtype)


@dataclass(frozen=True)
class _Weight:
    parameter: Parameter
    block: int
    is_of_experts: bool


class WeightQuantizer:
    """Quantizes the weights of this rank's model chunks where they lie.

    Raises ConfigError where blocks do not fit a weight's rows.
    """

    def __init__(self, modules: Sequence[GPTModel], quantization: Quantization) -> None:
        self._weights = list[_Weight]()
        for name, linear in named_linears(modules):
            if (block := quantization.block(f"{name}.{WEIGHT}")) is None:
                continue
            for key, parameter in linear.named_parameters(recurse=False):
                if not key.startswith("weight"):
                    continue
                if parameter.shape[-1] % block:
                    raise ConfigError(
                        f"policy.quant_cfg: {name} has rows of {parameter.shape[-1]} elements on a rank, which are no "
                        f"multiple of {block}. Leave it out, or change tensor_model_parallel_size."
                    )
                is_of_experts = not getattr(parameter, "allreduce", True)
                self._weights.append(_Weight(parameter, block, is_of_experts))

    @torch.no_grad()
    def apply(self) -> None:
        """Quantize them, on all ranks together, for a weight's largest magnitude is that of all its parts."""
        for of_experts in (False, True):
            weights = [each for each in self._weights if each.is_of_experts == of_experts]
            if not weights:
                continue
            amax = torch.stack([_largest(each.parameter) for each in weights])
            group = (
                parallel_state.get_expert_tensor_parallel_group()
                if of_experts
                else parallel_state.get_tensor_model_parallel_group()
            )
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            for weight, of_all in zip(weights, amax, strict=True):
                for part in _parts(weight.parameter):
                    part.copy_(nvfp4(part, weight.block, of_all))


def _largest(weight: Tensor) -> Tensor:
    low, high = torch.aminmax(weight)
    return torch.maximum(-low, high).float()


def _parts(weight: Parameter) -> Sequence[Tensor]:
    return torch.split(weight.detach(), max(1, _PART_ELEMENTS // weight.shape[-1]))


def named_linears(modules: Sequence[GPTModel]) -> list[tuple[str, Module]]:
    """Linear layers and their names, as those of a model that is whole."""
    found = []
    for model in modules:
        names = {f"decoder.layers.{place}": layer for place, layer in enumerate(model.decoder.layers)}
        for name, module in model.named_modules():
            # Megatron's, Transformer Engine's and those in plain torch have no class in common.
            if not type(module).__name__.endswith("Linear"):
                continue
            prefix = next((each for each in names if name.startswith(f"{each}.")), None)
            if prefix is not None:
                name = _in_whole_model(name, prefix, names[prefix])
            found.append((name, module))
    return found


def _in_whole_model(name: str, prefix: str, layer: BaseTransformerLayer) -> str:
    """Megatron counts a pipeline stage's layers from 0, and calls a Mamba-2 layer's part `mixer`."""
    inner = name.removeprefix(f"{prefix}.")
    if isinstance(getattr(layer, "self_attention", None), TorchMambaMixer):
        inner = inner.replace("self_attention.", "mixer.", 1)
    return f"decoder.layers.{layer.layer_number - 1}.{inner}"
