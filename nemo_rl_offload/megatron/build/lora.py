"""Adapters in a built model, by Megatron-Bridge's modules: LoRA in its form for fused linears and the canonical one.

Bridge's modules wrap a linear and add the adapter's output to its own. They know Megatron's and Transformer Engine's
linears by their classes; `_attributes` tells them of this project's. Everything else that Bridge's `LoRA` does when it
is called is done here:

- Which linears: `specs/lora.py` decides by paths of the whole model, and Bridge is told the modules of a chunk by name.
- Parts: Bridge's canonical modules have all parts of a linear. Those without a target are frozen at zero.
- How adapters begin: Bridge draws them from the rank's random numbers, in the order in which the rank builds its
  layers. Here an adapter's numbers follow from the seed and its path, so that every layout begins with the same ones.
- Autograd: nothing before the first adapter needs a gradient, and a recomputed region whose input needs none never
  runs its backward, nor has an offloaded one a gradient to come back for. The first layer's input needs one always;
  that costs the backward of what stands before the first adapter. (Bridge does it for full recomputation.)

What is frozen has no gradient buffer and no optimizer state: Megatron makes both for parameters that need gradients.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_offload.config.schema import PeftConfig, PolicyConfig
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.layers.mamba import TorchMambaMixer
from nemo_rl_offload.megatron.layers.norms import TorchLayerNormColumnParallelLinear
from nemo_rl_offload.megatron.layers.torch_experts import (
    TorchGroupedLinear,
    TorchRowParallelGroupedLinear,
    has_expert_groups,
)
from nemo_rl_offload.specs.lora import HEAD, PARTS, parts_named

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj", HEAD)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def register_lora(provider: Any, policy: PolicyConfig) -> None:
    """Have the provider's chunks built with adapters, all other parameters frozen."""
    provider.gradient_accumulation_fusion = False  # past the sum of an expert adapter's gradients over its ranks
    if getattr(provider, "moe_router_enable_expert_bias", False):
        provider.moe_router_bias_update_rate = 0.0  # the bias is the model's
    provider.register_pre_wrap_hook(partial(_attach, peft=policy["megatron_cfg"]["peft"]))


