"""The files of a run as its report reads them: each is what its type says, or one error names it and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

import yaml
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from nemo_rl_offload.errors import ConfigError

_MEASURABLE = Field(ge=0, lt=1 << 63)
Amount = Annotated[float, _MEASURABLE]
Count = Annotated[int, _MEASURABLE]


class MetricRecord(TypedDict):
    """A line of `metrics.jsonl`."""

    step: Count
    prefix: str
    metrics: dict[str, FiniteFloat | None]


class Sample(TypedDict):
    """A `MemorySample`."""

    seconds: Amount
    used_bytes: Count
    offloaded_bytes: Count


class MemoryOfStep(TypedDict):
    """`memory_trace.json`."""

    step: Count
    samples: Annotated[list[Sample], Field(min_length=1)]


class Moved(TypedDict):
    """Of one module."""

    bytes_out: Count
    bytes_in: Count


class Offload(TypedDict):
    """Totals of all workers; null what is not counted, as by Megatron-Core's engine."""

    engine: NotRequired[str | None]
    per_module: dict[str, Moved]
    peak_host_bytes: Count | None
    denied_bytes: Count | None
    ineffective_bytes: Count | None
    demand_reloads: Count | None
    stall_out_ms: NotRequired[Amount | None]
    stall_in_ms: NotRequired[Amount | None]
    overlap: NotRequired[Amount | None]


class Memory(TypedDict):
    """Null where there is no device."""

    peak_device_bytes: Count | None


class Validation(TypedDict):
    """Null where there was none, or no number came of it."""

    first: float | None
    last: float | None


class Summary(TypedDict):
    """`summary.json`: what the report shows of it."""

    validation_metric: str
    validation: Validation
    wall_seconds: Amount
    world_size: Count
    device: str
    skipped_steps: Count
    restarts: Count
    offload: Offload
    memory: Memory


class _Config(TypedDict):
    algorithm: str


def read_config_text(path: Path) -> tuple[str, str]:
    """A run's `config.yaml` as it is, and its algorithm. Raises ConfigError: it cannot be read, or is damaged."""
    with _named(path, "Restore it from a copy."):
        text = path.read_text(encoding="utf-8")
        return text, TypeAdapter(_Config).validate_python(yaml.safe_load(text))["algorithm"]


def read_json[T](path: Path, kind: type[T]) -> T | None:
    """A JSON document that a run writes late; None before. Raises ConfigError: it cannot be read, or is damaged."""
    if not path.exists():
        return None
    with _named(path, "Move it away, and the page is written without it."):
        return TypeAdapter(kind).validate_json(path.read_bytes())


def read_records(path: Path) -> Iterator[MetricRecord]:
    """The lines of a run's `metrics.jsonl`, but for what a kill cut off.

    Raises:
        ConfigError: the file cannot be read, or a line is no such record.
    """
    with _named(path, ""):
        lines = path.read_bytes().splitlines()
    adapter = TypeAdapter(MetricRecord)
    for number, line in enumerate(lines, 1):
        with _named(path, "Remove that line.", f"line {number}: "):
            text = line.decode("utf-8")
            try:
                record = adapter.validate_json(text)
            except ValidationError as error:
                if error.errors()[0]["type"] == "json_invalid":
                    continue
                raise
        yield record


@contextmanager
def _named(path: Path, way_out: str, place: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Give the folder of a run with logger.jsonl_enabled=true."
        ) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is damaged: {place}{_what_is_wrong(error)}. {way_out}") from error


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]
