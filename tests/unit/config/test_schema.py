import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from nemo_rl_offload.config import data_schema, megatron_schema, schema
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import describe, keys_of


def leaves(annotation: Any, path: str = "") -> Iterator[str]:
    for key, child in keys_of(annotation).items():
        name = f"{path}.{key}".lstrip(".")
        yield from leaves(child, name) if keys_of(child) else [name]


def yaml_leaves(node: dict[str, Any], sections: set[str], path: str = "") -> Iterator[str]:
    for key, child in node.items():
        name = f"{path}.{key}".lstrip(".")
        yield from yaml_leaves(child, sections, name) if name in sections else [name]


def test_base_yaml_has_exactly_the_keys_of_the_schema(configs: Path) -> None:
    expected = list(leaves(MasterConfig))
    sections = {leaf.rsplit(".", depth)[0] for leaf in expected for depth in range(1, leaf.count(".") + 1)}
    base = yaml.safe_load((configs / "base.yaml").read_text())
    assert sorted(yaml_leaves(base, sections)) == sorted(expected)


def test_base_yaml_explains_every_value(configs: Path) -> None:
    lines = (configs / "base.yaml").read_text().splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    values = [(above, line) for above, line in pairs if re.match(r"\s*\w+: \S", line)]
    assert len(values) == len(list(leaves(MasterConfig)))
    assert [line for above, line in values if " # " not in line and not above.lstrip().startswith("#")] == []


@pytest.mark.parametrize("module", [schema, data_schema, megatron_schema])
def test_every_key_has_a_line_of_documentation(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    for section in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for key, text in zip(section.body[::2], section.body[1::2], strict=True):
            assert isinstance(key, ast.AnnAssign), ast.unparse(section)
            assert isinstance(text, ast.Expr), ast.unparse(key)
            assert isinstance(text.value, ast.Constant), ast.unparse(key)


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (
            megatron_schema.ActivationOffloadConfig,
            "host_memory_budget",
            'a number above 0 up to 1, or text like "72GiB"',
        ),
        (schema.ClusterConfig, "gpus_per_node", "a whole number above 0, or 'auto'"),
        (megatron_schema.MegatronConfig, "offload_modules", "a list of text, or 'auto', or null"),
        (megatron_schema.MegatronConfig, "env_vars", "a mapping of text to text, or null"),
        (megatron_schema.CpuAffinityConfig, "map", "a mapping of whole numbers to whole numbers, or null"),
        (megatron_schema.MegatronConfig, "optimizer", "a section of keys"),
        (megatron_schema.OptimizerConfig, "adam_beta1", "a number from 0 below 1"),
        (schema.PolicyConfig, "precision", "'float32' or 'bfloat16'"),
        (schema.GRPOConfig, "normalize_rewards", "true or false"),
        (data_schema.ReasoningGymConfig, "params", "a mapping of text to values"),
        (data_schema.ValidationDataConfig, "exclude", "a list of sections"),
    ],
)
def test_types_in_words(section: type, key: str, words: str) -> None:
    assert describe(keys_of(section)[key]) == words