@contextmanager
def adapters_off(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let the chunks compute what the model without adapters does."""
    wrappers = _wrappers(chunks)
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()


def bridge_lora(peft: PeftConfig, targets: Sequence[str] = (), *, canonical: bool = False) -> Any:
    """Bridge's LoRA with the section's values, for modules by these names."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.lora import LoRA

    keys = ("dim", "alpha", "dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method")
    values: dict[str, Any] = {key: peft[key] for key in keys}  # type: ignore[literal-required]
    if canonical:
        return CanonicalLoRA(target_modules=list(targets), **values)
    values |= {key: peft[key] for key in ("a2a_experimental", "share_expert_adapters")}
    return LoRA(target_modules=list(targets), **values)


def _attach(chunks: list[nn.Module], peft: PeftConfig) -> list[nn.Module]:
    from megatron.bridge.peft.walk_utils import walk

    _teach_bridge()
    for chunk in chunks:
        chunk.requires_grad_(False)
        named = _targets(chunk, peft)
        wholes = [path for path, names in named.items() if path.rpartition(".")[2] in names]
        of_parts = [path for path in named if path not in wholes]
        parts = [f"{path.rpartition('.')[0]}.{part}" for path in of_parts for part in PARTS[path.rpartition(".")[2]]]
        for targets, canonical in ((wholes, False), (parts, True)):
            if targets:
                walk(chunk, bridge_lora(peft, targets, canonical=canonical).transform)
        if HEAD in wholes:
            chunk.output_layer.adapter.register_forward_hook(_gather, with_kwargs=True)  # type: ignore[union-attr]
        _name_parts(chunk)
        _interleave_own_heads(chunk)
        _initialize(chunk, peft)
        for path in of_parts:
            _freeze_parts(chunk.get_submodule(path), named[path])
        if chunk.pre_process:
            chunk.decoder.register_forward_pre_hook(_need_gradient, with_kwargs=True)  # type: ignore[union-attr]
    if not any(weight.requires_grad for chunk in chunks for weight in chunk.parameters()):
        raise ConfigError(
            "policy.megatron_cfg.peft.target_modules: a pipeline stage has no adapter, and so nothing to train. Name "
            "modules of all stages, or lower pipeline_model_parallel_size."
        )
    return chunks


def _gather(adapter: Any, _: object, kwargs: dict[str, Any], output: Tensor) -> Tensor:
    """An adapter's part of the logits, whole where the output layer is asked for whole ones."""
    if not kwargs["runtime_gather_output"]:
        return output
    return gather_from_tensor_model_parallel_region(output, group=adapter.tp_group)  # type: ignore[no-any-return]


def _need_gradient(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    hidden_states = kwargs["hidden_states"]
    if torch.is_grad_enabled() and hidden_states is not None and not hidden_states.requires_grad:
        kwargs = {**kwargs, "hidden_states": hidden_states.detach().requires_grad_()}
    return args, kwargs


def _targets(chunk: nn.Module, peft: PeftConfig) -> dict[str, set[str]]:
    """Of each linear that gets an adapter, by its path in the chunk: its name, or those of its parts."""
    found = {}
    for path, _ in chunk.named_modules():
        before, _, name = path.rpartition(".")
        if name not in LINEARS:
            continue
        is_of_experts = before.endswith(".experts")
        names = parts_named(_in_model(chunk, path), is_of_experts, peft["target_modules"], peft["exclude_modules"])
        if names is not None:
            found[path] = names
    return found


def _freeze_parts(wrapper: Any, names: set[str]) -> None:
    """Let adapters of parts that are not named add nothing, ever."""
    for name, adapter in wrapper.adapter.items():
        if not any(part.endswith(name.removeprefix("adapter")) for part in names):
            for weight in adapter.parameters():
                weight.data.zero_()
                weight.requires_grad = False


def _name_parts(chunk: nn.Module) -> None:
    """Bridge takes every adapter of a module by the name linear_fc1 for one of gate and up together, and cuts its rows
    in two for a checkpoint; also the adapter of one of them."""
    from megatron.bridge.peft.canonical_lora import LoRALinearSplitFC1UpGate

    wrappers: list[Any] = [module for module in chunk.modules() if isinstance(module, LoRALinearSplitFC1UpGate)]
    for wrapper in wrappers:
        for name, adapter in wrapper.adapter.items():
            adapter.base_linear_name = f"{adapter.base_linear_name.rpartition('.')[0]}.{name}"


def _interleave_own_heads(chunk: nn.Module) -> None:
    """Bridge interleaves queries, keys and values by the heads of all tensor-parallel ranks, a rank's own ones of
    several tokens taken together; it ends in an error where those do not come out even."""
    from megatron.bridge.peft.canonical_lora import LoRALinearSplitQKV

    def interleave(head_dim: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_groups = key.shape[-1] // head_dim
        parts = [each.reshape(*each.shape[:-1], num_groups, -1) for each in (query, key, value)]
        return torch.cat(parts, dim=-1).flatten(-2)

    wrappers: list[Any] = [module for module in chunk.modules() if isinstance(module, LoRALinearSplitQKV)]
    for wrapper in wrappers:
        wrapper._interleave_qkv = partial(interleave, wrapper.to_wrap.config.kv_channels)


def _in_model(chunk: Any, path: str) -> str:
    """A path in a chunk with the layer's number in the whole model."""
    if (found := _LAYER.match(path)) is None:
        return path
    number = chunk.decoder.layers[int(found[1])].layer_number - 1
    return f"decoder.layers.{number}.{path[found.end() :]}"


def _wrappers(chunks: Sequence[nn.Module]) -> list[Any]:
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, AdapterWrapper)]


def _initialize(chunk: nn.Module, peft: PeftConfig) -> None:
    """Give an adapter numbers that follow from the seed and its path alone, whoever holds which part of it."""
    from megatron.bridge.peft.utils import GroupedExpertLinearAdapter

    methods = {"linear_in": peft["lora_A_init_method"], "linear_out": peft["lora_B_init_method"]}
    for path, adapter in chunk.named_modules():
        if not hasattr(adapter, "base_linear_name"):
            continue
        is_each_experts = isinstance(adapter, GroupedExpertLinearAdapter)
        for name, method in methods.items():
            weight, place = getattr(adapter, name).weight, f"{_in_model(chunk, path)}.{name}"
            if is_each_experts:
                first = adapter.num_local_experts * parallel_state.get_expert_model_parallel_rank()
                for number, own in enumerate(weight.data):
                    axis = weight.partition_dim - 1
                    own.copy_(_drawn(own, axis, [own.shape[axis]], method, f"{place}{first + number}", adapter))
                continue
            axis = weight.partition_dim
            mixer: Any = chunk.get_submodule(path.removesuffix(".adapter").rpartition(".")[0])
            has_parts = (
                isinstance(mixer, TorchMambaMixer) and path.endswith(".in_proj.adapter") and name == "linear_out"
            )
            sizes = mixer.parts if has_parts else [weight.shape[axis]]
            weight.data.copy_(_drawn(weight, axis, sizes, method, place, adapter))
            if adapter.is_expert:
                _mark_of_experts(weight, adapter.config)


def _drawn(weight: Tensor, axis: int, sizes: Sequence[int], method: str, place: str, adapter: Any) -> Tensor:
    """This rank's part of a matrix that is drawn whole, like `weight`; `sizes` along `axis` of what all ranks share."""
    from megatron.bridge.peft.utils import ParallelLinearAdapter

    group = adapter.tp_group if hasattr(adapter, "tp_group") else adapter.expert_tp_group
    shape = list(weight.shape)
    shape[axis] *= group.size()
    whole = torch.empty(shape, dtype=torch.float32)
    with _seeded(place):
        ParallelLinearAdapter._get_init_fn(adapter, method)(whole)
    shared = torch.split(whole, [size * group.size() for size in sizes], axis)
    return torch.cat([part.chunk(group.size(), axis)[group.rank()] for part in shared], axis)


def _mark_of_experts(weight: Any, config: TransformerConfig) -> None:
    """Tell Megatron who has the same weight: the adapter that all experts share, on whatever rank they are.

    Its gradients are reduced like those of experts, also where tensor-parallel ranks hold whole ones; Bridge sums them
    over expert-parallel ranks before. The norm of gradients counts it once.
    """
    weight.allreduce = not has_expert_groups(config)
    weight.shared = parallel_state.get_expert_model_parallel_rank() > 0


@contextmanager
def _seeded(name: str) -> Iterator[None]:
    """Random numbers of the CPU that follow from a name and the run's seed; those of others go on as they were."""
    generator = torch.default_generator
    seed, state = generator.initial_seed(), generator.get_state()
    generator.manual_seed((seed + zlib.crc32(name.encode())) & 0xFFFFFFFF)
    try:
        yield
    finally:
        generator.set_state(state)


@cache
def _teach_bridge() -> None:
    """Let Bridge's forms of LoRA know this project's linears; once for a process."""
    from megatron.bridge.peft import canonical_lora, lora

    for module in (lora, canonical_lora):
        module.get_adapter_attributes_from_linear = partial(_attributes, module.get_adapter_attributes_from_linear)


def _attributes(known: Callable[..., Any], linear: Any, *args: object, **kwargs: object) -> Any:
    """What Bridge asks of a linear that gets an adapter. Its own answer needs Transformer Engine's classes."""
    from megatron.bridge.peft.utils import AdapterAttributes

    if isinstance(linear, TorchGroupedLinear):
        weight: Any = linear.weight0
        outputs, inputs = weight.shape
        is_row_parallel = isinstance(linear, TorchRowParallelGroupedLinear)
    elif isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        outputs, inputs = linear.output_size, linear.input_size
        is_row_parallel = isinstance(linear, RowParallelLinear)
        if isinstance(linear, TorchLayerNormColumnParallelLinear):
            linear.return_layernorm_output = True  # which is the adapter's input
    else:
        return known(linear, *args, **kwargs)
    has_own_exchange = getattr(linear, "explicit_expert_comm", False)
    return AdapterAttributes(
        input_is_parallel=is_row_parallel,
        in_features=inputs,
        out_features=outputs,
        disable_tensor_parallel_comm=has_own_exchange,
        disable_sequence_parallel_comm=has_own_exchange or not linear.config.sequence_parallel,
        base_linear_is_parallel=True,
    )
