"""The schema's sections by their paths, for advice on a key that is not where it was looked for."""

from collections.abc import Iterator, Sequence
from typing import Any

from nemo_rl_offload.config.full_schema import full_schema
from nemo_rl_offload.config.types import item_type, keys_of
from nemo_rl_offload.errors import nearest


def section_at(path: Sequence[str]) -> Any:
    """Return the annotation of a section, None where the schema has none."""
    annotation: Any = full_schema()
    for part in path:
        annotation = keys_of(annotation).get(part, item_type(annotation, dict))
    return annotation


def may_be_added(key: str, section: Any) -> bool:
    """Whether the schema takes this key there: it is one of the section's, or the section takes any."""
    return key in keys_of(section) or section is Any or item_type(section, dict) is not None


def right_place(key: str, section: Any) -> str:
    """Return the nearest key of the section, else the section of another place that has this very key."""
    return nearest(key, keys_of(section)) or next(
        (f" It belongs to {path}." for path, keys in _sections(full_schema(), "") if path and key in keys), ""
    )


def _sections(annotation: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    keys = keys_of(annotation)
    yield path, keys
    for key, child in keys.items():
        yield from _sections(child, f"{path}.{key}".lstrip("."))
