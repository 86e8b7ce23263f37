"""Writes what is derived from the schema and the exemplars: `python tools/config_reference.py`.

`examples/configs/base.yaml`, the file of defaults, comes from the schema alone: keys, defaults, and as comments the
line below each key and what stands between keys. `docs/configuration.md` keeps its hand-written part, down to the mark;
the tables below it come from the schema too. `tests/unit/reference_configs/` holds what each exemplar changes of the
defaults, after inheritance and interpolation.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from nemo_rl_offload.config.loader import BASE, PROJECT_ROOT, load_config, read_config
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.config.types import defaults_of, describe, keys_of

MARK = "<!-- Below: written by `python tools/config_reference.py`. -->\n"
DOCUMENT = PROJECT_ROOT / "docs" / "configuration.md"
REFERENCES = PROJECT_ROOT / "tests" / "unit" / "reference_configs"
_HEADER = """\
# The defaults, written by `python tools/config_reference.py` from nemo_rl_offload/config/schema.py. Other files inherit
# them (`defaults: base.yaml`) and hold what differs; `???` marks what they must give.
"""
_COMMENT_COLUMN, _WIDTH = 44, 120


@dataclass(frozen=True)
class _Written:
    """What the schema's source says of a key besides its annotation."""

    above: list[str]
    """Comments and blank lines above it."""
    meaning: str
    """The text below it."""


def base() -> str:
    """Return `examples/configs/base.yaml`."""
    return _HEADER + "".join(f"{line}\n" for line in _yaml_lines(MasterConfig, 0, defaults_of(MasterConfig)))


def document() -> str:
    """Return `docs/configuration.md` with its tables made anew."""
    by_hand, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT} has lost the line {MARK}"
    tables = _tables(MasterConfig, "", defaults_of(MasterConfig))
    return by_hand + MARK + "".join(f"\n{table}" for table in tables)


def references() -> dict[Path, str]:
    """Return what each exemplar but `base.yaml` changes of that, by the file that keeps it."""
    header = "# What the exemplar changes of base.yaml, written by `python tools/config_reference.py`.\n"
    defaults = read_config(BASE).values
    return {
        REFERENCES / path.name: header + yaml.safe_dump(_changes(load_config(path), defaults), sort_keys=False)
        for path in sorted(BASE.parent.glob("*.yaml"))
        if path != BASE
    }


def _yaml_lines(section: Any, depth: int, defaults: Mapping[str, Any]) -> Iterator[str]:
    keys, written, margin = keys_of(section), _written(section), "  " * depth
    for key, annotation in keys.items():
        is_section = bool(keys_of(annotation))
        yield from [] if depth else [""]
        yield from (f"{margin}{comment}".rstrip() for comment in written[key].above)
        pair = f"{margin}{key}:" if is_section else f"{margin}{key}: {_shown(defaults[key])}"
        meaning, choices = f"# {written[key].meaning.removesuffix('.')}", _choices(annotation, written[key].meaning)
        if len(line := f"{pair:{_COMMENT_COLUMN - 2}}  {meaning}{choices}") <= _WIDTH:
            yield line
        elif len(comment := f"{margin}{meaning}{choices}") <= _WIDTH:
            yield from (comment, pair)
        else:
            yield from (f"{margin}{meaning}", f"{margin}#{choices}", pair)
        if is_section:
            yield from _yaml_lines(annotation, depth + 1, defaults[key])


def _choices(annotation: Any, meaning: str) -> str:
    """The names that a key allows, where its line does not say them all."""
    names = [name for part in (annotation, *get_args(annotation)) for name in _names(part)]
    return "" if len(names) < 2 or all(name in meaning for name in names) else f" [{' | '.join(names)}]"


def _names(annotation: Any) -> list[str]:
    return [str(name) for name in get_args(annotation)] if get_origin(annotation) is Literal else []


def _changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    assert values.keys() == defaults.keys()
    changes = {}
    for key, value in values.items():
        if isinstance(value, dict) and value.keys() == defaults[key].keys():
            if inner := _changes(value, defaults[key]):
                changes[key] = inner
        elif value != defaults[key]:
            changes[key] = value
    return changes


def _tables(section: Any, path: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    keys, written = keys_of(section), _written(section)
    values = [key for key in keys if not keys_of(keys[key])]
    if values:
        rows = [
            f"| `{key}` | {_cell(describe(keys[key]))} | `{_cell(_shown(defaults[key]))}` | "
            f"{_cell(written[key].meaning)} |\n"
            for key in values
        ]
        head = f"### `{path}`\n\n| key | allowed | default | meaning |\n|---|---|---|---|\n"
        yield head + "".join(rows)
    for key in keys:
        if keys_of(keys[key]):
            yield from _tables(keys[key], f"{path}.{key}".lstrip("."), defaults[key])


def _written(section: type) -> dict[str, _Written]:
    """Return what the source says of each key; a section may build on another."""
    found: dict[str, _Written] = {}
    for owner in reversed([section, *getattr(section, "__orig_bases__", ())]):
        if keys_of(owner):
            source = inspect.getsource(owner)
            (body,) = ast.parse(source).body
            assert isinstance(body, ast.ClassDef)
            lines, end = source.splitlines(), body.body[0].lineno - 1
            for key, text in zip(body.body[::2], body.body[1::2], strict=True):
                assert isinstance(key, ast.AnnAssign)
                assert isinstance(key.target, ast.Name)
                assert isinstance(text, ast.Expr)
                above = [line.strip() for line in lines[end : key.lineno - 1]]
                found[key.target.id] = _Written(above, ast.literal_eval(text.value))
                assert text.end_lineno is not None
                end = text.end_lineno
    return found


def _shown(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=_WIDTH).removesuffix("\n...\n").strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the files; returns 0."""
    REFERENCES.mkdir(exist_ok=True)
    BASE.write_text(base(), encoding="utf-8")
    for path, text in {DOCUMENT: document(), **references()}.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
