"""Changed configurations: any value anywhere, or values that a key of `policy.megatron_cfg` may well have."""

import copy
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from nemo_rl_offload.config.rules.cuda_graphs import CUDA_GRAPH_MODULES
from nemo_rl_offload.config.rules.megatron import RECOMPUTE_MODULES
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.config.validation import check_config
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.specs.offload_modules import SUPPORTED_MODULES

NUMBERS = [-1, 0, 1, 2.5, float("nan")]
TEXTS = ["", "???", "auto", "8GiB", "attn_proj"]
ANYTHING = st.sampled_from([None, True, *NUMBERS, *TEXTS, [], ["moe_act"], [1], {}, {"a": 1}, {1: 2}])
LISTS = {
    "offload_modules": (*SUPPORTED_MODULES, "fused_group_mlp", "expert_fc2"),
    "recompute_modules": (*RECOMPUTE_MODULES, "attn"),
    "cuda_graph_modules": (*CUDA_GRAPH_MODULES, "core_attn"),
    "target_modules": ("linear_proj", "linear_qkv", "linear_q", "*.layers.0.*.linear_fc2", "linear"),
    "exclude_modules": ("output_layer", "linear_proj"),
}
OFFLOAD = ("fine_grained_activation_offloading", "offload_modules")
TOPICS: list[tuple[str, ...]] = [
    (*OFFLOAD, "recompute_granularity", "recompute_modules"),
    (*OFFLOAD, "cuda_graph_", "fine_grained_offloading_max"),
    ("cuda_graph_", "recompute_"),
    ("recompute_", "activation_checkpointing"),
    ("tensor_model", "sequence_parallel", "expert_model", "pipeline_model", "virtual_", "num_layers", "batch_p2p"),
    ("moe_router", "moe_aux", "moe_token", "moe_flex", "moe_shared", "moe_expert_rank"),
    ("lr_", "start_", "end_", "weight_", "lr", "min_lr", "use_distributed", "overlap_"),
    ("",),
]
"""Beginnings of keys that rules join."""
OVERRIDES = [{}, {"attention_softmax_in_fp32": True}, {"init_method_std": 0.01}, {"num_layers": 2}, {"use_mup": True}]


def nodes(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all keys and items."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


def leaves(annotation: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and type of each key that holds a value."""
    for key, child in keys_of(annotation).items():
        yield from leaves(child, (*path, key)) if keys_of(child) else [((*path, key), child)]


def set_at(root: Any, path: tuple[Any, ...], value: Any) -> None:
    """Change one value in place."""
    for part in path[:-1]:
        root = root[part]
    root[path[-1]] = value


def plausible(key: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Values of the right type for a key, some of them out of range."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if key == "model_overrides":
        return st.sampled_from(OVERRIDES)
    if origin in (Union, UnionType):
        return st.one_of(*(plausible(key, argument) for argument in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(st.sampled_from(LISTS[key]), max_size=2, unique=True)
    if origin is dict:
        return st.just({})
    if origin is Annotated:
        return plausible(key, arguments[0])
    by_type = {bool: [True, False], int: [0, 1, 2, 3], float: [0.0, 0.01, 0.5, 1.0, 1.5], str: ["8GiB", "8GB"]}
    return st.none() if annotation is type(None) else st.sampled_from(by_type[annotation])


@st.composite
def megatron_changes(draw: st.DrawFn) -> dict[tuple[str, ...], Any]:
    """Changed keys of `policy.megatron_cfg`: all or some of a topic, and up to two others; path below it and value."""
    keys = {path: annotation for path, annotation in leaves(MegatronConfig) if path != ("enabled",)}
    beginnings = draw(st.sampled_from(TOPICS))
    topic = [path for path in keys if path[-1].startswith(beginnings)]
    chosen = draw(st.sampled_from([topic[:8], draw(st.lists(st.sampled_from(topic), max_size=4, unique=True))]))
    chosen += draw(st.lists(st.sampled_from(list(keys)), max_size=2, unique=True))
    return {path: draw(plausible(path[-1], keys[path])) for path in chosen}


def mutate(data: st.DataObject, raw: Any) -> None:
    """Drop, rename, retype or contradict one to three keys in place."""
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, key = data.draw(st.sampled_from(sorted(nodes(raw), key=str)))
        parent: Any = raw
        for part in parents:
            parent = parent[part]
        match data.draw(st.sampled_from(["drop", "rename", "retype"])):
            case "drop":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[f"{key}_"] = parent.pop(key)
            case _:
                parent[key] = copy.deepcopy(data.draw(ANYTHING))


def refused(raw: dict[str, Any]) -> list[str]:
    """The lines of the error; none where the configuration is accepted."""
    sections = set(raw)
    try:
        checked = check_config(raw)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        assert head == f"configuration: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
        assert all(line.split(":")[0] for line in lines), lines
        return lines
    assert set(checked.config) == sections
    return []
