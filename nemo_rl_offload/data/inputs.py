"""Which files a run reads, by the keys that name them, and what it means for a run when they changed.

Of a user's function the file of its own module counts, not what that imports.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl_offload.config.algorithms import ALGORITHMS
from nemo_rl_offload.config.loader import (
    path_of_quantization,
    resolve_data_path,
    resolve_model_path,
    resolve_tokenizer_path,
)
from nemo_rl_offload.config.rules.machine import find_module
from nemo_rl_offload.config.rules.rule import Get, algorithm_spec
from nemo_rl_offload.config.rules.tasks import FUNCTION, SPLITS, is_scored_by_function, takes_problems
from nemo_rl_offload.config.schema import MasterConfig
from nemo_rl_offload.data.records import files_of
from nemo_rl_offload.errors import NemoRLOffloadError
from nemo_rl_offload.runs.inputs import FileMark, Inputs, changes, mark_of, told
from nemo_rl_offload.specs.quantization import NAMED

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.json", "chat_template.jinja"),
    "additional_chat_templates/*",
)
"""By the names that transformers gives them."""
CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin")


class _Source(NamedTuple):
    """Files that belong together, and what it means when they changed."""

    key: str
    base: Path
    files: Sequence[Path]
    meaning: str
    are_weights: bool = False
    keeps_content: bool = False

    @property
    def name(self) -> str:
        """What the files are known by, in the run's record."""
        return f"{self.key} (weights)" if self.are_weights else self.key

    def marks(self) -> dict[str, FileMark]:
        """Of the files that can be read, by their names below the base."""
        marks = {
            file.name if file == self.base else str(file.relative_to(self.base)): mark_of(
                file, samples=self.are_weights, keeps_content=self.keeps_content
            )
            for file in self.files
        }
        return {name: mark for name, mark in marks.items() if mark is not None}


def read_inputs_of(config: MasterConfig) -> Inputs:
    """Sizes and checksums of all files that a run of this configuration reads."""
    found: Inputs = {}
    for source in _sources(config):
        found.setdefault(source.name, {}).update(source.marks())
    return found


def changed_inputs(config: MasterConfig, there: Inputs, here: Inputs) -> Iterator[str]:
    """A line for each key whose files are not what they were: which ones, and what that means."""
    for source in _sources(config):
        if found := _changed(source, there, here.get(source.name, {})):
            yield f"{source.key}: changed since this run was last started: {told(source.base, found)}. {source.meaning}"


def changed_beside_weights(config: MasterConfig, there: Inputs) -> Iterator[str]:
    """A line for each key whose files, beside the weights, an export writes and that are not what they were."""
    for source in _of_an_export(_reader(config)):
        if not source.are_weights and (found := _changed(source, there, source.marks())):
            yield (
                f"{source.key}: changed since the run was last started: {told(source.base, found)}. The export has "
                "what they say now."
            )


def changed_frozen_weights(config: MasterConfig, there: Inputs) -> str:
    """A line where a run has adapters, and the weights that they belong to are not what they were; else empty."""
    if not config["policy"]["megatron_cfg"]["peft"]["enabled"]:
        return ""
    for source in _model(_reader(config), keeps_reference=False):
        if source.are_weights and (found := _changed(source, there, source.marks())):
            return (
                f"{source.key}: changed since this run was last started: {told(source.base, found)}. Its checkpoints "
                "have adapters alone, which belong to the weights that were there. Bring those back."
            )
    return ""


def _changed(source: _Source, there: Inputs, here: Mapping[str, FileMark]) -> dict[str, str]:
    """Files of a source that differ; none where it is not known what they were."""
    return changes(there[source.name], here, source.base) if source.name in there else {}


