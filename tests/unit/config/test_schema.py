import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter

from nemo_rl_offload.config import schema, sections
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import Count, defaults_of, describe, forwarded, keys_of


def defaults(section: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, what it allows and its default; the keys of a section at their own places."""
    given = defaults_of(section)
    for key, allowed in keys_of(section).items():
        yield from defaults(allowed) if keys_of(allowed) else [(key, allowed, given[key])]


def test_every_key_has_a_default_that_it_allows() -> None:
    """But for what must be given, and for what is made of other keys."""
    checked = 0
    for key, allowed, default in defaults(MasterConfig):
        if not isinstance(default, str) or not default.startswith(("???", "${")):
            config = None if keys_of(allowed) else ConfigDict(strict=True)
            assert TypeAdapter(allowed, config=config).validate_python(default) == default, key
            checked += 1
    assert checked > 190


def test_keys_are_marked_for_megatron() -> None:
    as_they_are, unless_null = (forwarded(schema.MegatronConfig, unless_null=which) for which in (False, True))
    assert "tensor_model_parallel_size" in as_they_are
    assert "moe_aux_loss_coeff" in unless_null
    assert not set(as_they_are) & set(unless_null)
    assert "enabled" not in {*as_they_are, *unless_null}


def test_markers_say_nothing_about_what_is_allowed() -> None:
    assert keys_of(schema.MegatronConfig)["moe_per_layer_logging"] is bool
    assert keys_of(schema.MegatronConfig)["min_offloaded_tensor_size"] == Count


def test_every_key_has_a_line_of_documentation() -> None:
    modules = [schema, *(import_module(f"{sections.__name__}.{each.name}") for each in iter_modules(sections.__path__))]
    found = [node for module in modules for node in ast.parse(inspect.getsource(module)).body]
    classes = [node for node in found if isinstance(node, ast.ClassDef)]
    assert sorted(section.name for section in classes) == sorted(schema.__all__)
    for section in classes:
        for key, text in zip(section.body[::2], section.body[1::2], strict=True):
            assert isinstance(key, ast.AnnAssign), ast.unparse(section)
            assert isinstance(text, ast.Expr), ast.unparse(key)
            assert isinstance(text.value, ast.Constant), ast.unparse(key)


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (
            schema.ActivationOffloadConfig,
            "host_memory_budget",
            'a number above 0 up to 1, or text like "72GiB"',
        ),
        (schema.ClusterConfig, "gpus_per_node", "a whole number above 0, or 'auto'"),
        (schema.MegatronConfig, "offload_modules", "a list of text, or 'auto', or null"),
        (schema.MegatronConfig, "env_vars", "a mapping of text to text, or null"),
        (schema.CpuAffinityConfig, "map", "a mapping of whole numbers from 0 to whole numbers from 0, or null"),
        (schema.MegatronConfig, "optimizer", "a section of keys"),
        (schema.OptimizerConfig, "adam_beta1", "a number from 0 below 1"),
        (schema.PolicyConfig, "precision", "'float32' or 'bfloat16'"),
        (schema.GRPOConfig, "normalize_rewards", "true or false"),
        (schema.ReasoningGymConfig, "params", "a mapping of text to values"),
        (schema.ValidationDataConfig, "exclude", "a list of sections"),
        (schema.AdvEstimatorConfig, "reward_weights", "a list of numbers, or null"),
        (schema.ProfileConfig, "steps", "a list of whole numbers above 0"),
    ],
)
def test_types_in_words(section: type, key: str, words: str) -> None:
    assert describe(keys_of(section)[key]) == words
