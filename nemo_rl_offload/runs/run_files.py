"""The JSON files of a run: what stands in each, for those who write and for those who read; and reading them.

What is read is what its type says, or one error names the file and what to do. A key that is not required is missing
in files of earlier versions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, TypeAdapter, ValidationError

from nemo_rl_offload.errors import ConfigError, nearest_beside
from nemo_rl_offload.paged_stash.stats import StashStats
from nemo_rl_offload.specs import documents
from nemo_rl_offload.specs.documents import (
    CONFIG_BYTES,
    RUN_BYTES,
    TOO_LONG_A_LINE,
    DocumentError,
    bounded_lines,
    open_plain,
    parse_json,
    read_bytes,
    read_text,
    read_yaml,
)
from nemo_rl_offload.specs.plain_file import NotPlainError

_MEASURABLE = Field(ge=0, lt=1 << 63)
Amount = Annotated[float, _MEASURABLE]
Count = Annotated[int, _MEASURABLE]
Metric = Annotated[float, BeforeValidator(lambda value: float("nan") if value is None else value)]
"""JSON has null for what is no number."""


def _check_place(place: dict[str, int]) -> dict[str, int]:
    if missing := {"epoch", "position"} - place.keys():
        raise ValueError(f"{min(missing)} is missing")
    return place


class MetricRecord(TypedDict):
    """A line of `metrics.jsonl`."""

    step: Count
    prefix: str
    metrics: dict[str, FiniteFloat | None]


class SampleRecord(TypedDict):
    """A line of `samples.jsonl`: a response of a step, as far as it is kept."""

    step: Count
    prefix: str
    """`validation` or `train`."""
    prompt: str
    """As the model got it, special tokens included."""
    response: str
    """The same of what it said, and of what it was told between turns."""
    reward: FiniteFloat
    truncated: bool
    """Whether its last turn has no end."""
    num_tokens: Count
    """That it sampled."""
    num_turns: Count


class Change(TypedDict):
    """A value of the configuration, as JSON or "absent"."""

    before: str
    after: str


class ChangeRecord(TypedDict):
    """A line of `changes.jsonl`: with what a run goes on otherwise than before."""

    step: Count
    """The last one before."""
    changes: dict[str, Change]
    """By the key's path."""


class Evaluation(TypedDict):
    """`evaluation.json`: what `nemo-rl-offload eval` found."""

    model: str
    num_problems: Count
    num_tests_per_prompt: Count
    k_value: Count
    pass_at_k: Amount
    """Mean over the problems of the chance that one of `k_value` responses is right."""
    standard_error: Amount | None
    """Of that mean; None with one problem."""
    cons_at_k: NotRequired[Amount]
    """With `eval.metric: cons@k`, the mean of the chance that the most frequent of `k_value` answers is right."""
    cons_standard_error: NotRequired[Amount | None]
    accuracy: Amount
    """Share of responses that are right."""
    reward: FiniteFloat
    mean_gen_tokens_per_sample: Amount
    unfinished_fraction: Amount
    scorer_errors: Count
    wall_seconds: Amount


class MemorySample(TypedDict):
    """Memory at a moment of a step."""

    seconds: Amount
    used_bytes: Count
    """Of the device where there is one, else of the process."""
    offloaded_bytes: Count
    """Held for the backward pass in host memory."""


class MemoryOfStep(TypedDict):
    """`memory_trace.json`."""

    step: Count
    samples: Annotated[list[MemorySample], Field(min_length=1)]


class ModuleTotals(TypedDict):
    """Of one offload module, over all its layers and ranks."""

    bytes_out: Count
    bytes_in: Count
    denied_bytes: NotRequired[Count]
    kept_bytes: NotRequired[Count]
    small_bytes: NotRequired[Count]
    num_groups: NotRequired[Count]


class OffloadTotals(TypedDict):
    """Totals of all ranks' engines, as `OffloadStats` means them; null what is not counted, as by Megatron-Core's."""

    engine: str | None
    modules: list[str]
    bytes_out: Count | None
    bytes_in: Count | None
    peak_host_bytes: Count | None
    host_capacity_bytes: NotRequired[Count | None]
    denied_bytes: Count | None
    kept_bytes: NotRequired[Count | None]
    ineffective_bytes: Count | None
    returned_bytes: NotRequired[Count | None]
    demand_reloads: Count | None
    stall_out_ms: NotRequired[Amount | None]
    stall_in_ms: NotRequired[Amount | None]
    copy_ms: NotRequired[Amount | None]
    overlap: NotRequired[Amount | None]
    per_module: dict[str, ModuleTotals]


class MemoryTotals(TypedDict):
    """Of the device of the rank with most, and of all ranks' host memory."""

    peak_device_bytes: Count | None
    """Of tensors; null where there is no device."""
    peak_reserved_bytes: NotRequired[Count | None]
    """What torch's allocator took for them."""
    peak_device_bytes_by_phase: NotRequired[dict[str, Count]]
    device_bytes: NotRequired[dict[str, Count]]
    """Throughout a training step, by what stands there."""
    host_bytes: NotRequired[dict[str, Count]]
    """By what waits there; of activations, the most."""


class RunTotals(TypedDict):
    """Counters of all workers that took part in a run."""

    offload: OffloadTotals
    paged_stash: StashStats | None
    """Null where the experts have no limits."""
    memory: MemoryTotals
    phase_seconds: NotRequired[dict[str, Amount]]
    """Of all steps of training."""


class Validation(TypedDict):
    """Null where there was none, or no number came of it."""

    first: float | None
    last: float | None