def _sources(config: MasterConfig) -> Iterator[_Source]:
    """All of them; what is not there is left out, as the run itself says that."""
    get = _reader(config)
    keeps_reference = ALGORITHMS[config["algorithm"]].keeps_reference(config)
    model = partial(_model, keeps_reference=keeps_reference)
    for find in (_data, model, _quantization, _tokenizer, _template, _teacher, _function):
        try:
            yield from find(get)
        except (NemoRLOffloadError, OSError):
            continue


def _reader(config: MasterConfig) -> Get:
    values: Any = config
    return lambda path: reduce(getitem, path.split("."), values)


def _data(get: Get) -> Iterator[_Source]:
    for split in SPLITS:
        path = get(f"{split}.path")
        if path is None or takes_problems(get):
            continue
        meaning = (
            "The run keeps its place in the data and goes on there in what they are now: some may be learned twice, "
            "and others never."
            if split == "data.train"
            else "Validation before and after cannot be compared."
        )
        sections = [(split, get(split))]
        sections += [(f"{split}.further.{number}", each) for number, each in enumerate(get(split).get("further", ()))]
        for name, section in sections:
            base = resolve_data_path(section["path"])
            yield _Source(f"{name}.path", base, files_of(base, section["split"]), meaning)


def _model(get: Get, *, keeps_reference: bool) -> Iterator[_Source]:
    key = "policy.model_name"
    base = resolve_model_path(get(key))
    meaning = "The checkpoint's weights go on in the model, and with the end tokens, that the files describe now."
    yield _Source(key, base, _matching(base, CONFIG_FILES), meaning, keeps_content=True)
    meaning = "That has no effect on this run: its weights come from its checkpoint."
    if keeps_reference:
        meaning = (
            "The weights come from the checkpoint, but the reference model is read from these files again: from here "
            "on the loss keeps the policy near another model."
        )
    yield _Source(key, base, _matching(base, WEIGHT_FILES), meaning, are_weights=True)


def _tokenizer(get: Get) -> Iterator[_Source]:
    base = resolve_tokenizer_path(get("policy.tokenizer.name"))
    meaning = "From here on text is encoded, rendered and ended in their way, which is not what was trained."
    yield _Source("policy.tokenizer.name", base, _matching(base, TOKENIZER_FILES), meaning)


def _template(get: Get) -> Iterator[_Source]:
    setting = get("policy.tokenizer.chat_template")
    if setting is not None and "{" not in setting:
        file = resolve_data_path(setting)  # the name of a template of the tokenizer's is no file
        yield _Source("policy.tokenizer.chat_template", file, [file], "From here on turns are rendered in its way.")


def _quantization(get: Get) -> Iterator[_Source]:
    name = get("policy.quant_cfg")
    if name is not None and name not in NAMED:
        file = Path(path_of_quantization(name))
        yield _Source("policy.quant_cfg", file, [file], "From the next step on weights are quantized as it says now.")


def _of_an_export(get: Get) -> Iterator[_Source]:
    yield from _model(get, keeps_reference=False)
    for find in (_tokenizer, _template):
        with suppress(NemoRLOffloadError):
            yield from find(get)


def _teacher(get: Get) -> Iterator[_Source]:
    name = get("teacher.model_name")
    if algorithm_spec(get).needs_teacher and name is not None:
        base = resolve_model_path(name)
        meaning = "From here on the policy learns from this teacher."
        yield _Source("teacher.model_name", base, _matching(base, CONFIG_FILES), meaning, keeps_content=True)
        yield _Source("teacher.model_name", base, _matching(base, WEIGHT_FILES), meaning, are_weights=True)


def _function(get: Get) -> Iterator[_Source]:
    path = get(f"{FUNCTION}.path")
    if not is_scored_by_function(get) or path is None:
        return
    module = path.partition(":")[0]
    found = sys.modules[module].__spec__ if module in sys.modules else find_module(module)
    if found is not None and not isinstance(found, str) and found.origin:
        file = Path(found.origin)
        yield _Source(f"{FUNCTION}.path", file, [file], "From here on rewards come from the new source.")


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
