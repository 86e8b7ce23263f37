"""Writes what is derived from the schema and the exemplars: `python tools/config_reference.py`.

`docs/configuration.md` keeps its hand-written part, down to the mark; the tables below it come from the schema and
from `examples/configs/base.yaml`. `tests/unit/reference_configs/` holds each exemplar as it is after inheritance.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import describe, keys_of

MARK = "<!-- Below: written by `python tools/config_reference.py`. -->\n"
DOCUMENT = PROJECT_ROOT / "docs" / "configuration.md"
EXEMPLARS = PROJECT_ROOT / "examples" / "configs"
REFERENCES = PROJECT_ROOT / "tests" / "unit" / "reference_configs"


def document() -> str:
    """Return `docs/configuration.md` with its tables made anew."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT} has lost the line {MARK}"
    defaults = yaml.safe_load((EXEMPLARS / "base.yaml").read_text(encoding="utf-8"))
    return by_hand + MARK + "".join(f"\n{table}" for table in _tables(MasterConfig, "", defaults))


def references() -> dict[Path, str]:
    """Return the resolved form of each exemplar but `base.yaml`, by the file that keeps it."""
    header = "# Written by `python tools/config_reference.py`.\n"
    return {
        REFERENCES / path.name: header + yaml.safe_dump(load_config(path), sort_keys=False)
        for path in sorted(EXEMPLARS.glob("*.yaml"))
        if path.name != "base.yaml"
    }


def _tables(section: Any, path: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    keys, lines = keys_of(section), _documentation(section)
    values = [key for key in keys if not keys_of(keys[key])]
    if values:
        rows = [
            f"| `{key}` | {_cell(describe(keys[key]))} | `{_cell(_shown(defaults[key]))}` | {_cell(lines[key])} |\n"
            for key in values
        ]
        head = f"### `{path}`\n\n| key | allowed | default | meaning |\n|---|---|---|---|\n"
        yield head + "".join(rows)
    for key in keys:
        if keys_of(keys[key]):
            yield from _tables(keys[key], f"{path}.{key}".lstrip("."), defaults[key])


def _documentation(section: type) -> dict[str, str]:
    """Return the line of each key, from the text below it in the schema; a section may build on another."""
    found: dict[str, str] = {}
    for base in reversed([section, *getattr(section, "__orig_bases__", ())]):
        if keys_of(base):
            body = ast.parse(inspect.getsource(base)).body[0]
            assert isinstance(body, ast.ClassDef)
            for key, text in zip(body.body[::2], body.body[1::2], strict=True):
                assert isinstance(key, ast.AnnAssign)
                assert isinstance(key.target, ast.Name)
                assert isinstance(text, ast.Expr)
                found[key.target.id] = ast.literal_eval(text.value)
    return found


def _shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the files; returns 0."""
    REFERENCES.mkdir(exist_ok=True)
    for path, text in {DOCUMENT: document(), **references()}.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
