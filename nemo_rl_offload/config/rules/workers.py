"""Rules about what workers are started with: environment variables, and fields of Megatron-Core by name.

Megatron's field names and their types are read from its sources, since importing it takes seconds. What a field means
together with others is Megatron's own to check, when its objects are built; a warning says where that can happen.
"""

import ast
import typing
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, megatron
from nemo_rl_offload.config.schema import MegatronConfig
from nemo_rl_offload.config.types import describe, keys_of
from nemo_rl_offload.errors import nearest

SET_BY_GROUP = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONUNBUFFERED"),
)
"""Environment variables that this project sets for each worker itself."""

_OWNERS = {
    "the model's folder, whose weights must fit": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
        "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq add_bias_linear add_qkv_bias "
        "gated_linear_unit normalization qk_layernorm multi_latent_attention mtp_num_layers"
    ),
    "policy.precision": "params_dtype pipeline_dtype autocast_dtype enable_autocast bf16 fp16",
    "this project": (
        "attention_dropout hidden_dropout use_cpu_initialization perform_initialization moe_grouped_gemm "
        "calculate_per_token_loss variable_seq_lengths bias_dropout_fusion deallocate_pipeline_outputs"
    ),
}
_OWNER_OF = {name: owner for owner, names in _OWNERS.items() for name in names.split()}
_YAML_TYPES = {
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict)},
    **{name: getattr(typing, name) for name in ("Optional", "Union", "Literal", "List", "Dict")},
}


def _env_vars(get: Get) -> Iterator[str]:
    for name in megatron(get, "env_vars") or {}:
        if name in SET_BY_GROUP:
            yield f"{MEGATRON}.env_vars.{name}: is set for each worker by this project. Remove it."


def _model_overrides(get: Get) -> Iterator[str]:
    overrides = megatron(get, "model_overrides")
    fields = transformer_fields() if overrides else {}
    for name, value in overrides.items():
        path = f"{MEGATRON}.model_overrides.{name}"
        if name in keys_of(MegatronConfig):
            yield f"{path}: has a key of its own. Set {MEGATRON}.{name} instead."
        elif name in _OWNER_OF:
            yield f"{path}: is set by {_OWNER_OF[name]}. Remove it."
        elif name not in fields:
            yield f"{path}: Megatron-Core's TransformerConfig has no such field.{nearest(str(name), fields)}"
        elif (annotation := _annotation(fields[name])) is None:
            yield f"{path}: its type, {fields[name]}, cannot be written in YAML. Remove it."
        elif not _is_of_type(value, annotation):
            yield f"{path}: {value!r} is not allowed. Allowed: {describe(annotation)}."


def _annotation(source: str) -> Any:
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if not names <= _YAML_TYPES.keys() | {"None"}:
        return None
    return eval(source, {"__builtins__": {}}, _YAML_TYPES)


def _is_of_type(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def transformer_fields() -> dict[str, str]:
    """Return the fields of Megatron-Core's TransformerConfig, each with the text of its type."""
    return {
        node.target.id: ast.unparse(node.annotation)
        for section in _config_classes()
        for node in section.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@cache
def _fields_that_megatron_checks() -> set[str]:
    checks = [
        node
        for section in _config_classes()
        for node in section.body
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
    ]
    return {node.attr for check in checks for node in ast.walk(check) if isinstance(node, ast.Attribute)}


@cache
def _config_classes() -> list[ast.ClassDef]:
    package = find_spec("megatron.core")
    assert package is not None
    assert package.submodule_search_locations
    root = Path(package.submodule_search_locations[0])
    sources = {
        "ModelParallelConfig": "model_parallel_config.py",
        "TransformerConfig": "transformer/transformer_config.py",
    }
    return [
        node
        for name, file in sources.items()
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]


WORKER_RULES: tuple[Rule, ...] = (_env_vars, _model_overrides)


def _left_to_megatron(get: Get) -> Iterator[str]:
    for name in megatron(get, "model_overrides"):
        is_refused = name in keys_of(MegatronConfig) or name in _OWNER_OF
        if name in _fields_that_megatron_checks() and not is_refused:
            yield f"{MEGATRON}.model_overrides.{name}: Megatron-Core's own rules for it are checked when workers start."


WORKER_WARNINGS: tuple[Rule, ...] = (_left_to_megatron,)