class TrainFigures(TypedDict):
    """Of the last step."""

    loss: float | None
    reward: NotRequired[float | None]
    """Of algorithms that generate."""


class LoopSummary(RunTotals):
    """What the loop itself knows of a finished run."""

    algorithm: str
    steps: Count
    seed: Count
    skipped_steps: Count
    validation_metric: str
    validation: Validation
    num_validations: NotRequired[Count]
    train: TrainFigures
    start_seconds: NotRequired[dict[str, Amount]]
    """What the last start of the workers took, by part; parts overlap, and `loading` is their whole."""
    wall_seconds: Amount
    data: NotRequired[dict[str, dict[str, int]]]
    """Of algorithms that learn from given answers: `DataCounts` by section."""


class Summary(LoopSummary):
    """`summary.json`."""

    world_size: Count
    device: str
    restarts: Count
    """Of the workers, since the run was last begun."""
    run_dir: str


class LoopState(TypedDict):
    """Where a loop stands, beside its step."""

    data: Annotated[dict[str, Count], AfterValidator(_check_place)]
    """The place in the data stream: an epoch and a position."""
    validation: Validation
    num_validations: NotRequired[Count]
    train: dict[str, Metric]
    """Metrics of the last step."""
    validation_metrics: dict[str, Metric]
    first_validation_metrics: NotRequired[dict[str, Metric]]
    validation_metric: NotRequired[str]
    """By which validations are judged: with graded rewards another than at the start."""
    num_skipped: Count
    totals: NotRequired[RunTotals]
    wall_seconds: NotRequired[Amount]
    has_optimizer: NotRequired[bool]
    """Whether the checkpoint has the optimizer's state; those that do not say so have."""


class TrainingInfo(LoopState):
    """`training_info.json` of a checkpoint: the driver's own state."""

    step: int
    metric: float | None
    """What checkpoints are ranked by."""


class _Config(TypedDict):
    algorithm: str


def read_config_text(path: Path) -> tuple[str, str]:
    """A run's `config.yaml` as it is, and its algorithm. Raises ConfigError: it cannot be read, or is damaged."""
    with _named(path, "Restore it from a copy."):
        text = read_text(path, CONFIG_BYTES, follows_links=False)
        return text, TypeAdapter(_Config).validate_python(read_yaml(path, follows_links=False))["algorithm"]


def read_json[T](path: Path, kind: type[T], recovery_hint: str) -> T | None:
    """A JSON document that a run writes late; None before. Raises ConfigError: it cannot be read, or is damaged."""
    if not path.exists():
        return None
    with _named(path, recovery_hint):
        return TypeAdapter(kind).validate_python(documents.read_json(path, RUN_BYTES, follows_links=False))


def read_log(path: Path) -> str | None:
    """A log, as far as it is text; None where there is none. Raises ConfigError: it cannot be read."""
    if not path.exists():
        return None
    with _named(path, ""):
        return read_bytes(path, RUN_BYTES, follows_links=False).decode(errors="replace")


def read_records(path: Path) -> Iterator[MetricRecord]:
    """The lines of a run's `metrics.jsonl`, but for what a kill cut off.

    Raises:
        ConfigError: the file cannot be read, or a line is no such record.
    """
    return _read_lines(path, MetricRecord)


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """The lines of a run's `samples.jsonl`, as `read_records` reads them; none without the file."""
    return _read_lines(path, SampleRecord) if path.exists() or path.is_symlink() else iter(())


def read_changes(path: Path) -> Iterator[ChangeRecord]:
    """The lines of a run's `changes.jsonl`, as `read_records` reads them; none without the file."""
    return _read_lines(path, ChangeRecord) if path.exists() or path.is_symlink() else iter(())


def _read_lines[T](path: Path, kind: type[T]) -> Iterator[T]:
    adapter = TypeAdapter(kind)
    with _named(path, ""):
        file = open_plain(path, follows_links=False)
    with file:
        for number, line in enumerate(bounded_lines(file), 1):
            with _named(path, "Remove that line.", f"line {number}: "):
                if line is None:
                    raise ValueError(TOO_LONG_A_LINE)
                try:
                    content = parse_json(line.rstrip(b"\n").decode("utf-8"))
                except UnicodeDecodeError as error:
                    if error.end < len(line.rstrip(b"\n")):  # not cut off within a letter
                        raise
                    continue
                except DocumentError as error:
                    if error.line is None:  # it is JSON
                        raise
                    continue
                record = adapter.validate_python(content)
            yield record


@contextmanager
def _named(path: Path, recovery_hint: str, place: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not path.parent.exists():
            raise ConfigError(
                f"{path.parent}: there is no such folder.{nearest_beside(path.parent, Path.is_dir)} Give that of a run."
            ) from error
        if isinstance(error, FileNotFoundError) and path.name == "config.yaml":
            raise ConfigError(
                f"{path.parent}: is no run directory: it has no config.yaml. Give that of a run."
            ) from error
        if isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{path}: there is none: the run has taken no step yet, or has logger.jsonl_enabled=false. Wait for "
                "one, or give another run."
            ) from error
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        damaged = "" if isinstance(error.__cause__, NotPlainError) else "is damaged: "
        raise ConfigError(f"{path}: {damaged}{place}{_what_is_wrong(error)}. {recovery_hint}") from error


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join([".".join(map(str, first["loc"])), first["msg"]]).removeprefix(": ")
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, DocumentError):
        return error.reason if error.line is None else f"line {error.line}: {error.reason}"
    return str(error).splitlines()[0]
