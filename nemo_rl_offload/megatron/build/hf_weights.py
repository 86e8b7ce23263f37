"""Whether the weights of a Hugging Face folder and those of the model that it describes are the same ones.

Bridge goes through Megatron's parameters and looks for each one's weights. What it does not find it logs, and what
nobody asked for it passes over. Here both are compared by name before a weight is read: a parameter without a name in
Hugging Face's format, a weight that is missing, and a weight that no parameter reads are refused, but for the few that
other weights or `config.json` make superfluous (`_superfluous`). So an export, which goes through the same names and
those of weights that the folder holds twice (`repeated_names`), has every weight of the folder.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.lora import is_adapter

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
    from megatron.core.models.gpt import GPTModel
    from transformers import PretrainedConfig

_QUANTIZED = re.compile(r"(_scale_inv|_blocks|_scales)$")
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHARED = {"embed_tokens.weight": _EMBEDDING, "shared_head.head.weight": _TIED_HEAD}
"""What a layer that predicts a further token uses of the model; public folders hold it again below that layer."""
_LEFT_OUT = "policy.megatron_cfg.mtp_num_layers"
"""Key that leaves layers out which predict further tokens."""
_WITH_MTP_APART = ("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose layers that predict further tokens are named `mtp`, and not counted on behind the others."""
_SHOWN = 4


def check_names(auto_bridge: "AutoBridge", chunks: Sequence["GPTModel"], source: object) -> None:
    """Compare the names of a folder's weights with those that the model's parameters read. Every rank takes part.

    Raises ConfigError with the names that differ; `source`, the folder, begins the message.
    """
    problems = list(_problems(auto_bridge, chunks))
    if problems:
        raise ConfigError("\n".join(f"policy.model_name: {source}: {problem}" for problem in problems))


def names_read(auto_bridge: "AutoBridge", chunks: Sequence["GPTModel"]) -> set[str]:
    """Hugging Face's names of all parameters of the model, on whatever rank they are. Every rank takes part.

    Bridge tells those of all pipeline stages, and of this rank's experts.
    """
    from megatron.core import parallel_state

    here = {name for task in auto_bridge.get_conversion_tasks(list(chunks)) if task for name in _names(task.mapping)}
    group = parallel_state.get_expert_model_parallel_group()
    everywhere: list[set[str]] = [set()] * group.size()
    dist.all_gather_object(everywhere, here, group=group)
    return set().union(*everywhere)


def repeated_names(auto_bridge: "AutoBridge") -> dict[str, str]:
    """Names of a folder's weights that are other weights again, of layers that predict further tokens, with those."""
    there = set(auto_bridge.hf_pretrained.state.source.get_all_keys())
    return {name: whole for name, whole in possible_repeats(auto_bridge).items() if name in there}


def possible_repeats(auto_bridge: "AutoBridge") -> dict[str, str]:
    """The same, whether the folder has them or not; some of Bridge's exports do."""
    config = getattr(auto_bridge.hf_pretrained, "config", auto_bridge.hf_pretrained)
    further = range(config.num_hidden_layers, _num_layers(config))
    return {f"model.layers.{layer}.{name}": whole for layer in further for name, whole in _SHARED.items()}


def _num_layers(config: "PretrainedConfig") -> int:
    """With those that predict further tokens."""
    return int(config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", None) or 0))


def _names(mapping: "MegatronParamMapping") -> Sequence[str]:
    return [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())


def _problems(auto_bridge: "AutoBridge", chunks: Sequence["GPTModel"]) -> Iterator[str]:
    if nameless := _without_name(auto_bridge, chunks):
        yield f"Megatron-Bridge has no name for {_listed(nameless)}, which could be neither read nor exported"
        return
    read, there = names_read(auto_bridge, chunks), set(auto_bridge.hf_pretrained.state.source.get_all_keys())
    config, repeated = auto_bridge.hf_pretrained.config, repeated_names(auto_bridge)
    parts = {name: _QUANTIZED.sub("", name) for name in there if getattr(config, "quantization_config", None)}
    whole = set(parts.values())
    if missing := sorted(read - whole - there):
        count = f"{len(missing)} of {len(read)} weights"
        is_further = all(name.startswith("mtp.") or _layer_of(name) >= config.num_hidden_layers for name in missing)
        fix = f"Set {_LEFT_OUT} to 0." if is_further else "Is the download complete?"
        yield f"{count} are not in the folder: {_listed(missing)}. {fix}"
    if config.tie_word_embeddings and not _is_again(auto_bridge, there, _TIED_HEAD, _EMBEDDING):
        yield f"{_TIED_HEAD} is not {_EMBEDDING}, and its config.json says tie_word_embeddings. Set it to false."
    for name, other in repeated.items():
        if not _is_again(auto_bridge, there, name, other):
            yield f"{name} is not {other}, which is trained in its place. Set {_LEFT_OUT} to 0."
    known = read | repeated.keys() | set(_superfluous(config, there))
    if unread := sorted(name for name in there if name not in known and parts.get(name) not in known):
        yield (
            f"{len(unread)} weights of the folder are no part of the model that its config.json describes: "
            f"{_listed(unread)}. Training it would leave them out."
        )


def _without_name(auto_bridge: "AutoBridge", chunks: Sequence["GPTModel"]) -> list[str]:
    model_bridge = auto_bridge._model_bridge
    table = model_bridge.mapping_registry()
    names = model_bridge._megatron_global_param_names_all_pp_ranks(list(chunks))
    is_tied = chunks[0].config.share_embeddings_and_output_weights
    own = (name.replace(".to_wrap.", ".") for name in names if not is_adapter(name))
    asked = (name for name in own if not (is_tied and "output_layer" in name))
    return [name for name in asked if table.megatron_to_hf_lookup(name) is None]


def _is_again(auto_bridge: "AutoBridge", there: set[str], name: str, other: str) -> bool:
    """Whether a weight is another one again; true where one of them is not there."""
    if not {name, other} <= there:
        return True
    pair = auto_bridge.hf_pretrained.state.source.load_tensors([name, other])
    return torch.equal(pair[name], pair[other])


def _superfluous(config: "PretrainedConfig", there: set[str]) -> Iterator[str]:
    """Buffers that are computed, a head that is the embedding, and layers that config.json does not count."""
    leaves_mtp_out = config.model_type in _WITH_MTP_APART and _num_layers(config) == config.num_hidden_layers
    for name in there:
        is_left_out = name.startswith("mtp.") if leaves_mtp_out else _layer_of(name) >= _num_layers(config)
        if name.endswith("rotary_emb.inv_freq") or is_left_out:
            yield name
    if config.tie_word_embeddings and _TIED_HEAD in there:
        yield _TIED_HEAD


def _layer_of(name: str) -> int:
    """The layer that a weight belongs to, counted from 0; -1 for none."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if number is None else int(number[1])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
