"""The table of NeMo-RL's keys is whole, and says what is true of each."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_offload.config.full_schema import may_be_added, section_at
from nemo_rl_offload.config.nemo_rl.table import COMMIT, Row, rows, sections
from nemo_rl_offload.config.recipe import read_recipe
from nemo_rl_offload.config.sources import LoadedConfig
from nemo_rl_offload.config.types import keys_of
from nemo_rl_offload.config.validation import examine

TYPED_KEYS = Path(__file__).with_name("typed_keys.txt").read_text(encoding="utf-8").splitlines()
OF_A_TYPE = {"bool": True, "int": 3, "num": 0.5, "text": "x", "list": ["x"], "map": {"x": 1}, "seq": [{"name": "x"}]}
WRONG = {"bool": "x", "int": "x", "num": "x", "text": 3, "list": "x", "map": "x", "seq": "x"}
REFUSED = [row for row in rows().values() if row.verdict in ("only", "refused")]


def in_schema(path: str) -> bool:
    *parents, key = path.split(".")
    return may_be_added(key, section_at(parents))


def given(values: Mapping[str, Any], tmp_path: Path) -> LoadedConfig:
    """A configuration with these values at these paths, of which none leads through another."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *parents, key = path.split(".")
        section = nested
        for part in parents:
            section = section.setdefault(part, {})
        section[key] = value
    file = tmp_path / "given.yaml"
    file.write_text(yaml.safe_dump(nested))
    return read_recipe(file)


def apart(found: Iterable[Row]) -> list[list[Row]]:
    """Rows in groups of which none has a path that leads through another's."""
    listed = list(found)
    outer = [row for row in listed if any(other.path.startswith(f"{row.path}.") for other in listed)]
    outermost = [row for row in outer if any(other.path.startswith(f"{row.path}.") for other in outer)]
    return [
        [row for row in listed if row not in outer],
        [row for row in outer if row not in outermost],
        outermost,
    ]


def test_every_typed_key_of_nemo_rl_is_known() -> None:
    assert COMMIT.split()[0] in TYPED_KEYS[0] + TYPED_KEYS[1]
    keys = [line for line in TYPED_KEYS if not line.startswith("#")]
    assert len(keys) > 300
    open_sections = [row.path for row in rows().values() if row.is_open]
    unknown = [
        key
        for key in keys
        if not (in_schema(key) or key in rows() or key in sections())
        and not any(key.startswith(f"{section}.") for section in open_sections)
    ]
    assert unknown == []


def test_every_row_says_why() -> None:
    for row in rows().values():
        assert row.reason, row
        assert row.types.rstrip("?") in OF_A_TYPE, row
        assert bool(row.values) is (row.verdict == "only"), row
        assert bool(row.feature) is (row.verdict in ("only", "refused")), row


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    for group in apart(rows().values()):
        wrong = {row.path: WRONG[row.types.rstrip("?")] for row in group}
        refused = given(wrong, tmp_path).refused
        assert {path: refused.get(path, "")[: len(json.dumps(value))] for path, value in wrong.items()} == {
            path: json.dumps(value) for path, value in wrong.items()
        }


def test_a_refusal_names_the_feature_and_its_hint_works(tmp_path: Path) -> None:
    for group in apart(REFUSED):
        others = {
            row.path: False if row.values[:1] and row.values[0] is True else OF_A_TYPE[row.types.rstrip("?")]
            for row in group
        }
        refused, hints = given(others, tmp_path).refused, {}
        for row in group:
            text = refused[row.path]
            assert f"{row.feature}, not supported here: {row.reason}" in text
            if match := re.search(r"Set it to (\S+?)( or \S+)?\.$", text):
                hints[row.path] = json.loads(match[1])
            else:
                assert text.endswith(f"Remove it: ~{row.path}")
        assert not hints.keys() & given(hints, tmp_path).refused.keys()


def test_misspelt_keys_are_named_with_the_nearest(tmp_path: Path) -> None:
    for path, nearest in (
        ("loss_fn.force_on_policy_rato", "force_on_policy_ratio"),
        ("loss_fn.disable_ppo_rato", "disable_ppo_ratio"),
        ("policy.dtensor_cfg.tensor_paralel_size", "tensor_parallel_size"),
        ("policy.generation.vllm_cfg.enforce_eagr", "enforce_eager"),
        ("teacher.megatron_cfg.tensor_model_paralel_size", "tensor_model_parallel_size"),
        ("policy.dtensor_cfgg.x", "dtensor_cfg"),
    ):
        found = examine(given({path: 1}, tmp_path), run_here=False)
        named = {problem.path: problem.message for problem in found.problems}
        at = next(name for name in named if path.startswith(name))
        assert f"unknown key. Did you mean '{nearest}'?" in named[at]


def test_sections_of_the_table_are_those_of_the_schema_or_of_nemo_rl() -> None:
    for section in sections() - rows().keys():
        keys = [line for line in TYPED_KEYS if line.startswith(f"{section}.")]
        assert keys or keys_of(section_at(section.split("."))), section
