"""Prompts and answers of records whose keys are named: by the configuration, or since the data set is a known one."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from random import Random
from typing import cast

from nemo_rl_offload.config.loader import resolve_data_path
from nemo_rl_offload.config.schema import (
    FurtherTrainingDataConfig,
    FurtherValidationDataConfig,
    TrainingDataConfig,
    ValidationDataConfig,
)
from nemo_rl_offload.data.forms import BESIDE_TURNS
from nemo_rl_offload.data.program_tests import SETUP
from nemo_rl_offload.data.records import Record, read_section
from nemo_rl_offload.errors import DataError
from nemo_rl_offload.specs.data_sets import columns_of
from nemo_rl_offload.specs.documents import TEMPLATE_BYTES, DocumentError, read_text

type _OneTraining = TrainingDataConfig | FurtherTrainingDataConfig
type _OneValidation = ValidationDataConfig | FurtherValidationDataConfig


def training_records(section: TrainingDataConfig, answer: str | None) -> tuple[list[Record], list[Record]]:
    """The records of `data.train`, and those of them that are for validation; ``answer`` as in `records_of`.

    Of several data sets they stand one after the other. Raises DataError as `records_of` and `split_off` do.
    """
    kept, drawn = list[Record](), list[Record]()
    for name, one in _each(section, "data.train"):
        records = records_of(one, name, answer)
        if size := one["split_validation_size"]:
            records, held = split_off(records, size, one["seed"], name)
            drawn += held
        kept += records
    return kept, drawn


def validation_records(section: ValidationDataConfig, answer: str | None) -> list[Record]:
    """The records of `data.validation`; none without a path. Raises DataError as `records_of` does."""
    if section["path"] is None:
        return []
    return [record for name, one in _each(section, "data.validation") for record in records_of(one, name, answer)]


def _each[S: (_OneTraining, _OneValidation)](section: S, name: str) -> Iterator[tuple[str, S]]:
    yield name, section
    for number, further in enumerate(section["further"]):  # type: ignore[typeddict-item]
        yield f"{name}.further.{number}", further


def records_of(section: _OneTraining | _OneValidation, name: str, answer: str | None) -> list[Record]:
    """Read the records of one data set, prompt and answer under `prompt` and ``answer`` where their keys are named.

    ``name`` is the section's path. Without ``answer`` records are pairs, which have two, and keep their other columns.
    Raises DataError as `read_section` does.
    """
    assert section["path"] is not None
    records = read_section(name, resolve_data_path(section["path"]), section["split"])
    columns = dict(columns_of(section["path"]))
    for key, target in (("input_key", "prompt"), ("output_key", "answer")):
        if (given := section[key]) is not None:  # type: ignore[literal-required]
            columns[target] = given
    if columns:
        sources = {answer if target == "answer" and answer else target: source for target, source in columns.items()}
        keys = {source: f" ({name}.{key})" for key in ("input_key", "output_key") if (source := section[key])}
        records = [_renamed(record, sources, keys, name, answer) for record in records]
    if (most := section["max_samples"]) is not None and most < len(records):
        chosen = sorted(Random(f"{section['seed']}/max_samples").sample(range(len(records)), most))
        records = [records[place] for place in chosen]
    return records * int(cast("ValidationDataConfig", section).get("repeat", 1))


def split_off(
    records: Sequence[Record], size: float, seed: int, name: str = "data.train"
) -> tuple[list[Record], list[Record]]:
    """Cut records into those for training and those for validation: a share below 1, else a number, drawn by `seed`.

    Raises:
        DataError: there are no records, or none would be left to train on.
    """
    if not records:
        raise DataError(f"{name}.path: the data set is empty. Give one with records.")
    num = int(size) if size >= 1 else ceil(size * len(records))
    if num >= len(records):
        raise DataError(
            f"{name}.split_validation_size: {size:g} of {len(records)} records leaves none to train on. Lower it."
        )
    chosen = set(Random(f"{seed}").sample(range(len(records)), num))
    return (
        [record for place, record in enumerate(records) if place not in chosen],
        [record for place, record in enumerate(records) if place in chosen],
    )


def text_around(path: str | None) -> str:
    """The text of `data.prompt_file`, with the question's place at `{}`; just that without a file.

    Raises:
        DataError: the file cannot be read, or is no such text.
    """
    if path is None:
        return "{}"
    key = "data.prompt_file"
    text, question = read_text_file(key, path), "\0question\0"
    try:
        has_place = question in text.format(question)
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise DataError(
            f"{key}: {path} has braces that are not the question's place, {{}}: {error}. Double them."
        ) from error
    if not has_place:
        raise DataError(
            f"{key}: {path} has no place for the question, so that all prompts would be alike. Put {{}} there."
        )
    return text


def read_text_file(key: str, path: str) -> str:
    """The text of a small file that a key names. Raises DataError where it cannot be read."""
    file: Path = resolve_data_path(path)
    try:
        text = read_text(file, TEMPLATE_BYTES)
    except OSError as error:
        raise DataError(f"{key}: {file} cannot be read: {error.strerror}") from error
    except DocumentError as error:
        raise DataError(f"{key}: {error}. Give a text file.") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _renamed(
    record: Record, columns: Mapping[str, str], keys: Mapping[str, str], name: str, answer: str | None
) -> Record:
    """Its columns under other names; of the others a prompt, an answer, what tests begin with and what a conversation
    has beside its turns, or of a pair all.

    `keys` says who named a column, and ``name`` is the section's path.
    """
    if isinstance(record.content, str):
        return record
    beside = set(BESIDE_TURNS) - {source.partition("####")[0].partition(".")[0] for source in columns.values()}
    named = {"prompt", answer, *SETUP, *(beside if answer == "completion" else ())}
    kept = record.content if answer is None else named & record.content.keys()
    found: dict[str, object] = {key: record.content[key] for key in kept}
    has = ", ".join(record.content) or "no keys"
    for target, source in columns.items():
        path, mark, _ = source.partition("####")
        value: object = record.content
        for part in path.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif (
                isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit() and int(part) < len(value)
            ):
                value = value[int(part)]
            else:
                why = f"has nothing under {path}{keys.get(source, '')}; it has {has}"
                if "messages" in record.content and source in keys:
                    key = keys[source].strip(" ()")
                    why += f". The configuration names that column, and messages need none: {key}=null"
                return Record(record.place, why)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        found[target] = value.rpartition(mark)[2].strip() if mark and isinstance(value, str) else value
    if answer == "completion":
        for target, key in (("prompt", "input_key"), ("completion", "output_key")):
            if target not in found:
                return Record(
                    record.place, f"has nothing under {target}, and {name}.{key} names no column; it has {has}"
                )
    return Record(record.place, found)
